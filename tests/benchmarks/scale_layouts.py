"""Time of a8w8_blockscale's run-time function with x_scale row-major and M-major, on a GPU.

    python tests/benchmarks/scale_layouts.py [--csv FILE] [--limit-s 120] [--rows 1,8,64] [--knobs '{"BLOCK_...": 64}']

140 problems: 14 (N, K) of DeepSeek-V3 and Llama-70B over eight devices, ten M. What runs is the winner of the shipped
row (of the nearest one by an own kernel, where the problem has none), whatever its hash says, or the given knobs where
they fit. CUDA graphs over weights that rotate through 200 MB, both
layouts in turn, medians of nine. Prints the slower layout's time over the faster one's, by kind of kernel.
"""

import argparse
import csv
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gemmpipe.core.data import Build, Candidate, Device, Scalar
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import GemmSpec, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.launch.build import compile_build
from gemmpipe.launch.launch import KernelImplementation
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store
from gemmpipe.tables.store import render

FAMILY = load_family("a8w8_blockscale")
SIDES = [
    *[(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (1536, 7168), (2112, 7168), (4608, 7168)],
    *[(7168, 16384), (24576, 1536), (32768, 512), (7168, 18432), (7168, 256), (3072, 1536), (7168, 2048)],
]
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
ROTATE_BYTES, LEAST_CALLS, REPLAYS = 200e6, 12, 9


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem and what is to run for it."""

    spec: GemmSpec
    key: Mapping[str, Scalar]
    kernel: KernelImplementation
    candidate: Candidate


def kernel_of(label: str) -> KernelImplementation | None:
    """The family's own implementation of that label."""
    return next((i for i in FAMILY.implementations if i.label == label and isinstance(i, KernelImplementation)), None)


def cases(device: Device, rows: tuple[int, ...], knobs: Mapping[str, Scalar] | None) -> list[Case]:
    """Those of the 140 problems that have a shipped row of an own kernel; with `knobs`, that they fit."""
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    shipped: dict[tuple[Scalar, ...], tuple[str, str]] = {}
    for row in store.read(shipped_tables() / FAMILY.csv_name, FAMILY):
        if row["gfx"] == device.gfx and kernel_of(str(row["libtype"])) is not None:
            key = tuple(row[column.name] for column in FAMILY.key_columns)
            shipped[key] = str(row["libtype"]), str(row["config"])
    found = []
    for m in rows:
        for n, k in SIDES:
            problem = make_problem(FAMILY, {"M": m, "N": n, "K": k}, defaults, device.gfx, "case")
            spec, key = FAMILY.spec(problem), tuple(value for _, value in problem.key)
            if knobs is not None:
                label = {"warp_specialised": "gluon"}.get(
                    str(knobs.get("kernel_type")), str(knobs.get("kernel_type", "triton"))
                )
                candidate = Candidate.of(label, knobs)
            else:
                candidate = candidate_of(*nearest(shipped, key))
            kernel = kernel_of(candidate.backend)
            assert kernel is not None, candidate.backend
            candidate = Candidate.of(candidate.backend, kernel.normalise(spec, candidate.knobs, device))
            if reason := kernel.unsupported_reason(spec, candidate.knobs, device):
                print(f"{m}x{n}x{k}: {reason}", file=sys.stderr)
                continue
            found.append(Case(spec=spec, key=dict(problem.key), kernel=kernel, candidate=candidate))
    return found


def nearest(shipped: Mapping[tuple[Scalar, ...], tuple[str, str]], key: tuple[Scalar, ...]) -> tuple[str, str]:
    """What the row of this key says, or of the one whose sizes differ by the least factors, M's counting twice."""

    def distance(other: tuple[Scalar, ...]) -> float:
        m, n, k = (abs(math.log(int(str(a)) / int(str(b)))) for a, b in zip(other[:3], key[:3], strict=True))
        return 2 * m + n + k

    return shipped[min((other for other in shipped if other[3:] == key[3:]), key=distance)]


def tabulate(chosen: list[Case], device: Device) -> None:
    """Have the run time answer with these: a table of its own, without hashes."""
    rows = [
        {"gfx": device.gfx, "cu_num": device.cu_num, **case.key, "libtype": case.candidate.backend}
        | {"config": json.dumps(case.candidate.knobs), "us": 1.0}
        for case in chosen
    ]
    path = Path(tempfile.mkdtemp()) / "table.csv"
    path.write_text(render(rows, FAMILY, ()))
    os.environ["GEMMPIPE_CONFIG_A8W8_BLOCKSCALE"] = str(path)


def compile_all(chosen: list[Case], device: Device) -> None:
    """Both layouts' builds, into Triton's cache."""
    builds: set[Build] = set()
    for case in chosen:
        assert case.spec.x_scale is not None
        for order in ("row", "column"):
            spec = replace(case.spec, x_scale=replace(case.spec.x_scale, order=order))
            builds |= set(case.kernel.builds(spec, case.candidate.knobs, device))
    begin = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        facts = list(pool.map(compile_build, builds, [device] * len(builds)))
    spilled = sum(bool(each.spills) for each in facts)
    print(f"{len(builds)} builds in {time.perf_counter() - begin:.0f} s, {spilled} with spilled registers", flush=True)


def graph_of(call: Callable[[Weights], torch.Tensor], weights: list[Weights], calls: int) -> torch.cuda.CUDAGraph:
    """So many calls, each on the next weights."""
    for each in weights[:2]:
        call(each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(weights[i % len(weights)])
    return graph


def time_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Time of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / calls


def measure(case: Case, function: Callable[..., torch.Tensor], device: Device) -> dict[str, object]:
    """One row: microseconds of both layouts, and the errors of both."""
    spec, generator = case.spec, torch.Generator(device=device.torch_name).manual_seed(5)
    first, inputs = FAMILY.make_weights(spec, generator), FAMILY.make_inputs(spec, generator)
    assert inputs.x_scale is not None
    count = min(128, max(2, math.ceil(ROTATE_BYTES / (spec.n * spec.k))))
    weights = [first, *(replace(first, w=first.w.clone()) for _ in range(count - 1))]
    calls = max(count, LEAST_CALLS)
    # Rows of one line lie in both orders: a padded column is what an engine that writes M-major has there.
    padded = torch.zeros(inputs.x_scale.shape[1], -(-spec.m // 4) * 4, device=device.torch_name)
    columns = padded[:, : spec.m].copy_(inputs.x_scale.t()).t()
    layouts = {"row": inputs.x_scale, "column": columns}
    reference, tolerance = FAMILY.reference(spec, inputs, first), FAMILY.tolerance(spec)
    errors, graphs, outs = {}, {}, {}
    for word, scale in layouts.items():
        call = lambda each, scale=scale: function(inputs.x, each.w, scale, each.w_scale)  # noqa: E731
        outs[word] = call(first).clone()
        errors[word] = error_ratio(outs[word], reference, *tolerance)
        graphs[word] = graph_of(call, weights, calls)
    del reference
    for graph in graphs.values():
        graph.replay()
    times = {word: [] for word in layouts}
    for _ in range(REPLAYS):
        for word, graph in graphs.items():
            times[word].append(time_us(graph, calls))
    us = {word: statistics.median(found) for word, found in times.items()}
    return {
        "M": spec.m, "N": spec.n, "K": spec.k, "kind": case.candidate.backend, "row_us": round(us["row"], 3),
        "column_us": round(us["column"], 3), "worse_over_better": round(max(us.values()) / min(us.values()), 4),
        "wrong": round(max(errors.values()), 5), "same_bits": torch.equal(outs["row"], outs["column"]),
        "knobs": json.dumps(case.candidate.knobs, sort_keys=True),
    }  # fmt: skip


def summary(rows: list[dict[str, object]]) -> None:
    """Geomean and worst by kind, and of all."""
    kinds = {str(row["kind"]) for row in rows}
    for kind in (*sorted(kinds), "all"):
        of = [row for row in rows if kind in (row["kind"], "all")]
        ratios = [float(str(row["worse_over_better"])) for row in of]
        ahead = sum(float(str(row["row_us"])) < float(str(row["column_us"])) for row in of)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        over = sum(ratio > 1.02 for ratio in ratios)
        print(
            f"{kind:8} {len(of):4} problems: worse over better geomean {mean:.4f}, worst {max(ratios):.4f},"
            f" above 1.02 {over}; row-major ahead in {ahead}"
        )
    wrong = [row for row in rows if float(str(row["wrong"])) > 0.01]
    print(f"wrong results: {len(wrong)}; layouts that differ in a bit: {sum(not row['same_bits'] for row in rows)}")


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--knobs", type=json.loads)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("scale_layouts.py: needs a GPU")
    device = gpu_device(0)
    chosen = cases(device, tuple(map(int, arguments.rows.split(","))), arguments.knobs)
    tabulate(chosen, device)
    from gemmpipe.runtime import gemm_a8w8_blockscale

    compile_all(chosen, device)
    begin, rows = time.perf_counter(), []
    with torch.inference_mode():
        for case in chosen:
            if time.perf_counter() - begin > arguments.limit_s:
                print(f"{arguments.limit_s:.0f} s are over after {len(rows)} of {len(chosen)} problems")
                break
            rows.append(measure(case, gemm_a8w8_blockscale, device))
            print(*(rows[-1][name] for name in list(rows[-1])[:9]), flush=True)
            if arguments.csv is not None:
                with arguments.csv.open("w", newline="") as stream:
                    writer = csv.DictWriter(stream, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
    summary(rows)


if __name__ == "__main__":
    main()
