"""SGLang's own functions with and without the plug-in on a GPU: equal results, time in CUDA graphs, time of the host.

    python tests/benchmarks/sglang_linear.py OUT --write
    gemmpipe kernel=a8w8_blockscale shapes=csv shapes.path=OUT/a8w8_blockscale.csv +kernel.key.x_scale=column \
      'backend=[triton,gluon,skinny,sliced,torch,scaled_mm,deepgemm]' output=OUT/fp8.csv
    gemmpipe kernel=a16w16 shapes=csv shapes.path=OUT/a16w16.csv output=OUT/bf16.csv
    GEMMPIPE_CONFIG_A8W8_BLOCKSCALE=OUT/fp8.csv GEMMPIPE_CONFIG_A16W16=OUT/bf16.csv \
      python tests/benchmarks/sglang_linear.py OUT --limit-s 90

The table of fp8 counts DeepGEMM on scales in columns, as SGLang calls it; with --no-deepgemm tune with x_scale=row and
without deepgemm. (`shapes=engine shapes.engine=sglang` does both for a model.)

The server of SGLang 0.5.23 needs a newer torch; its layers do not. Real `ReplicatedLinear` layers of Qwen3-8B's sizes
in fp8 by blocks and in bf16, and the Triton runner's `fused_experts` of Qwen3-30B-A3B's (the shipped table has rows),
are called as SGLang calls them, and through the plug-in's hooks, which SGLang's registry installs. The fp8 product is
what `dispatch_w8a8_block_fp8_linear` chooses: DeepGEMM where `deep_gemm` can be imported, alone or from vLLM's wheel
(`--no-deepgemm`: Triton). SGLang's parallel state is that of one process, without a server. Both sides quantise
activations. Times: CUDA graphs with weights in rotation, medians of interleaved rounds; host: eager calls, with the
device busy behind. Errors: from a product in fp32, over its norm.

Not SGLang's own: packages that are missing and not called are stand-ins, which are named; `sgl_kernel` refuses every
call, but for `moe_sum_reduce`, in whose place is SGLang's Triton kernel of the same sum, and `moe_align_block_size`,
SGLang's JIT kernel of it, on both sides.
SGLang compiles its quantisers and the order of experts with `tvm_ffi` and nvcc at their first call.
"""

import argparse
import csv
import importlib
import importlib.machinery
import importlib.util
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
import vllm_import
from sglang_import import UNUSED

MS = (1, 16, 64, 256, 2048)
SIZES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
"""(N, K) of Qwen3-8B: qkv, o, gate-up, down."""
EXPERTS, TOPK, MODEL_DIM, INNER = 128, 8, 2048, 768
REAL = frozenset({"flashinfer", "deep_gemm", "tvm_ffi"})
"""Never stand-ins: SGLang asks whether they are there, and calls them."""
REFUSING = "sgl_kernel"
ROUNDS, HOST_CALLS, ROTATION_BYTES, CHECKED = 9, 100, 160e6, 16
Call = Callable[[], torch.Tensor]


class _Refusing(type):
    """A class of a stand-in whose call is an error, so that nothing computes with it silently."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Refusing(name, (), {})

    def __call__(cls, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{REFUSING}.{cls.__name__} is a stand-in")


class _RefusingModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Refusing(name, (), {})


class _Finder(vllm_import._Finder):
    """The last finder: stand-ins of missing packages."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        package = name.partition(".")[0]
        if package == REFUSING or package in (vllm_import.UNUSED | UNUSED) - REAL:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        if spec.name.partition(".")[0] != REFUSING:
            return super().create_module(spec)
        made = _RefusingModule(spec.name)
        made.__path__ = []
        return made


