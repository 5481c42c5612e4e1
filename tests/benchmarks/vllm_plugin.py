"""vLLM with and without the plug-in on a GPU: decode and prefill tokens per second, and agreement of the logits.

    python tests/benchmarks/vllm_plugin.py --folder OUT --write    # the models' configurations alone
    gemmpipe kernel=a8w8_blockscale shapes=model shapes.path=OUT/qwen3_8b_fp8 'shapes.nsets=[1,16,64,256,2048]'
    python tests/benchmarks/vllm_plugin.py --folder OUT --models qwen3_8b_fp8 --repeats 3

Each run is a process of its own: the default (GEMMPIPE_VLLM=off) and the plug-in in turn, `--repeats` times, with one
cache of compiled graphs. Weights are random, of the same seed in both. Decode: 128 steps at batch 1, 16, 64 and 256
(the time for 144 tokens minus that for 16), three times per process. Prefill: one prompt of 2,048 tokens, the median
of five. One JSON per process and summary.csv are written to the folder. Start lines and selected kernels are in the
logs there. `--profile 64` adds the time of each kernel over eight decode steps at batch 64, default and plug-in side by
side: a copy before a product, or a slower kernel between products, has a line there.
"""

import argparse
import csv
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

BATCHES, PREFILL = (1, 16, 64, 256), 2048
SHORT, LONG, PROMPT = 16, 144, 16
LOGPROBS, COMPARED = 20, 16
PROFILED = 8
FP8 = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}
QWEN = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DENSE = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "max_window_layers": 36,
    "num_key_value_heads": 8,
}
MIXTURE = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "max_window_layers": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
MODELS = {
    "qwen3_8b_fp8": {**DENSE, **FP8},
    "qwen3_8b_bf16": DENSE,
    "qwen3_30b_fp8": {**MIXTURE, **FP8},
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GEMMPIPE_LOG_SELECTION": "1",
}
"""One process per run, without downloads; the environment's own values have precedence."""
KINDS = {"default": "off", "plugin": "linear,moe"}


def write_models(folder: Path, names: Sequence[str], layers: int | None) -> None:
    """One config.json per model; `layers` replaces their number."""
    for name in names:
        made = {**MODELS[name], **({} if layers is None else {"num_hidden_layers": layers})}
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(made, indent=1))


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

    DummyModelLoader.load_weights = load_weights


def fill_parameter(name: str, layer: str, data: Any, generator: Any) -> None:
    """Normal weights of unit gain; scales to match; norms of ones; scalars of attention stay."""
    import torch

    if data.element_size() == 1:
        flat = data.view(-1)
        for start in range(0, flat.numel(), 1 << 24):
            part = flat[start : start + (1 << 24)]
            values = torch.randn(part.numel(), device=data.device, generator=generator) * 64
            part.copy_(values.clamp(-448, 448).to(data.dtype))
    elif data.dim() == 0:
        return
    elif "scale" in name:
        values = torch.rand(data.shape, device=data.device, generator=generator) + 0.5
        data.copy_(values / (64 * (data.shape[-1] * 128) ** 0.5))
    elif data.dim() == 1:
        data.fill_(1)
    else:
        gain = 1.0 if "Embedding" in layer else data.shape[-1] ** -0.5
        data.copy_(torch.randn(data.shape, device=data.device, generator=generator) * gain)


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    """Token ids that differ between prompts."""
    return [{"prompt_token_ids": [(7919 * (i + 1) + 104729 * j) % 150000 for j in range(length)]} for i in range(count)]


