"""Forms of fused experts beside one another on a GPU: what the shipped table has, further forms, vLLM's function.

    python tests/benchmarks/experts_variants.py --limit-s 110 --out FOLDER
    python tests/benchmarks/experts_variants.py --limit-s 110 --tokens 1,4 --dtypes float8_e4m3fn

Five mixtures of experts, tokens 1 to 256, bf16 and fp8 by blocks. `now`: the fastest of the default configuration and
all configurations of the shipped table for so many tokens; `new`: the fastest of the further forms; `vllm`: vLLM's
`fused_experts` with its published file, if vLLM is importable. A figure is the median of replays of one CUDA graph with
several routings (so that weights come from memory), contenders interleaved; every result is checked. Cases are taken by
tokens, fewest first, until the limit; experts_variants.csv has every contender. With --routings the choice under the
usual routing (the table's own row for so many tokens, else the fastest) is timed under five others, beside the eight
fastest.
"""

import argparse
import csv
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from engine_experts import FAMILY, FP8, Case, graph_of, published, replay_us
from engine_experts import MIXTURES as SIZES
from triton.runtime.errors import TritonError

from gemmpipe.backends import engine_moe
from gemmpipe.backends.engine_compile import CompileCalls
from gemmpipe.bench.setup import routing_draws
from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import Implementation, Inputs, Prepared, Weights
from gemmpipe.family.reference import error_ratio
from gemmpipe.kernels.fmoe._engine import ENGINES
from gemmpipe.launch.build import compile_build
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

MIXTURES = ("qwen3-next", "qwen3-30b", "qwen3-235b-tp8", "deepseek-v3-tp8", "mixtral-tp2")
ROUTINGS = ("uniform", "skewed", "very_skewed", "one_hot", "6/5/4/3/2.2/1.6/1.1/0.7/0.4/0.2/0.1/0.05/0.02")
"""Beside the usual one: names, and a profile as captures have it."""
_FAILURES = (RuntimeError, ValueError, AssertionError, TritonError)
_MAX_ERROR = 0.04


Contender = tuple[Implementation, Knobs]
Call = Callable[[], torch.Tensor]
OVERLAP: Knobs = {"OVERLAP": True}
SKINNY = {  # columns, step along K and warps of the first stage, then of the second
    "b": (2, 512, 1, 2, 256, 1),
    "h": (1, 1024, 1, 1, 512, 1),
    "k": (1, 2048, 1, 1, 512, 1),
    "l": (1, 1024, 1, 1, 256, 1),
    "n": (1, 1024, 1, 2, 256, 1),
    "o": (2, 1024, 1, 2, 256, 1),
    "q": (1, 2048, 2, 1, 1024, 1),
}
PLAIN = {  # rows, columns, step along K, warps, stages; whether the activation is fused; columns of the second stage
    "a": (16, 128, 128, 4, 3, False, 128),
    "b": (16, 64, 128, 4, 3, True, 128),
    "c": (16, 128, 128, 8, 3, True, 128),
    "d": (16, 64, 128, 4, 4, True, 64),
    "e": (16, 128, 128, 4, 4, False, 128),
}
_STAGE = ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
_NAMES = (*_STAGE, *(f"{name}_2" for name in _STAGE))
_PLAIN_NAMES = ("BLOCK_SIZE_M", *_STAGE, "num_stages", "FUSED_ACT", "BLOCK_SIZE_N_2")


def implementation(label: str) -> Implementation:
    return next(each for each in FAMILY.implementations if each.label == label)


def fitting(case: Case, device: Device, found: Iterator[tuple[str, Implementation, Knobs]]) -> dict[str, Contender]:
    """Those that can run and are not dominated, each once."""
    kept: dict[str, Contender] = {}
    for name, own, knobs in found:
        normal = own.normalise(case.spec, knobs, device)
        reason = own.unsupported_reason(case.spec, normal, device) or own.dominated_reason(case.spec, normal, device)
        if reason is None and (own, normal) not in kept.values():
            kept[name] = (own, normal)
    return kept