def import_engine(deepgemm: bool) -> str:
    """Import SGLang's layers; returns what stands in for what."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        raise SystemExit("sglang_linear: the package sglang is not installed")
    for root in found.submodule_search_locations or ():
        for name in ("include", "csrc"):  # folders that SGLang looks for; empty in an unpacked wheel
            with suppress(OSError):
                Path(root, "kernels", "jit", name).mkdir(parents=True, exist_ok=True)
    deep = find_deepgemm() if deepgemm else "not used"
    sys.meta_path.append(_Finder())
    if importlib.util.find_spec("dill") is None:
        dill = types.ModuleType("dill")
        dill.dumps, dill.loads, dill.__spec__ = (lambda value: b""), (lambda value: value), None  # type: ignore[attr-defined]
        sys.modules["dill"] = dill
    importlib.import_module("sglang.srt")
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args().install()
    for name in ("linear", "quantization.fp8", "quantization.unquant", "moe.moe_runner.triton_utils.fused_moe"):
        importlib.import_module(f"sglang.srt.layers.{name}")
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    absent = stand_ins()
    if REFUSING in absent:
        fused_moe.moe_sum_reduce = fused_moe.moe_sum_reduce_triton
        align = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size")
        align.sgl_moe_align_block_size = align_by_jit
    return f"stand-ins: {', '.join(absent) or 'none'}; DeepGEMM: {deep}; parallel state: {initialise_parallel_state()}"


def align_by_jit(*given: Any) -> None:
    """SGLang's JIT kernel of the order of experts, which takes all but the last operand: other experts are ignored."""
    from sglang.kernels.ops.moe.moe_align import moe_align_block_size

    *operands, ignore_invalid_expert = given
    if ignore_invalid_expert:
        raise RuntimeError("the JIT kernel of the order of experts ignores no invalid expert")
    moe_align_block_size(*operands)


def initialise_parallel_state() -> str:
    """SGLang's groups of one process, by gloo and a file: its experts ask for them. Returns what it has, or why not."""
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")  # no other process listens
    store = Path(tempfile.mkdtemp(prefix="sglang_linear_")) / "store"
    try:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import get_parallel

        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=store.as_uri(), backend="gloo"
        )
        parallel_state.initialize_model_parallel(backend="gloo")
        group = get_parallel().tp_group
    except Exception as error:  # noqa: BLE001 - linear layers need none; experts fail with SGLang's own words
        return f"none ({type(error).__name__}: {error})"[:200]
    return f"{group.world_size} process, gloo"


def stand_ins() -> list[str]:
    """The imported packages that have no file: those of this program, and of an environment that has its own."""
    names = {REFUSING, "dill"} | vllm_import.UNUSED | UNUSED
    return sorted(name for name in names if name in sys.modules and not getattr(sys.modules[name], "__file__", None))


def find_deepgemm() -> str:
    """Where `deep_gemm` is; vLLM's wheel has one. It is blocked if it cannot be imported: SGLang would try it."""
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    if cache := os.environ.get("DG_JIT_CACHE_DIR"):
        os.environ.setdefault("SGLANG_DG_CACHE_DIR", cache)
    place = "deep_gemm"
    if importlib.util.find_spec("deep_gemm") is None:
        vllm = importlib.util.find_spec("vllm")
        if vllm is None or vllm.origin is None:
            return "not installed"
        sys.path.append(str(Path(vllm.origin).parent / "third_party"))
        place = "deep_gemm of vLLM's wheel"
    try:
        importlib.import_module("deep_gemm")
    except Exception as error:  # noqa: BLE001 - SGLang then has its Triton kernel
        sys.modules["deep_gemm"] = None  # type: ignore[assignment]
        return f"cannot be imported: {type(error).__name__}: {error}"[:200]
    return place


def install_hooks() -> dict[str, Callable[..., Any]]:
    """Install the plug-in as in a process that runs a model; returns SGLang's own functions by target."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from gemmpipe.plugins import sglang as plugin

    plain = {hook.target: plugin.resolve(hook.target) for hook in plugin.HOOKS}
    plugin.runs_model = lambda: True
    if inactive := plugin.set_up():
        raise SystemExit(f"sglang_linear: {inactive}")
    HookRegistry.apply_hooks()
    unchanged = [target for target, function in plain.items() if plugin.resolve(target) is function]
    if unchanged:
        print(f"not hooked: {', '.join(unchanged)}")
    return plain


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of layer: calls of SGLang's function and of the plug-in, on operands in rotation."""

    name: str
    family: str
    calls: Callable[[int], tuple[list[Call], list[Call]]]
    """M -> (SGLang's calls, the plug-in's calls)."""
    exact: Callable[[int], torch.Tensor]
    """M -> the first CHECKED rows of the first call, in fp32."""
    chosen: str = ""