def seconds(call: Any) -> float:
    """The time of a call with the device idle before and after."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def kernel_times_us(call: Any) -> dict[str, list[float]]:
    """Kernel -> [launches, time in us] of a call, by the device's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        seconds(call)
    found: dict[str, list[float]] = {}
    for event in seen.events() or []:
        if event.device_type == DeviceType.CUDA:
            entry = found.setdefault(event.name[:100], [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time_total
    return found


def measure(model: str, eager: bool, memory: float, profiled: int) -> dict[str, Any]:
    """Everything of one process; `profiled`: the batch whose kernels are timed one by one, or 0."""
    fill_random()
    from vllm import LLM, SamplingParams

    from gemmpipe.plugins.vllm import register
    from gemmpipe.runtime import dispatch_report

    register()  # also where the package has no entry point, as in a source tree
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=PREFILL,
        gpu_memory_utilization=memory,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        enforce_eager=eager,
        async_scheduling=True,
        compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
    )

    def generate(given: Any, tokens: int, logprobs: int | None = None) -> Any:
        chosen = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
        return llm.generate(given, chosen, use_tqdm=False)

    found: dict[str, Any] = {"decode": {}, "objects": {}}
    for batch in BATCHES:
        given = prompts(batch, PROMPT)
        generate(given, 4)
        rates, objects = [], []
        for _ in range(3):
            short, long = (seconds(partial(generate, given, tokens)) for tokens in (SHORT, LONG))
            rates.append(batch * (LONG - SHORT) / (long - short))
            objects.append(len(gc.get_objects()))  # host work that grows would show here
        found["decode"][str(batch)], found["objects"][str(batch)] = rates, objects
    if profiled:
        long, short = (
            kernel_times_us(partial(generate, prompts(profiled, PROMPT), tokens)) for tokens in (PROFILED + 1, 1)
        )
        # Without the step of the prompts, and per step.
        found["kernels"] = {
            name: [(value - before) / PROFILED for value, before in zip(values, short.get(name, (0, 0)), strict=True)]
            for name, values in long.items()
        }
    given = prompts(1, PREFILL)
    generate(given, 1)
    found["prefill"] = [PREFILL / seconds(partial(generate, given, 1)) for _ in range(5)]
    outputs = generate(prompts(COMPARED, PROMPT), 1, LOGPROBS)
    found["logprobs"] = [
        {str(token): value.logprob for token, value in output.outputs[0].logprobs[0].items()} for output in outputs
    ]
    found["dispatch"] = dispatch_report()
    return found


def agreement(first: dict[str, Any], second: dict[str, Any]) -> tuple[int, float]:
    """(prompts with the same most likely token, largest difference of a log-probability that both report)."""
    same, largest = 0, 0.0
    for one, two in zip(first["logprobs"], second["logprobs"], strict=True):
        same += max(one, key=one.__getitem__) == max(two, key=two.__getitem__)
        shared = one.keys() & two.keys()
        largest = max([largest, *(abs(one[token] - two[token]) for token in shared)])
    return same, largest


def run(arguments: argparse.Namespace, model: str, kind: str, repeat: int) -> dict[str, Any] | None:
    """One process; None if it fails, with its log in the folder."""
    out = arguments.folder / f"{model}-{kind}-{repeat}.json"
    command = [sys.executable, __file__, "--folder", str(arguments.folder), "--child", model, "--out", str(out)]
    command += ["--memory", str(arguments.memory), *(["--eager"] if arguments.eager else [])]
    command += ["--profile", str(arguments.profile)]
    environment = {**ENVIRONMENT, **os.environ, "GEMMPIPE_VLLM": KINDS[kind]}
    environment.setdefault("VLLM_CACHE_ROOT", str(arguments.folder / "cache"))
    with out.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not out.is_file():
        print(f"{model} {kind} {repeat}: failed, see {out.with_suffix('.log')}", flush=True)
        return None
    found: dict[str, Any] = json.loads(out.read_text())
    print(f"{model} {kind} {repeat}: decode {medians(found)}", flush=True)
    return found


def medians(found: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of one process: decode by batch, and prefill."""
    values = {batch: statistics.median(rates) for batch, rates in found["decode"].items()}
    return {name: round(rate, 1) for name, rate in {**values, "prefill": statistics.median(found["prefill"])}.items()}


def summary(model: str, runs: dict[str, list[dict[str, Any]]]) -> Iterator[list[object]]:
    """Rows: model, what, default tokens/s, plug-in tokens/s, their ratio, and the range of ratios of paired runs."""
    rates = {kind: [medians(found) for found in each] for kind, each in runs.items()}
    for what in (*map(str, BATCHES), "prefill"):
        default, plugin = ([each[what] for each in rates[kind]] for kind in KINDS)
        ratios = [after / before for before, after in zip(default, plugin, strict=False)]
        before, after = statistics.median(default), statistics.median(plugin)
        ends = (round(min(ratios), 3), round(max(ratios), 3))
        yield [model, what, before, after, round(after / before, 3), *ends]
    same, largest = agreement(runs["default"][0], runs["plugin"][0])
    repeated = agreement(runs["default"][0], runs["default"][-1])
    print(f"{model}: same first token {same} of {COMPARED}, largest difference of log-probabilities {largest:.3f}")
    print(f"{model}: default against itself: {repeated[0]} of {COMPARED}, {repeated[1]:.3f}")


def print_kernels(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Launches and time per decode step of each kernel, in the order of the difference."""
    before, after = (runs[kind][0].get("kernels", {}) for kind in KINDS)
    names = sorted({*before, *after}, key=lambda name: before.get(name, (0, 0))[1] - after.get(name, (0, 0))[1])
    for name in names:
        (n, us), (m, other_us) = (held.get(name, (0, 0)) for held in (before, after))
        if max(us, other_us) >= 1:
            print(f"  {n:6.1f} {us:9.1f} us  {m:6.1f} {other_us:9.1f} us  {name}")
    print(f"  all    {sum(v[1] for v in before.values()):9.1f} us         {sum(v[1] for v in after.values()):9.1f} us")


def main() -> None:
    """Parent of all runs, or one run with --child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.6)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", type=int, default=0, choices=(0, *BATCHES))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", default="")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.child:
        found = measure(str(arguments.folder / arguments.child), arguments.eager, arguments.memory, arguments.profile)
        arguments.out.write_text(json.dumps(found))
        os._exit(0)  # vLLM's engine in this process may not end by itself
    names = arguments.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--models: {', '.join(unknown)}: unknown; known: {', '.join(MODELS)}")
    write_models(arguments.folder, names, arguments.layers)
    if arguments.write:
        return
    rows: list[list[object]] = []
    for model in names:
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for repeat in range(arguments.repeats):
            for kind in KINDS:
                found = run(arguments, model, kind, repeat)
                if found is not None:
                    runs[kind].append(found)
        if all(runs.values()):
            rows += summary(model, runs)
            if arguments.profile:
                print_kernels(runs)
    with (arguments.folder / "summary.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("model", "what", "default_tokens_per_s", "plugin_tokens_per_s", "ratio", "lowest", "highest"))
        writer.writerows(rows)
    for row in rows:
        print(*row)


if __name__ == "__main__":
    main()