def existing(case: Case, device: Device) -> Iterator[tuple[str, Implementation, Knobs]]:
    yield from shipped(case, device)
    default = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 3}
    if case.dtype == FP8:
        default["BLOCK_SIZE_K"] = 128
    yield "now default", implementation("triton"), default
    for name, values in PLAIN.items():
        yield f"now plain {name}", implementation("triton"), dict(zip(_PLAIN_NAMES, values, strict=True))


def shipped(case: Case, device: Device) -> list[tuple[str, Implementation, Knobs]]:
    """The rows of about so many tokens, those of this mixture first: what they share has their name.

    A row has the name of its tokens, and of its sizes where it is another mixture's.
    """
    found = []
    for row in store.read(shipped_tables() / FAMILY.csv_name, FAMILY):
        tokens = int(str(row["token"]))
        near = case.tokens / 4 <= tokens <= case.tokens * 4
        if near and str(row["q_dtype_w"]) == case.dtype and row["gfx"] == device.gfx:
            candidate = candidate_of(str(row["libtype"]), str(row["config"]))
            sizes = tuple(int(str(row[name])) for name in ("model_dim", "inter_dim", "expert", "topk"))
            other = sizes != SIZES[case.mixture]
            name = f"{table_row(tokens)} of {'x'.join(map(str, sizes))}" if other else table_row(tokens)
            found.append(((other, tokens != case.tokens), (name, implementation(candidate.backend), candidate.knobs)))
    return [each for _, each in sorted(found, key=lambda item: item[0])]


def table_row(tokens: int) -> str:
    return f"now {tokens}"


def further(case: Case, device: Device) -> Iterator[tuple[str, Implementation, Knobs]]:
    for name, values in SKINNY.items():
        knobs: Knobs = {**dict(zip(_NAMES, values, strict=True)), "num_stages": 1}
        yield f"new skinny {name}", implementation("skinny"), knobs
    for name, values in PLAIN.items():
        yield f"new overlapped {name}", implementation("triton"), dict(zip(_PLAIN_NAMES, values, strict=True)) | OVERLAP
    for name, own, knobs in existing(case, device):
        if own.label == "triton":
            yield f"new overlapped {name.removeprefix('now ')}", own, {**knobs, **OVERLAP}


def contenders(case: Case, device: Device) -> dict[str, Contender]:
    return fitting(case, device, itertools.chain(existing(case, device), further(case, device)))


class Operands:
    """The weights of the latest mixture, and the inputs of a case."""

    def __init__(self) -> None:
        self.key: tuple[str, str] | None = None
        self.weights: Weights | None = None

    def of(self, case: Case, routing: str | None) -> tuple[list[Inputs], Weights]:
        if self.key != (case.mixture, case.dtype) or self.weights is None:
            self.weights = None
            torch.cuda.empty_cache()
            self.key = (case.mixture, case.dtype)
            self.weights = FAMILY.make_weights(case.spec, torch.Generator(device="cuda").manual_seed(1))
        seeds = range(2, 2 + routing_draws(FAMILY, case.spec))
        assert case.spec.experts is not None
        spec = replace(case.spec, experts=replace(case.spec.experts, routing=routing))
        inputs = [FAMILY.make_inputs(spec, torch.Generator(device="cuda").manual_seed(seed)) for seed in seeds]
        return inputs, self.weights


