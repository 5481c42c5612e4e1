"""One vLLM of vllm_modes.py: a model in one mode, its outputs after each step of the mode, what was dispatched how.

The result is a compressed JSON file. vLLM's own output is the log. A step that fails is a record with its error.
"""

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

PROMPT, PROMPTS, TOKENS, LOGPROBS = 16, 16, 6, 100
"""Tokens of a prompt, prompts of the first call (the second has one), tokens of an answer, log-probabilities."""
CACHE_BYTES = 64 << 20
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "tp2": {"tensor_parallel_size": 2},
    "lora": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
    "sleep": {"enable_sleep_mode": True},
}
"""Mode -> options of vLLM; all but `eager` are compiled and in CUDA graphs."""
Step = tuple[str, Callable[[], object], bool]
"""(name, what is done before the outputs, with the adapter)."""


def worker_report(worker: Any) -> dict[str, str]:
    """How the products of a worker were dispatched: runs in the worker."""
    from gemmpipe.runtime import dispatch_report

    return dict(dispatch_report())


def load_directly(model: Any, folder: str) -> int:
    """Load a checkpoint into the model's own parameters, as trainers do: runs in the worker."""
    from safetensors.torch import load_file

    return len(model.load_weights(load_file(f"{folder}/model.safetensors").items()))


class Engine:
    """A vLLM with the steps of a mode."""

    def __init__(self, folder: Path, mode: str) -> None:
        """Start it."""
        from vllm import LLM

        from gemmpipe.plugins.vllm import register

        register()  # also where the package has no entry point, as in a source tree; workers are forks
        self.folder, self.mode = folder, mode
        self.llm = LLM(model=str(folder / "a"), **self.options())

    def options(self) -> dict[str, Any]:
        """vLLM's options."""
        return {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 64,
            "max_num_seqs": PROMPTS,
            "max_num_batched_tokens": PROMPTS * PROMPT,
            "gpu_memory_utilization": 0.01,  # only checked against what is free: the next line decides
            "kv_cache_memory_bytes": CACHE_BYTES,
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
            "max_logprobs": LOGPROBS,
            "compilation_config": {"cudagraph_capture_sizes": [1, PROMPTS]},
            **OPTIONS[self.mode],
        }

    def outputs(self, adapter: bool = False) -> list[dict[str, Any]]:
        """Tokens and log-probabilities of 16 prompts in one batch and of one prompt alone."""
        from vllm import SamplingParams

        request = None
        if adapter:
            from vllm.lora.request import LoRARequest

            request = LoRARequest("adapter", 1, str(self.folder / "adapter"))
        chosen = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=LOGPROBS)
        given = [
            {"prompt_token_ids": [(7919 * (i + 1) + 104729 * j) % 8192 for j in range(PROMPT)]}
            for i in range(PROMPTS + 1)
        ]
        parts = [given[:PROMPTS], given[PROMPTS:]]
        found = [
            each for part in parts for each in self.llm.generate(part, chosen, use_tqdm=False, lora_request=request)
        ]
        return [
            {
                "tokens": list(each.outputs[0].token_ids),
                "logprobs": [{t: round(v.logprob, 5) for t, v in at.items()} for at in each.outputs[0].logprobs],
            }
            for each in found
        ]

    def reload(self, part: str) -> None:
        """vLLM's own reload of a checkpoint into the weights that it serves."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder / part)})

    def sleep(self, level: int, part: str = "") -> None:
        """Sleep and wake up; after level 2 the weights are those of a checkpoint."""
        self.llm.sleep(level=level)
        if level == 1:
            self.llm.wake_up()
            return
        self.llm.wake_up(tags=["weights"])
        self.reload(part)
        self.llm.wake_up(tags=["kv_cache"])

    def load(self, part: str) -> None:
        """The model's own `load_weights`, without vLLM's processing of weights."""
        self.llm.apply_model(partial(load_directly, folder=str(self.folder / part)))

    def steps(self) -> Iterator[Step]:
        """The steps of the mode, in their order."""
        yield "first", lambda: None, False
        yield "again", lambda: None, False
        if self.mode == "lora":
            yield "adapter", lambda: None, True
            yield "without", lambda: None, False
        if self.mode == "sleep":
            yield "woken", partial(self.sleep, 1), False
            yield "reloaded", partial(self.sleep, 2, "a"), False
            yield "replaced", partial(self.sleep, 2, "b"), False
        if self.mode in ("graphs", "tp2"):
            yield "updated", partial(self.reload, "b"), False
            yield "restored", partial(self.reload, "a"), False
        if self.mode in ("graphs", "eager") and self.folder.name == "dense_bf16":
            yield "loaded", partial(self.load, "b"), False

    def kernels(self) -> dict[str, list[float]]:
        """Kernels of one batch of 16, by the profiler."""
        from vllm_child import kernel_times

        return kernel_times(self.outputs)


def run(engine: Engine, found: dict[str, Any]) -> None:
    """The steps of the mode, and how products were dispatched."""
    for name, act, adapter in engine.steps():
        begin = time.perf_counter()
        record: dict[str, Any] = {}
        try:
            act()
            record["outputs"] = engine.outputs(adapter)
        except Exception as error:  # noqa: BLE001 - the other steps may work, and the parent reports it
            record["error"] = f"{type(error).__name__}: {error}"[:400]
        record["took_s"] = time.perf_counter() - begin
        found["steps"][name] = record
        print(f"step {name} {record.get('error', 'done')} {record['took_s']:.1f} s", flush=True)
    found["dispatch"] = engine.llm.collective_rpc(worker_report)


def write(found: dict[str, Any], path: Path) -> None:
    """Write the record, whole or not at all."""
    part = path.with_suffix(".part")
    with gzip.open(part, "wt", compresslevel=1) as stream:
        json.dump(found, stream)
    part.rename(path)


def main() -> None:
    """Run one mode and write its record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=sorted(OPTIONS), required=True)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    start = time.perf_counter()
    engine = Engine(arguments.folder, arguments.mode)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start, "steps": {}}
    try:
        run(engine, found)
    finally:
        write(found, arguments.result)
    if arguments.mode == "graphs":
        with suppress(Exception):  # only for the report, and the record is written
            found["kernels"] = engine.kernels()
            write(found, arguments.result)
    print("complete", flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(0)  # vLLM's engine in this process may not end by itself; workers end with it


if __name__ == "__main__":
    main()
