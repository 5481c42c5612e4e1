"""vLLM's `fused_experts` on a GPU: does our kernel of its form take as long, and are written files faster than its own?

    python tests/benchmarks/engine_experts.py agree --cases 60 --limit-s 95
    python tests/benchmarks/engine_experts.py files FOLDER --limit-s 150

Needs vLLM importable beside torch. Every figure is of one process: CUDA graphs, contenders interleaved, median of nine
replays (agree: five); all kernels are compiled beforehand by several processes into Triton's cache.
"""

import argparse
import csv
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from triton.runtime.errors import TritonError

from gemmpipe.backends import engine_moe
from gemmpipe.core.data import Device, Knobs, Problem
from gemmpipe.core.device import gpu_device
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Prepared, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.kernels.fmoe._engine import ENGINES
from gemmpipe.launch.build import compile_build

MIXTURES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b-tp8": (4096, 192, 128, 8),
    "deepseek-v3-tp8": (7168, 256, 256, 8),
    "qwen3-next": (2048, 512, 512, 10),
    "qwen3-235b-tp4": (4096, 384, 128, 8),
    "mixtral-tp2": (4096, 7168, 8, 2),
}
"""model_dim, inter_dim of a rank, experts, topk."""
FP8 = "float8_e4m3fn"
TOKENS = tuple(map(int, os.environ.get("TOKENS", "1,4,16,64,256,1024,4096").split(",")))
AXES = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128),
    "GROUP_SIZE_M": (1, 16, 32),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
}
_FAILURES = (RuntimeError, ValueError, AssertionError, TritonError)
FAMILY = load_family("fmoe")
ENGINE = ENGINES["vllm"]
FORMS = {"exact": ENGINE.exact_form(), "own": ENGINE}
"""The kernels of the finals without an engine, and of screening."""


@dataclass(frozen=True)
class Case:
    """One mixture of experts with its number of tokens."""

    mixture: str
    dtype: str
    tokens: int

    @property
    def problem(self) -> Problem:
        model, inner, experts, topk = MIXTURES[self.mixture]
        key = {"token": self.tokens, "model_dim": model, "inter_dim": inner, "expert": experts, "topk": topk}
        defaults = KernelDefaults(dtype=self.dtype, out_dtype=None, bias=None)
        return make_problem(FAMILY, key, defaults, "sm_90", "case")

    @property
    def spec(self) -> GemmSpec:
        return FAMILY.spec(self.problem)


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20000)
    begin.record()
    for _ in range(launches):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / launches


def interleaved_us(graphs: dict[str, torch.cuda.CUDAGraph], tokens: int, rounds: int = 9) -> dict[str, float]:
    launches = 8 if tokens <= 256 else 3
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(replay_us(graph, launches))
    return {name: statistics.median(values) for name, values in samples.items()}


_WEIGHTS: dict[tuple[str, str], Weights] = {}


ROUTINGS = 4
"""A figure is the mean over so many routings: which configuration leads depends on how rows spread over experts."""


def operands(case: Case, routing: int = 0) -> tuple[Inputs, Weights]:
    key = (case.mixture, case.dtype)
    if key not in _WEIGHTS:
        _WEIGHTS.clear()
        torch.cuda.empty_cache()
        _WEIGHTS[key] = FAMILY.make_weights(case.spec, torch.Generator(device="cuda").manual_seed(1))
    return FAMILY.make_inputs(case.spec, torch.Generator(device="cuda").manual_seed(2 + routing)), _WEIGHTS[key]


def engine_call(case: Case, knobs: Knobs, routing: int = 0) -> Callable[[], torch.Tensor]:
    inputs, weights = operands(case, routing)
    return engine_moe.launch("vllm", case.spec, knobs, inputs, weights)


def engine_calls(case: Case, knobs: Knobs) -> Callable[[], None]:
    """The engine's function on each routing in a row."""
    calls = [engine_call(case, knobs, routing) for routing in range(ROUTINGS)]

    def run() -> None:
        for call in calls:
            call()

    return run


def warm(jobs: list[tuple[Case, dict]]) -> None:
    """Compile the engine's kernels of these jobs (in a process of its own); a configuration that fails is left out."""
    for case, knobs in jobs:
        try:
            engine_call(case, knobs)()
            torch.cuda.synchronize()
        except _FAILURES as error:
            print("failed", case, knobs, repr(error)[:120], flush=True)