def in_a_row(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def graphs_of(case: Case, calls: Mapping[str, Sequence[Call]]) -> dict[str, torch.cuda.CUDAGraph]:
    """A graph of the calls of each contender that can be captured."""
    found = {}
    for name, own in calls.items():
        try:
            found[name] = graph_of(in_a_row(own))
        except _FAILURES as error:
            report_failure(case, name, error)
    return found


def checked_calls(
    case: Case,
    device: Device,
    made: Mapping[str, Contender],
    operands: Operands,
    kept: list[object],
    routing: str | None = None,
    *,
    engine: bool,
) -> dict[str, list[Call]]:
    """A call for each draw of the routing, of each contender whose results are right; `kept` gets what they read."""
    inputs, weights = operands.of(case, routing)
    kept += inputs
    references = [FAMILY.reference(case.spec, each, weights) for each in inputs[:2]]
    found = {}
    for name in (*made, *(["vllm"] if engine else [])):
        try:
            calls: list[Call] = []
            for each in inputs:
                if name == "vllm":
                    calls.append(engine_moe.launch("vllm", case.spec, published(case), each, weights))
                else:
                    own, knobs = made[name]
                    out = torch.full(case.spec.out_shape, math.nan, dtype=torch.bfloat16, device="cuda")
                    calls.append(own.bind(case.spec, knobs, device, each, Prepared(weights=weights), out))
            for call, reference in zip(calls, references, strict=False):
                ratio = error_ratio(call(), reference.clone(), *FAMILY.tolerance(case.spec))
                if not ratio < _MAX_ERROR:
                    raise ValueError(f"a wrong result, {ratio:.3f} of the elements")
            found[name] = calls
            kept += calls
        except (*_FAILURES, ImportError) as error:
            report_failure(case, name, error)
    return found


def report_failure(case: Case, name: str, error: Exception) -> None:
    """One line; none for vLLM, which need not be installed."""
    torch.cuda.synchronize()
    if name != "vllm":
        print("failed:", case.mixture, case.dtype, case.tokens, name, repr(error)[:200], flush=True)


def interleaved_us(graphs: Mapping[str, torch.cuda.CUDAGraph], count: int, rounds: int) -> dict[str, float]:
    """The median time of one call of `count` in each graph."""
    launches = max(2, min(10, int(1e-3 / max(1e-6, replay_us(next(iter(graphs.values())), 2) * 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(replay_us(graph, launches) / count)
    return {name: statistics.median(values) for name, values in samples.items()}


def best(times: Mapping[str, float], kind: str) -> tuple[str, float]:
    own = {name: us for name, us in times.items() if name.startswith(kind)}
    name = min(own, key=lambda each: own[each], default="")
    return name.removeprefix(kind).strip(), own.get(name, math.nan)


def geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values)) if values else math.nan


def regrets(
    case: Case, device: Device, made: Mapping[str, Contender], operands: Operands, usual: dict[str, float], rounds: int
) -> list[tuple[str, str, float]]:
    """For each routing its fastest contender, and the time of the usual routing's choice over that one's."""
    own = {name: us for name, us in usual.items() if name != "vllm"}
    fast = sorted(own, key=lambda name: own[name])
    choice = table_row(case.tokens) if table_row(case.tokens) in own else fast[0]
    kept = {name: made[name] for name in {choice: None} | dict.fromkeys(fast[:8])}  # others are far behind
    found = []
    for routing in ROUTINGS:
        alive: list[object] = []
        graphs = graphs_of(case, checked_calls(case, device, kept, operands, alive, routing, engine=False))
        times = interleaved_us(graphs, routing_draws(FAMILY, case.spec), rounds)
        fastest = min(times, key=lambda name: times[name])
        found.append((routing, fastest, times[choice] / times[fastest]))
        del graphs, alive
    return found


class Compilation:
    """All builds of the contenders, compiled by processes that use no GPU, in the order of the cases."""

    def __init__(self, made: Mapping[Case, Mapping[str, Contender]], device: Device, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        self._futures: dict[Build | str, Future[object]] = {}
        self._needed: dict[Case, list[Build | str]] = {}
        for case, own_made in made.items():
            builds = [b for own, knobs in own_made.values() for b in own.builds(case.spec, knobs, device)]
            for build in builds:
                if build not in self._futures:
                    self._futures[build] = self._pool.submit(compile_build, build, device)
            self._needed[case] = [*dict.fromkeys(builds)]

    def engine(self, cases: list[Case], device: Device) -> None:
        """Compile vLLM's calls too, if vLLM is importable."""
        if engine_moe.unavailable_reason("vllm") is None:
            calls = [(case.spec, published(case)) for case in cases]
            for i in range(4):
                compiled = CompileCalls(implementation=ENGINES["vllm"], device=device, calls=calls[i::4])
                self._futures[f"vllm {i}"] = self._pool.submit(compiled)

    def wait(self, case: Case, deadline: float) -> None:
        for key in self._needed[case]:
            try:
                self._futures[key].result(timeout=max(0.1, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - the contender fails with its reason when it is bound
                print("not compiled:", repr(error)[:200])

    def close(self) -> None:
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def write(path: Path, rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["mixture", "dtype", "tokens", "contender", "us", "knobs"])
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-s", type=float, default=110)
    parser.add_argument("--tokens", default="1,4,16,64,256")
    parser.add_argument("--mixtures", default=",".join(MIXTURES))
    parser.add_argument("--dtypes", default=f"bfloat16,{FP8}")
    parser.add_argument("--routings", action="store_true", help="the choice beside the fastest under other routings")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    deadline, device, operands = time.monotonic() + arguments.limit_s, gpu_device(0), Operands()
    tokens, mixtures, dtypes = (getattr(arguments, name).split(",") for name in ("tokens", "mixtures", "dtypes"))
    few = [t for t in map(int, tokens) if t <= 4]
    many = [t for t in map(int, tokens) if t > 4]
    cases = [
        Case(m, d, t) for group in (few, many) for m, d in itertools.product(mixtures, dtypes) for t in group
    ]  # by weights within each group: making them takes longest
    made = {case: contenders(case, device) for case in cases}
    compilation, rows, lines = Compilation(made, device, arguments.processes), [], []
    compilation.engine(cases, device)
    print("mixture dtype tokens: now (which), new (which), vllm in us; now/new, vllm/new")
    for case in cases:
        if time.monotonic() > deadline - 2:
            print("time is up before", case)
            break
        compilation.wait(case, deadline)
        alive: list[object] = []
        graphs = graphs_of(case, checked_calls(case, device, made[case], operands, alive, engine=True))
        times = interleaved_us(graphs, routing_draws(FAMILY, case.spec), arguments.rounds)
        del graphs, alive
        for name, us in times.items():
            knobs = made[case][name][1] if name != "vllm" else published(case)
            rows.append([case.mixture, case.dtype, case.tokens, name, f"{us:.3f}", json.dumps(dict(knobs))])
        write(Path(arguments.out) / "experts_variants.csv", rows)
        (now, now_us), (new, new_us), (_, vllm_us) = (best(times, kind) for kind in ("now", "new", "vllm"))
        lines.append((case, now_us, new_us, vllm_us, times.get(table_row(case.tokens), math.nan)))
        if arguments.routings:
            for routing, fastest, regret in regrets(case, device, made[case], operands, times, arguments.rounds):
                print(f"    {case.mixture} {case.dtype[:5]} {case.tokens} {routing[:12]:12} {regret:.3f} of {fastest}")
        printed = (
            f"{case.mixture:15} {case.dtype[:5]} {case.tokens:4}: {now_us:7.1f} ({now:8}) {new_us:7.1f} ({new:16})"
        )
        print(f"{printed} {vllm_us:7.1f}; {now_us / new_us:.3f} {vllm_us / new_us:.3f}", flush=True)
    compilation.close()
    for dtype, count in itertools.product(dtypes, map(int, tokens)):
        own = [(a, b, v, t) for case, a, b, v, t in lines if (case.dtype, case.tokens) == (dtype, count)]
        over_now = geomean([a / b for a, b, _, _ in own if a / b > 0])
        over_vllm = geomean([v / min(a, b) if b > 0 else v / a for a, b, v, _ in own if v > 0])
        of_table = geomean([v / t for _, _, v, t in own if v / t > 0])
        print(
            f"{dtype[:5]} {count:4} tokens: now/new {over_now:.3f}, vllm over the faster {over_vllm:.3f}, "
            f"over the table's row {of_table:.3f}"
        )


if __name__ == "__main__":
    main()