def dense(name: str, n: int, k: int, plain: Callable[..., Any]) -> Case:
    """Layers of SGLang, as many as the cache cannot hold."""
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    fp8 = name == "fp8"
    config = None
    if fp8:
        config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    count = max(2, round(ROTATION_BYTES / (n * k * (1 if fp8 else 2))))
    generator = torch.Generator("cuda").manual_seed(n + k)
    layers, exact = [], torch.empty(0)
    for at in range(count):
        with torch.device("cuda"):
            layer = ReplicatedLinear(k, n, bias=False, quant_config=config, params_dtype=torch.bfloat16, prefix="layer")
        values = torch.randn((n, k), device="cuda", generator=generator)
        if fp8:
            layer.weight.data.copy_((values * 64).clamp(-448, 448).to(torch.float8_e4m3fn))
            scale = torch.rand(layer.weight_scale_inv.shape, device="cuda", generator=generator) + 0.5
            layer.weight_scale_inv.data.copy_(scale / (64 * k**0.5))
        else:
            layer.weight.data.copy_((values * k**-0.5).bfloat16())
        if at == 0:
            exact = layer.weight.float()
            if fp8:
                exact *= layer.weight_scale_inv.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)

    def x_of(m: int) -> torch.Tensor:
        made = torch.Generator("cuda").manual_seed(m)
        return torch.randn((m, k), device="cuda", generator=made).bfloat16()

    def calls(m: int) -> tuple[list[Call], list[Call]]:
        x = x_of(m)
        return (
            [lambda layer=each: plain(layer.quant_method, layer, x) for each in layers],
            [lambda layer=each: layer.quant_method.apply(layer, x) for each in layers],
        )

    function = getattr(layers[0].quant_method, "w8a8_block_fp8_linear", None)
    chosen = getattr(getattr(function, "func", function), "__name__", "torch's linear")
    return Case(
        name=f"{name} {n}x{k}",
        family="a8w8_blockscale" if fp8 else "a16w16",
        calls=calls,
        exact=lambda m: x_of(m)[:CHECKED].float() @ exact.t(),
        chosen=chosen,
    )