def warm_all(jobs: list[tuple[Case, dict]], processes: int) -> None:
    begin = time.monotonic()
    shares = [jobs[i::processes] for i in range(processes)]
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(warm, [share for share in shares if share]))
    except BrokenProcessPool as error:
        print("warming", error)
    print(f"compiled for {len(jobs)} calls in {time.monotonic() - begin:.0f} s", flush=True)


def random_jobs(count: int, device: Device) -> list[tuple[Case, dict]]:
    """Random configurations, spread over mixtures, dtypes and three numbers of tokens; sorted, as weights are large."""
    cases = [Case(m, d, t) for m in MIXTURES for d in ("bfloat16", FP8) for t in (4, 64, 1024)]
    draw, jobs = random.Random(3), []
    for case in itertools.cycle(cases):  # some have no configuration: fp8 with 192 columns
        knobs = ENGINE.normalise(case.spec, {name: draw.choice(values) for name, values in AXES.items()}, device)
        if (
            ENGINE.unsupported_reason(case.spec, knobs, device) is None
            and ENGINE.dominated_reason(case.spec, knobs, device) is None
        ):
            jobs.append((case, dict(knobs)))
        if len(jobs) == count:
            break
    return sorted(jobs, key=lambda job: (job[0].mixture, job[0].dtype))


