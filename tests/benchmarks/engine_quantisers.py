"""vLLM's fused quantisers against ours on this GPU: python tests/benchmarks/engine_quantisers.py [--pairs | --sweep]

Each line: a case, the time of vLLM's operator and of ours in a CUDA graph of 20 launches, medians of interleaved
replays; `serial` is ours without programmatic dependent launch, as after a kernel that does not trigger; the share of
equal fp8 bytes, and the greatest relative difference of scales. About 40 s.

--pairs: quantiser and product in turn over rotating weights of 200 MB: vLLM's quantiser with DeepGEMM, ours with the
product that the plug-in chooses by the table in GEMMPIPE_CONFIG_A8W8_BLOCKSCALE (the column `row` says how), and both
mixed. --sweep: all launch shapes of a few cases against the chosen one. vLLM must be importable, or its library
_C_stable_libtorch in its folder on PYTHONPATH.
"""

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch

from gemmpipe.core.data import Build, Device, median
from gemmpipe.core.device import arch_device
from gemmpipe.launch.build import compile_build, load_build
from gemmpipe.plugins import quantise_operators as operators
from gemmpipe.templates import fused_quantise as host

NORM_KS, SILU_SIZES, GROUP_SIZES = (2048, 4096, 5120, 7168), (6144, 9728, 12288, 18432), (2048, 4096, 8192)
NAMES = {"norm": operators.NORM, "silu": operators.SILU, "group": operators.GROUPS}
ROWS = (1, 8, 16, 64, 256, 2048)
PRODUCTS = ((6144, 4096, "norm"), (24576, 4096, "norm"), (4096, 12288, "silu"))
PAIR_ROWS = (1, 16, 64, 256, 2048)
LAUNCHES, REPLAYS = 20, 21
WEIGHT_BYTES = 200 * 10**6
EPSILON = 1e-6
FP8 = torch.float8_e4m3fn
SWEEP_ROWS = (1, 16, 64, 256, 2048)


@dataclass(kw_only=True, eq=False)
class Operands:
    """Operands of one quantiser: x, what it writes, and for the norm its weight and residual."""

    op: str
    x: torch.Tensor
    out: torch.Tensor
    scale: torch.Tensor
    weight: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def call(self, place: str) -> Callable[[], None]:
        """A call of the operator of `_C` (vLLM's) or `gemmpipe`."""
        function = getattr(getattr(torch.ops, place), NAMES[self.op]).default
        if self.op == "group":  # as before DeepGEMM: scales rounded to powers of two
            settled = (1e-10, -448.0, 448.0, True, True, True)
            return lambda: function(self.x, self.out, self.scale, 128, *settled)
        if self.op == "norm":
            return lambda: function(self.out, self.x, self.weight, self.scale, EPSILON, None, self.residual, 128, True)
        return lambda: function(self.out, self.x, self.scale, 128, None, True)

    def with_shape(self, shape: host.LaunchShape, device: Device) -> Callable[[], None]:
        """A call of our kernel with this launch shape."""
        strides = self.scale.stride()
        kernel = host.bound_kernel(load_build(build_of(self.op, self.out.shape[1], shape, device), device))
        if self.op == "norm":
            assert self.weight is not None
            added = self.residual
            return lambda: host.launch_norm(kernel, self.out, self.x, self.weight, self.scale, added, added, strides)
        return lambda: host.launch_groups(kernel, self.out, self.x, self.scale, strides, shape)