def experts(name: str, plain: Callable[..., Any]) -> Case:
    """One mixture whose tokens choose other experts in each call of a rotation."""
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    fp8 = name == "experts fp8"
    generator = torch.Generator("cuda").manual_seed(7)
    shapes = ((EXPERTS, 2 * INNER, MODEL_DIM), (EXPERTS, MODEL_DIM, INNER))
    values = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    scales: list[torch.Tensor] = []
    if fp8:
        weights = [(value * 64).clamp(-448, 448).to(torch.float8_e4m3fn) for value in values]
        for e, n, k in shapes:
            scale = torch.rand((e, n // 128, k // 128), device="cuda", generator=generator) + 0.5
            scales.append(scale / (64 * k**0.5))
        full = [
            weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            for weight, scale in zip(weights, scales, strict=True)
        ]
    else:
        weights = [(value * value.shape[-1] ** -0.5).bfloat16() for value in values]
        full = [weight.float() for weight in weights]
    del values
    config = MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=EXPERTS, top_k=TOPK, inplace=False)
    quantised: dict[str, Any] = {}
    if fp8:
        quantised = {"use_fp8_w8a8": True, "w1_scale": scales[0], "w2_scale": scales[1], "block_shape": [128, 128]}

    def given(m: int, seed: int) -> tuple[torch.Tensor, Any]:
        made = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn((m, MODEL_DIM), device="cuda", generator=made).bfloat16()
        logits = torch.randn((m, EXPERTS), device="cuda", generator=made)
        chosen_weights, ids = logits.softmax(-1).topk(TOPK, dim=-1)
        chosen_weights = chosen_weights / chosen_weights.sum(-1, keepdim=True)
        return x, StandardTopKOutput(chosen_weights, ids.to(torch.int32), logits)

    def calls(m: int) -> tuple[list[Call], list[Call]]:
        sets = [given(m, seed) for seed in range(6)]
        return (
            [lambda at=at: plain(at[0], *weights, at[1], config, **quantised) for at in sets],
            [lambda at=at: fused_moe.fused_experts(at[0], *weights, at[1], config, **quantised) for at in sets],
        )

    def exact(m: int) -> torch.Tensor:
        x, chosen = given(m, 0)
        out = torch.zeros((min(m, CHECKED), MODEL_DIM), device="cuda")
        for row in range(out.shape[0]):
            for weight, expert in zip(chosen.topk_weights[row], chosen.topk_ids[row].tolist(), strict=True):
                gate, up = (full[0][expert] @ x[row].float()).chunk(2)
                out[row] += weight * (full[1][expert] @ (torch.nn.functional.silu(gate) * up))
        return out

    return Case(name=name, family="fmoe", calls=calls, exact=exact, chosen="fused_experts")


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, which ran before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int, replays: int) -> float:
    """The time of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / (calls * replays)


def graph_samples(plain: Sequence[Call], hooked: Sequence[Call]) -> tuple[list[float], list[float]]:
    """Times per call of both, in rounds of alternating order."""
    graphs = [captured(plain), captured(hooked)]
    once = max(replay_us(graph, len(plain), 2) for graph in graphs)
    replays = max(2, min(50, round(4000 / (once * len(plain)))))
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS):
        for at in (0, 1) if turn % 2 else (1, 0):
            samples[at].append(replay_us(graphs[at], len(plain), replays))
    return samples


def host_us(plain: Sequence[Call], hooked: Sequence[Call]) -> tuple[float, float]:
    """The host's time of an eager call of both: medians of alternating rounds."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(6):
        for at, calls in ((0, plain), (1, hooked)) if turn % 2 else ((1, hooked), (0, plain)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(HOST_CALLS):
                calls[i % len(calls)]()
            found[at].append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(found[0]), statistics.median(found[1])


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The difference over the norm."""
    return float((out[: exact.shape[0]].float() - exact).norm() / exact.norm())


def measured(case: Case, m: int) -> dict[str, Any]:
    """A row of the result."""
    from gemmpipe.runtime import dispatch_report

    before = dict(dispatch_report())
    plain, hooked = case.calls(m)
    exact = case.exact(m)
    errors = error(plain[0](), exact), error(hooked[0](), exact)
    new = {key: step for key, step in dispatch_report().items() if before.get(key) != step}
    times, host = graph_samples(plain, hooked), host_us(plain, hooked) if m <= 64 else (float("nan"), float("nan"))
    ratios = [one / other for one, other in zip(*times, strict=True)]
    return {
        "case": case.name,
        "M": m,
        "sglang_us": statistics.median(times[0]),
        "plugin_us": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "host_sglang_us": host[0],
        "host_plugin_us": host[1],
        "error_sglang": errors[0],
        "error_plugin": errors[1],
        "step": ",".join(sorted(set(new.values()))) or "engine",
        "kernel": case.chosen,
    }


@dataclass(kw_only=True)
class Result:
    """Rows and what failed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def cases(plain: Mapping[str, Callable[..., Any]], wanted: Sequence[str]) -> Iterator[Callable[[], Case]]:
    """The cases, each built when it is measured: all of them do not fit into the memory of a small GPU."""
    by_name = {target.rpartition(".layers.")[2]: function for target, function in plain.items()}
    for n, k in SIZES:
        if "fp8" in wanted:
            yield lambda n=n, k=k: dense("fp8", n, k, by_name["quantization.fp8.Fp8LinearMethod.apply"])
    for n, k in SIZES:
        if "bf16" in wanted:
            yield lambda n=n, k=k: dense("bf16", n, k, by_name["quantization.unquant.UnquantizedLinearMethod.apply"])
    for name in ("experts fp8", "experts bf16"):
        if "experts" in wanted:
            yield lambda name=name: experts(name, by_name["moe.moe_runner.triton_utils.fused_moe.fused_experts"])


def measure(plain: Mapping[str, Callable[..., Any]], wanted: Sequence[str], until: float) -> Result:
    """All rows until the time is over; a failure is a line."""
    found = Result()
    for build in cases(plain, wanted):
        if time.monotonic() > until:
            found.failures.append("the time is over: what follows was not measured")
            break
        name = "a case"
        try:
            case = build()
            name = case.name
            for m in MS:
                if time.monotonic() > until:
                    break
                row = measured(case, m)
                found.rows.append(row)
                print(" ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
        except Exception as problem:
            found.failures.append(f"{name}: {type(problem).__name__}: {problem}"[:300])
            if os.environ.get("GEMMPIPE_DEBUG"):
                raise
        torch.cuda.empty_cache()
    return found


def print_table(result: Result) -> None:
    """A line per case: us of SGLang and of the plug-in by M, the host at M = 16, the largest errors."""
    print("us in a CUDA graph, SGLang -> plug-in (ratio; = where no row answers); host us per call at M = 16")
    print(f"{'':17}" + "".join(f"{f'M = {m}':>24}" for m in MS) + f"{'host':>14}{'error':>18}")
    for name in dict.fromkeys(row["case"] for row in result.rows):
        rows = {row["M"]: row for row in result.rows if row["case"] == name}
        cells = []
        for m in MS:
            row = rows.get(m)
            if row is None:
                cells.append("")
                continue
            mark = "=" if row["step"] == "engine" else ""
            cells.append(f"{row['sglang_us']:.1f} -> {row['plugin_us']:.1f} ({row['ratio']:.2f}{mark})")
        at = rows.get(16)
        host = f"{at['host_sglang_us']:.0f} -> {at['host_plugin_us']:.0f}" if at else ""
        errors = [max(row[f"error_{side}"] for row in rows.values()) for side in ("sglang", "plugin")]
        print(f"{name:17}" + "".join(f"{cell:>24}" for cell in cells) + f"{host:>14}{errors[0]:>9.4f}{errors[1]:>9.4f}")
    for kernel in dict.fromkeys((row["case"].split()[0], row["kernel"]) for row in result.rows):
        print(f"SGLang's kernel of {kernel[0]}: {kernel[1]}")
    for text in result.failures:
        print(f"FAILED: {text}")


def write_products(folder: Path) -> None:
    """The products of the linear layers."""
    folder.mkdir(parents=True, exist_ok=True)
    for family in ("a8w8_blockscale", "a16w16"):
        with (folder / f"{family}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("M", "N", "K"), *((m, n, k) for n, k in SIZES for m in MS)])


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--what", default="fp8,bf16,experts", help="kinds of layers, separated by commas")
    parser.add_argument("--no-deepgemm", action="store_true", help="SGLang's Triton kernel for products by blocks")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--write", action="store_true", help="write lists of products, to tune them, and end")
    arguments = parser.parse_args(given)
    write_products(arguments.folder)
    if arguments.write:
        return 0
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    os.environ.setdefault("GEMMPIPE_LOG_SELECTION", "1")
    if arguments.no_deepgemm:
        os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"
    stand_ins = import_engine(not arguments.no_deepgemm)
    plain = install_hooks()
    with torch.inference_mode():
        result = measure(plain, arguments.what.split(","), begin + arguments.limit_s)
    if result.rows:
        with (arguments.folder / "sglang.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(result.rows[0]))
            writer.writeheader()
            writer.writerows(result.rows)
    print(stand_ins)
    print_table(result)
    return bool(result.failures)


if __name__ == "__main__":
    sys.exit(main())