def launch_share(jobs: list[tuple[Case, dict]], share: str, device: Device) -> None:
    """Compile both forms of each of this process's jobs, and launch the engine's function once."""
    part, _, parts = share.partition("/")
    first, end = (len(jobs) * i // int(parts) for i in (int(part), int(part) + 1))
    mine = jobs[first:end]  # neighbours have the same weights
    for case, knobs in mine:
        for form in FORMS.values():
            for build in form.builds(case.spec, knobs, device):
                compile_build(build, device)
    warm(mine)


def compile_ahead(arguments: argparse.Namespace) -> None:
    """Processes with a share of the jobs each."""
    begin = time.monotonic()
    command = [sys.executable, __file__, "agree", "--cases", str(arguments.cases)]
    these = [subprocess.Popen([*command, "--share", f"{i}/{arguments.processes}"]) for i in range(arguments.processes)]
    for process in these:
        process.wait()
    print(f"compiled ahead in {time.monotonic() - begin:.1f} s", flush=True)


def agree(arguments: argparse.Namespace, device: Device) -> None:
    """Both forms against the engine's function."""
    begun = time.monotonic()
    jobs = random_jobs(arguments.cases, device)
    if arguments.share:
        launch_share(jobs, arguments.share, device)
        return
    if arguments.processes:
        compile_ahead(arguments)
    rows: list[list[object]] = []
    for case, knobs in jobs:
        if time.monotonic() - begun > arguments.limit_s:
            print(f"stopped after {arguments.limit_s:g} s")
            break
        try:
            rows.append(agreement(case, knobs, device))
        except _FAILURES as failure:
            print("failed", case, knobs, repr(failure)[:150], flush=True)
            torch.cuda.synchronize()
    write(arguments, "agree_experts.csv", "mixture dtype tokens knobs exact_us own_us vllm_us error", rows)
    for form, column in (("exact", 4), ("screening's", 5)):
        ratios = [row[column] / row[6] for row in rows]
        within = sum(abs(ratio - 1) <= 0.03 for ratio in ratios) / max(1, len(ratios))
        print(f"{len(rows)} configurations, {form} form: {within:.1%} within 3 %, own / vllm {geomean(ratios):.4f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
        for tokens in (4, 64, 1024):
            some = [row[column] / row[6] for row in rows if row[2] == tokens]
            if some:
                print(f"  {tokens} tokens: geomean {geomean(some):.3f}, {min(some):.3f} to {max(some):.3f}")
        for row in sorted(rows, key=lambda row: abs(math.log(row[column] / row[6])))[-4:]:
            print("  ", *row[:4], *(f"{value:.4g}" for value in row[4:]))


def agreement(case: Case, knobs: Knobs, device: Device) -> list[object]:
    """A row: times of the exact form, of the screening's and of the engine's function, and the forms' difference."""
    inputs, weights = operands(case)
    out = torch.empty(case.spec.out_shape, dtype=getattr(torch, case.spec.out_dtype), device="cuda")
    calls = {n: f.bind(case.spec, knobs, device, inputs, Prepared(weights=weights), out) for n, f in FORMS.items()}
    calls["vllm"] = engine_call(case, knobs)
    mine, theirs = calls["exact"]().float().clone(), calls["vllm"]().float()
    error = ((mine - theirs).norm() / theirs.norm()).item()
    times = interleaved_us({name: graph_of(call) for name, call in calls.items()}, case.tokens, 5)
    return [case.mixture, case.dtype, case.tokens, json.dumps(knobs), *(times[name] for name in calls), error]


def geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


def write(arguments: argparse.Namespace, name: str, header: str, rows: list[list[object]]) -> None:
    path = Path(arguments.out)
    with (path / name if path.is_dir() else path).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(header.split())
        table.writerows(rows)


def nearest(entries: dict[int, dict], tokens: int) -> dict:
    """As the engine takes it."""
    return entries[min(entries, key=lambda key: abs(key - tokens))]


def read(path: Path) -> dict[int, dict]:
    found = json.loads(path.read_text())
    found.pop("triton_version", None)
    return {int(key): value for key, value in found.items()}


def file_name(case: Case) -> str:
    """The engine's name of the file for this device."""
    device = torch.cuda.get_device_name().replace(" ", "_")
    _, inner, experts, _ = MIXTURES[case.mixture]
    kind = ",dtype=fp8_w8a8,block_shape=[128,128]" if case.dtype == FP8 else ""
    return f"E={experts},N={inner},device_name={device}{kind}.json"


def published(case: Case) -> Knobs:
    """The configuration of the engine without a file of ours: its own for this device, else its default."""
    import vllm.model_executor.layers.fused_moe as engine

    path = Path(engine.__file__).parent / "configs" / file_name(case)
    if path.exists():
        return nearest(read(path), case.tokens)
    return engine_moe.default_engine_config("vllm", case.spec) or {}


def between(keys: list[int]) -> Iterator[int]:
    """Every M and the geometric middles, all whole numbers."""
    for low, high in itertools.pairwise(keys):
        yield low
        middle = round((low * high) ** 0.5)
        if low < middle < high:
            yield middle
    yield keys[-1]


def files(arguments: argparse.Namespace, device: Device) -> None:
    jobs: list[tuple[Case, str, dict]] = []
    for mixture in MIXTURES:
        for dtype in ("bfloat16", FP8):
            path = Path(arguments.folder) / file_name(Case(mixture, dtype, 1))
            if path.exists():
                ours = read(path)
                for tokens in between(sorted(TOKENS)):
                    case = Case(mixture, dtype, tokens)
                    jobs += [(case, "ours", nearest(ours, tokens)), (case, "published", dict(published(case)))]
    warm_all(list({(c, json.dumps(k)): (c, k) for c, _, k in jobs}.values()), 12)
    rows, deadline = [], time.monotonic() + arguments.limit_s
    for case in dict.fromkeys(case for case, _, _ in jobs):
        if time.monotonic() > deadline:
            print("time is up")
            break
        taken = {name: knobs for c, name, knobs in jobs if c == case}
        if taken["ours"] == taken["published"]:
            rows.append([case.mixture, case.dtype, case.tokens, math.nan, math.nan, 1.0])
            continue
        calls = {name: engine_calls(case, knobs) for name, knobs in taken.items()}  # they own what the graphs read
        graphs = {name: graph_of(call) for name, call in calls.items()}
        times = {name: us / ROUTINGS for name, us in interleaved_us(graphs, case.tokens).items()}
        del graphs, calls
        torch.cuda.empty_cache()
        rows.append([case.mixture, case.dtype, case.tokens, times["ours"], times["published"]])
        rows[-1].append(times["ours"] / times["published"])
    write(arguments, "files_experts.csv", "mixture dtype tokens ours_us published_us ratio", rows)
    for dtype in ("bfloat16", FP8):
        for low, high in ((1, 4), (5, 64), (65, 256), (257, 4096)):
            some = [row[5] for row in rows if row[1] == dtype and low <= row[2] <= high]
            if some:
                print(f"{dtype} {low} to {high} tokens: {geomean(some):.3f} ({min(some):.3f}, {max(some):.3f})")
        for mixture in MIXTURES:
            some = [row[5] for row in rows if row[1] == dtype and row[0] == mixture]
            if some:
                print(f"  {mixture}: {geomean(some):.3f} ({min(some):.3f}, {max(some):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("agree", "files"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--cases", type=int, default=60, help="agree: configurations")
    parser.add_argument("--limit-s", type=float, default=95)
    parser.add_argument("--processes", type=int, default=14, help="agree: that compile ahead; 0: none")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder, or the CSV")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = gpu_device(0)
    (agree if arguments.mode == "agree" else files)(arguments, device)


if __name__ == "__main__":
    main()
