"""One living vLLM of vllm_plugin.py: started once, then it measures whenever the parent asks and is idle between.

Commands are lines of JSON on stdin, answers are lines of JSON on the file descriptor `--reply-fd`: the first says
`ready`, each other has `result` or `error`. vLLM's own output goes to stdout, which is a log.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import vllm_reference
from vllm_models import DECODES, PREFILL, PROMPT, cache_bytes

COMPARED, REPORTED, MAX_LOGPROBS = 16, 20, 1024
"""Prompts of the comparison, tokens that are compared for each, and log-probabilities that vLLM gives."""
TOGETHER = (16, 4, 1)
"""Prompts of the comparison per call: products of 256, 64 and 16 rows."""
PROFILED, PREFILLS, LOADED = 8, 5, 64
"""Steps of a profile, repetitions of the prefill, and prompts one after the other of the prefill under load, which
takes 2 s: long enough for sustained clocks."""
NAME_LENGTH = 200


def fill_random() -> None:
    """Replace vLLM's dummy weights: of +-1e-3 they round to 0 in fp8, and scales can be negative."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @torch.no_grad()
    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        layers = ((layer, layer.named_parameters(recurse=False)) for layer in model.modules())
        parameters = [(type(layer).__name__, name, each.data) for layer, named in layers for name, each in named]
        for seed, (layer, name, data) in enumerate(parameters):
            fill_parameter(name, layer, data, torch.Generator(device=data.device).manual_seed(seed))
        torch.cuda.empty_cache()

    DummyModelLoader.load_weights = load_weights


def fill_parameter(name: str, layer: str, data: Any, generator: Any) -> None:
    """Normal weights of unit gain; scales to match; norms of ones; scalars of attention stay."""
    import torch

    if data.dim() == 0:
        return
    if data.element_size() > 1 and "scale" in name:
        values = torch.rand(data.shape, device=data.device, generator=generator, dtype=torch.float32) + 0.5
        data.copy_(values / (64 * (data.shape[-1] * 128) ** 0.5))
    elif data.element_size() > 1 and data.dim() == 1:
        data.fill_(1)
    else:
        fp8 = data.element_size() == 1
        gain = 64.0 if fp8 else 1.0 if "Embedding" in layer else data.shape[-1] ** -0.5
        flat = data.view(-1)
        for start in range(0, flat.numel(), 1 << 24):  # in parts: a whole matrix in fp32 may not fit
            part = flat[start : start + (1 << 24)]
            values = torch.randn(part.numel(), device=data.device, generator=generator, dtype=torch.float32) * gain
            part.copy_((values.clamp(-448, 448) if fp8 else values).to(data.dtype))


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    """Token ids that differ between prompts."""
    return [{"prompt_token_ids": [(7919 * (i + 1) + 104729 * j) % 150000 for j in range(length)]} for i in range(count)]


def seconds(call: Callable[[], object]) -> float:
    """The time of a call with the device idle before and after."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def kernel_label(event: dict[str, Any]) -> str:
    """The name of a kernel of a trace, after its grid and its bytes of shared memory where it has them."""
    given = event.get("args", {})
    parts = [f"{name.split()[0]} {given[name]}" for name in ("grid", "shared memory") if given.get(name)]
    return " ".join([*parts, event["name"][:NAME_LENGTH]]).replace(", ", ",")


def trace_times(events: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Kernel -> [launches, time in us, time before its start in which nothing ran in us] of a profiler's trace.

    The third is negative where a kernel starts before the kernels in front of it end. Copies count as kernels. The
    grid is a part of the name: products of one kernel and different sizes are told apart.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted((each["ts"], each["dur"], kernel_label(each)) for each in events if each.get("cat") in kinds)
    found: dict[str, list[float]] = {}
    end = work[0][0] if work else 0.0
    for start, duration, name in work:
        entry = found.setdefault(name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += duration
        entry[2] += start - end
        end = max(end, start + duration)
    return found


def kernel_times(call: Callable[[], object]) -> dict[str, list[float]]:
    """`trace_times` of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        seconds(call)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        return trace_times(json.loads(path.read_text(errors="replace"))["traceEvents"])


def per_step(long: dict[str, list[float]], short: dict[str, list[float]], steps: int) -> dict[str, list[float]]:
    """The kernels of one step: of the longer call without the shorter, over the steps between."""
    found = {
        name: [(long.get(name, [0, 0, 0])[i] - short.get(name, [0, 0, 0])[i]) / steps for i in range(3)]
        for name in {*long, *short}
    }
    return {name: values for name, values in found.items() if any(abs(each) > 1e-3 for each in values)}