def operands(op: str, rows: int, columns: int) -> Operands:
    """Random operands, scales M-major: padded for TMA but those of SiLU, as vLLM makes them."""
    generator = torch.Generator(device="cuda").manual_seed(rows + columns)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    padded = rows if op == "silu" else -(-rows // 4) * 4
    made = Operands(
        op=op,
        x=random(rows, 2 * columns if op == "silu" else columns),
        out=torch.zeros(rows, columns, dtype=FP8, device="cuda"),
        scale=torch.zeros(columns // 128, padded, device="cuda").t()[:rows],
    )
    if op == "norm":
        made.weight, made.residual = 1 + 0.1 * random(columns), random(rows, columns)
    return made


def build_of(op: str, columns: int, shape: host.LaunchShape, device: Device) -> Build:
    """The build of a launch shape in bf16."""
    if op == "norm":
        return host.norm_build(columns, "bfloat16", EPSILON, residual=True, shape=shape, device=device)
    if op == "group":
        return host.group_build(columns, "bfloat16", 1e-10, power_of_two=True, shape=shape, device=device)
    return host.silu_build(columns, "bfloat16", shape=shape, device=device)


def shape_of(op: str, rows: int, columns: int, units: int) -> host.LaunchShape:
    """The chosen launch shape."""
    return (host.norm_shape if op == "norm" else host.silu_shape)(rows, columns, units)


def shapes_of(op: str, columns: int) -> list[host.LaunchShape]:
    """All launch shapes worth a try: 4 to 32 values per thread."""
    fixed = 1 << (columns // 128 - 1).bit_length()
    groups = (fixed,) if op == "norm" else (1, 2, 4, 8, 16, 32)
    pairs = itertools.product(groups, (1, 2, 4, 8, 16, 32))
    return [host.LaunchShape(groups=g, warps=w) for g, w in pairs if 4 <= g * 128 / (32 * w) <= 32]


def cases(rows: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(quantiser, rows, columns)."""
    for op, sizes in (("norm", NORM_KS), ("silu", SILU_SIZES), ("group", GROUP_SIZES)):
        yield from ((op, m, columns) for columns in sizes for m in rows)


def compile_all(builds: Sequence[Build], device: Device) -> None:
    """Compile into Triton's disk cache, in processes that use no device."""
    with ProcessPoolExecutor(8, get_context("spawn")) as pool:
        list(pool.map(compile_build, builds, [device] * len(builds)))


def load_vllm() -> None:
    """vLLM's operators: by its own import, or its library alone."""
    with suppress(ImportError):
        import_module("vllm._custom_ops")
    if not hasattr(torch.ops._C, operators.NORM):
        found = find_spec("vllm")
        folders = found.submodule_search_locations if found is not None else None
        if not folders:
            raise SystemExit("engine_quantisers: vllm is not importable")
        torch.ops.load_library(str(Path(folders[0]) / "_C_stable_libtorch.abi3.so"))
    named = {name: getattr(torch.ops._C, name).default for name in NAMES.values()}
    operators.register_quantise_operators(named)


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls in a CUDA graph, each called once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def medians_us(graphs: Sequence[torch.cuda.CUDAGraph], launches: int, replays: int = REPLAYS) -> list[float]:
    """Microseconds of one launch of each graph; replays of the graphs in turn, two of each unmeasured."""
    samples: list[list[float]] = [[] for _ in graphs]
    for turn in range(replays + 2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        marks[0].record()
        for graph, mark in zip(graphs, marks[1:], strict=True):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        if turn >= 2:
            for i, times in enumerate(samples):
                times.append(marks[i].elapsed_time(marks[i + 1]) * 1e3 / launches)
    return [median(times) for times in samples]


def agreement(given: Operands) -> dict[str, float]:
    """Shares of equal fp8 bytes and residuals, and the greatest relative difference of scales."""
    kept = None if given.residual is None else given.residual.clone()
    found = []
    for place in ("_C", "gemmpipe"):
        if kept is not None and given.residual is not None:
            given.residual.copy_(kept)
        given.out.view(torch.uint8).fill_(0x7F)
        given.scale.fill_(float("nan"))
        given.call(place)()
        residual = given.x if given.residual is None else given.residual
        found.append((given.out.view(torch.uint8).clone(), given.scale.clone(), residual.clone()))
    theirs, ours = found
    return {
        "bytes": float((theirs[0] == ours[0]).float().mean()),
        "scales": float(((theirs[1] - ours[1]).abs() / theirs[1]).nan_to_num(nan=1e9).max()),
        "residual": float((theirs[2] == ours[2]).float().mean()),
    }


def compare(device: Device, limit_s: float) -> list[dict[str, object]]:
    """Every case: times and agreement."""
    begin, made = time.monotonic(), []
    chosen = {(op, columns, shape_of(op, m, columns, device.cu_num)) for op, m, columns in cases(ROWS)}
    builds = [build_of(op, columns, shape, device) for op, columns, shape in sorted(chosen, key=str)]
    with mock.patch.object(host, "uses_pdl", return_value=False):
        serial_builds = [build_of(op, columns, shape, device) for op, columns, shape in sorted(chosen, key=str)]
    compile_all([*builds, *serial_builds], device)
    print(f"compiled {len(builds) + len(serial_builds)} kernels: {time.monotonic() - begin:.0f} s", flush=True)
    for op, m, columns in cases(ROWS):
        if time.monotonic() - begin > limit_s:
            print("stopped: the limit of time")
            break
        given = operands(op, m, columns)
        same = agreement(given)
        shape = shape_of(op, m, columns, device.cu_num)
        with mock.patch.object(host, "uses_pdl", return_value=False):
            serial = given.with_shape(shape, device)
        graphs = [graph_of([call] * LAUNCHES) for call in (given.call("_C"), given.call("gemmpipe"), serial)]
        engine_us, ours_us, serial_us = medians_us(graphs, LAUNCHES)
        made.append(
            {"op": op, "columns": columns, "M": m, "groups": shape.groups, "warps": shape.warps}
            | {"engine_us": engine_us, "ours_us": ours_us, "serial_us": serial_us, **same}
        )
        print(
            f"{op} {columns:6} M={m:<5} vLLM {engine_us:7.2f} us  ours {ours_us:7.2f} us ({engine_us / ours_us:.2f})  "
            f"serial {serial_us:7.2f} us ({engine_us / serial_us:.2f})  bytes {same['bytes']:.6f}  "
            f"scales {same['scales']:.1e}  residual {same['residual']:.6f}  {shape.groups} groups {shape.warps} warps",
            flush=True,
        )
    slower = [each for each in made if float(str(each["serial_us"])) > float(str(each["engine_us"]))]
    print(f"{len(made)} cases; slower than vLLM's without overlap: {len(slower)}")
    for each in slower:
        print(f"  {each['op']} {each['columns']} M={each['M']}")
    return made


def sweep(device: Device, limit_s: float) -> list[dict[str, object]]:
    """Every launch shape of every size, without overlap, against the chosen one."""
    begin, made = time.monotonic(), []
    sizes = list(dict.fromkeys((op, columns) for op, _, columns in cases((1,))))
    with mock.patch.object(host, "uses_pdl", return_value=False):
        compile_all([build_of(op, n, s, device) for op, n in sizes for s in shapes_of(op, n)], device)
        print(f"compiled: {time.monotonic() - begin:.0f} s", flush=True)
        for (op, columns), m in itertools.product(sizes, SWEEP_ROWS):
            if time.monotonic() - begin > limit_s:
                print("stopped: the limit of time")
                break
            given, chosen = operands(op, m, columns), shape_of(op, m, columns, device.cu_num)
            shapes = sorted({*shapes_of(op, columns), chosen}, key=str)
            graphs = [graph_of([given.with_shape(shape, device)] * LAUNCHES) for shape in shapes]
            times = dict(zip(shapes, medians_us(graphs, LAUNCHES, 9), strict=True))
            ordered = sorted(times, key=lambda shape: times[shape])
            text = "  ".join(f"{s.groups}x{s.warps} {times[s]:.2f}" for s in ordered[:6])
            lost = times[chosen] / times[ordered[0]]
            first = f"{chosen.groups}x{chosen.warps} {times[chosen]:7.2f} us ({lost:.2f})"
            print(f"{op} {columns:6} M={m:<5} chosen {first}  fastest {text}", flush=True)
            made += [
                {"op": op, "columns": columns, "M": m, "groups": s.groups, "warps": s.warps, "serial_us": us}
                for s, us in times.items()
            ]
    return made


def pairs(device: Device, limit_s: float) -> list[dict[str, object]]:
    """Quantiser and product in turn: vLLM's, ours, and mixed."""
    from vllm.utils.deep_gemm import fp8_gemm_nt

    from gemmpipe.plugins.engine_dispatch import EngineKernel, register_kernel
    from gemmpipe.plugins.operators import register_plugin_operators
    from gemmpipe.runtime import dispatch_report
    from gemmpipe.runtime.selection_log import LOG

    def deepgemm(x: torch.Tensor, w: torch.Tensor, x_scale: object, w_scale: object, bias: object) -> torch.Tensor:
        out = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16, device="cuda")
        fp8_gemm_nt((x, x_scale), (w, w_scale), out, is_deep_gemm_e8m0_used=False)
        return out

    register_plugin_operators()
    libtypes = frozenset({"deepgemm"})
    name = register_kernel(EngineKernel(name="DeepGEMM", call=deepgemm, libtypes=libtypes))
    begin, made = time.monotonic(), []
    for (n, k, op), m in itertools.product(PRODUCTS, PAIR_ROWS):
        if time.monotonic() - begin > limit_s:
            print("stopped: the limit of time")
            break
        given = operands(op, m, k)
        count = max(4, -(-WEIGHT_BYTES // (n * k)))
        weights = [_weight(n, k, seed) for seed in range(max(2, -(-WEIGHT_BYTES // (n * k))))]

        def link(place: str, ours: bool, i: int) -> None:
            w, w_scale = weights[i % len(weights)]  # noqa: B023 - called in this turn alone
            given.call(place)()  # noqa: B023
            x, x_scale = given.out, given.scale  # noqa: B023
            if ours:
                torch.ops.gemmpipe.engine_product("a8w8_blockscale", x, w, x_scale, w_scale, None, torch.bfloat16, name)
            else:
                deepgemm(x, w, x_scale, w_scale, None)

        arms = {"vllm": ("_C", False), "ours": ("gemmpipe", True), "products": ("_C", True)}
        arms["quantisers"] = ("gemmpipe", False)
        LOG.steps.clear()
        graphs = [graph_of([lambda p=p, o=o, i=i: link(p, o, i) for i in range(count)]) for p, o in arms.values()]
        times = dict(zip(arms, medians_us(graphs, count), strict=True))
        row = ",".join(sorted(set(dispatch_report().values())))
        made.append({"N": n, "K": k, "M": m, "op": op, "row": row, **{f"{arm}_us": us for arm, us in times.items()}})
        print(
            f"{op} {n:6} {k:6} M={m:<5} vLLM's pair {times['vllm']:7.2f} us  ours {times['ours']:7.2f} us "
            f"({times['vllm'] / times['ours']:.2f})  our product alone {times['products']:7.2f} us "
            f"({times['vllm'] / times['products']:.2f})  our quantiser alone {times['quantisers']:7.2f} us "
            f"({times['vllm'] / times['quantisers']:.2f})  row {row}",
            flush=True,
        )
    return made


def _weight(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    w = torch.randn(n, k, generator=generator, device="cuda").to(FP8)
    return w, torch.rand(n // 128, k // 128, generator=generator, device="cuda") * 0.01 + 0.005


def main() -> int:
    """Run one part; --out FILE writes its figures as CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", action="store_true")
    which.add_argument("--sweep", action="store_true")
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    part = pairs if given.pairs else sweep if given.sweep else compare
    if not torch.cuda.is_available():
        raise SystemExit("engine_quantisers: no GPU")
    if part is not sweep:
        load_vllm()
    major, minor = torch.cuda.get_device_capability()
    made = part(arch_device(f"sm_{major}{minor}"), given.limit_s)
    if given.out is not None and made:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(made[0]))
            writer.writeheader()
            writer.writerows(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