class Engine:
    """A vLLM with what the parent may ask of it."""

    def __init__(self, model: Path, eager: bool) -> None:
        """Load, compile and capture; then call each batch once, so that nothing is compiled in a measurement."""
        fill_random()
        from vllm import LLM

        from gemmpipe.plugins.vllm import register

        register()  # also where the package has no entry point, as in a source tree
        self.config = json.loads((model / "config.json").read_text())
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=max(DECODES),
            max_num_batched_tokens=PREFILL,
            gpu_memory_utilization=0.01,  # only checked against what is free: the next line decides
            kv_cache_memory_bytes=cache_bytes(self.config),
            enable_prefix_caching=False,
            seed=0,
            disable_log_stats=True,
            enforce_eager=eager,
            async_scheduling=True,
            max_logprobs=MAX_LOGPROBS,
            compilation_config={"cudagraph_capture_sizes": sorted(DECODES)},
        )
        for batch in DECODES:
            self.generate(prompts(batch, PROMPT), 4)
        self.generate(prompts(1, PREFILL), 1)
        for count in TOGETHER:
            self.generate(prompts(count, PROMPT), 1, MAX_LOGPROBS)
        gc.collect()
        gc.freeze()
        self.release()

    def generate(self, given: Any, tokens: int, logprobs: int | None = None) -> Any:
        """vLLM's outputs of exactly this many tokens."""
        from vllm import SamplingParams

        chosen = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
        return self.llm.generate(given, chosen, use_tqdm=False)

    def release(self) -> None:
        """Give back what torch keeps: the other processes share the device."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def measure(self) -> dict[str, Any]:
        """Tokens per second by batch, and of the prefill; the number of live objects, which must not grow."""
        found: dict[str, Any] = {"decode": {}, "objects": {}}
        for batch, steps in DECODES.items():
            given = prompts(batch, PROMPT)
            self.generate(given, 4)
            rates = []
            for _ in range(steps.pairs):
                short, long = (seconds(partial(self.generate, given, each)) for each in (steps.short, steps.long))
                rates.append(batch * (steps.long - steps.short) / (long - short))
            found["decode"][str(batch)], found["objects"][str(batch)] = rates, len(gc.get_objects())
        given = prompts(1, PREFILL)
        self.generate(given, 1)
        found["prefill"] = [PREFILL / seconds(partial(self.generate, given, 1)) for _ in range(PREFILLS)]
        many = prompts(LOADED, PREFILL)
        found["prefill_load"] = [LOADED * PREFILL / seconds(partial(self.generate, many, 1))]
        return found

    def profile(self, what: str) -> dict[str, list[float]]:
        """Kernel -> [launches, us, us before it] per decode step of a batch, or per prompt of a prefill."""
        if what.startswith("prefill"):
            count = LOADED if what == "prefill_load" else 1
            call = partial(self.generate, prompts(count, PREFILL), 1)
            call()
            return per_step(kernel_times(call), {}, count)
        given = prompts(int(what), PROMPT)
        self.generate(given, 4)
        short, long = (kernel_times(partial(self.generate, given, tokens)) for tokens in (4, 4 + PROFILED))
        return per_step(long, short, PROFILED)

    def logprobs(self, together: int) -> list[dict[int, float]]:
        """Token -> log-probability at the end of each compared prompt, `together` prompts per call."""
        given = prompts(COMPARED, PROMPT)
        parts = [given[start : start + together] for start in range(0, COMPARED, together)]
        outputs = [output for part in parts for output in self.generate(part, 1, MAX_LOGPROBS)]
        return [{t: v.logprob for t, v in output.outputs[0].logprobs[0].items()} for output in outputs]

    def reference(self) -> dict[str, Any]:
        """The reference's most likely tokens per prompt, and vLLM's own log-probabilities of them by rows.

        None stands for a token that is not among vLLM's MAX_LOGPROBS.
        """
        tokens = [each["prompt_token_ids"] for each in prompts(COMPARED, PROMPT)]
        values = self.llm.apply_model(partial(vllm_reference.log_probabilities, config=self.config, tokens=tokens))[0]
        top = values.topk(REPORTED, dim=-1)
        found: dict[str, Any] = {"tokens": top.indices.tolist(), "reference": top.values.tolist(), "rows": {}}
        for together in TOGETHER:
            given = self.logprobs(together)
            pairs = list(zip(given, found["tokens"], strict=True))
            found["rows"][str(together * PROMPT)] = {
                "values": [[one.get(token) for token in wanted] for one, wanted in pairs],
                "first": [max(one, key=one.__getitem__) for one in given],
            }
        return found

    def dispatch(self) -> dict[str, str]:
        """Which step of the dispatch answered each product of this process."""
        from gemmpipe.runtime import dispatch_report

        return dict(dispatch_report())

    def answer(self, command: dict[str, Any]) -> object:
        """The result of a command of the parent."""
        made = {"measure": self.measure, "reference": self.reference, "dispatch": self.dispatch}
        result = self.profile(command["what"]) if command["do"] == "profile" else made[command["do"]]()
        self.release()
        return result


def main() -> None:
    """Start, then answer commands until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--reply-fd", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    os.set_inheritable(arguments.reply_fd, False)  # else it stays open in processes that compile
    start = time.perf_counter()
    replies, commands = os.fdopen(arguments.reply_fd, "w"), os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # compilers that are started here must not read the commands

    def reply(**values: object) -> None:
        print(json.dumps(values), file=replies, flush=True)

    engine = Engine(arguments.model, arguments.eager)
    import torch

    free, total = torch.cuda.mem_get_info()
    reply(ready=True, start_s=time.perf_counter() - start, device_used_gib=(total - free) / 2**30)
    for line in commands:
        try:
            reply(result=engine.answer(json.loads(line)))
        except Exception as error:  # noqa: BLE001 - the parent reports it, and the process can answer other commands
            reply(error=f"{type(error).__name__}: {error}"[:400])
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine in this process may not end by itself


if __name__ == "__main__":
    main()
