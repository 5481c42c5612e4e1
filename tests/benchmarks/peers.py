"""Times the fastest peers' fp8 block-scaled products beside shipped choices, on a Hopper GPU.

    python tests/benchmarks/peers.py --limit-s 100 --out peers.csv [--rows 1,64,4096] [--sizes 7168x18432] [--tiles 3]
    python tests/benchmarks/peers.py --linear --limit-s 60 --out linear.csv --rows 1,8,16,32
    python tests/benchmarks/peers.py --probe          # does DeepGEMM's extension run, and if not, why

140 problems: 14 (N, K) of DeepSeek-V3 and Llama-70B over eight devices, ten M. Peers are the candidates of every
backend that is available: DeepGEMM's first tiles by its own model, cuBLASLt, FlashInfer, and the kernels of vLLM. CUDA
graphs over weights that rotate through 200 MB, all contenders in turn, medians of nine, both layouts of x_scale, every
result checked. Ours are the choices of the `--ours` nearest shipped rows, the problem's own one among them where there
is one. Prints the peer's time over ours by regime of M. Measuring runs in a process of its own: where a
contender ends it, the next one goes on without that contender. `--pause-ms` before each replay gives cool clocks.
`--linear`: x is bf16; vLLM's and SGLang's pairs of quantiser and product, and FlashInfer, against our quantiser with
the shipped winner, and for few rows some of our kernels of one launch.
"""

import argparse
import csv
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from scale_layouts import FAMILY, LEAST_CALLS, REPLAYS, ROTATE_BYTES, ROWS, SIDES, kernel_of, time_us

from gemmpipe.backends import NO_SPACE, library_backends
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.deepgemm_package import find_package, load_module
from gemmpipe.core.data import Build, Candidate, Device, Knobs
from gemmpipe.core.device import gpu_device
from gemmpipe.core.errors import one_line
from gemmpipe.core.nvml import conditions
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.launch.build import compile_build
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

LAYOUTS = ("row", "column")
PEERS = ("deepgemm", "flashinfer", "scaled_mm", "vllm_cutlass")
PAIRS = ("vllm", "sglang", "flashinfer")
LINEAR = load_family("linear_fp8_blockscale")
REGIMES = {
    "M=1": (1, 1),
    "8-16": (8, 16),
    "32-64": (32, 64),
    "128-256": (128, 256),
    "512-1024": (512, 1024),
    "4096": (4096, 4096),
}
Row = dict[str, str]
OURS, WRONG = "ours", 0.01
_PROBE_S = 30
FIELDS = ("M", "N", "K", "contender", "layout", "us", "tflops", "sm_mhz", "power_w", "error", "note")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A candidate of an implementation, called with one layout of x_scale."""

    name: str
    implementation: Implementation
    knobs: Knobs
    layout: str

    @property
    def label(self) -> str:
        """The backend, or `ours`."""
        return OURS if self.name.startswith(OURS) else self.implementation.label


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=100, help="seconds for everything, compilers included")
    parser.add_argument("--out", type=Path, help="its rows are not timed again: peers.csv, with pauses peers_pause.csv")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sizes", default=",".join(f"{n}x{k}" for n, k in SIDES), help="NxK, ...")
    parser.add_argument("--tiles", type=int, default=4, help="DeepGEMM's tiles per product")
    parser.add_argument("--ours", type=int, default=4, help="our candidates: those of the nearest shipped rows")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--triton", action="store_true", help="also engines' Triton functions, which import the engine")
    parser.add_argument("--extension", action="store_true", help="also DeepGEMM's own call, which compiles by itself")
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--banned", default="", help=argparse.SUPPRESS)
    parser.add_argument("--probe-child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out = given.out or Path("peers_pause.csv" if given.pause_ms else "peers.csv")
    return given


def available(device: Device, given: argparse.Namespace) -> dict[str, Implementation]:
    """The peers that this machine has; prints why the others are missing."""
    found: dict[str, Implementation] = {}
    for label, backend in library_backends().items():
        if label not in (PAIRS if given.linear else PEERS):
            continue
        backend = replace(backend, tiles=given.tiles) if isinstance(backend, DeepGemm) else backend
        if reason := backend.unavailable(device):
            print(f"without {label}: {reason}", flush=True)
        else:
            found[label] = backend
    return found


def specs(given: argparse.Namespace) -> list[GemmSpec]:
    """The products, or the linear layers of these sizes, in an order that spans all when the time is over."""
    family, options = LINEAR if given.linear else FAMILY, KernelDefaults(dtype=None, out_dtype=None, bias=None)
    sides = [tuple(map(int, size.split("x"))) for size in given.sizes.split(",")]
    keys = [{"M": int(m), "N": n, "K": k} for m in given.rows.split(",") for n, k in sides]
    random.Random(7).shuffle(keys)
    return [family.spec(make_problem(family, key, options, "sm_90", "peers")) for key in keys]


@cache
def shipped_rows(device: Device) -> list[tuple[tuple[int, int, int], Candidate]]:
    """The shipped choices by own kernels for this device, by (M, N, K)."""
    rows = store.read(shipped_tables() / FAMILY.csv_name, FAMILY)
    mine = [row for row in rows if row["gfx"] == device.gfx and kernel_of(str(row["libtype"])) is not None]
    keys = [(int(str(row["M"])), int(str(row["N"])), int(str(row["K"]))) for row in mine]
    return [(key, candidate_of(str(row["libtype"]), str(row["config"]))) for key, row in zip(keys, mine, strict=True)]


def ours(spec: GemmSpec, device: Device, given: argparse.Namespace) -> Iterator[tuple[str, Implementation, Knobs]]:
    """(Name, implementation, knobs): `shipped` for the problem's own row, `near` for rows of the nearest sizes.

    A linear layer has them with the quantiser, and for few rows some kernels of one launch.
    """

    def distance(row: tuple[tuple[int, int, int], Candidate]) -> float:
        m, n, k = (abs(math.log(a / b)) for a, b in zip(row[0], (spec.m, spec.n, spec.k), strict=True))
        return 2 * m + n + k

    family, found = LINEAR if given.linear else FAMILY, dict[Candidate, str]()
    own = {implementation.label: implementation for implementation in family.implementations}
    for key, candidate in sorted(shipped_rows(device), key=distance):
        implementation = own.get(candidate.backend) or own[f"fused_{candidate.backend}"]  # streamed in one launch
        knobs = implementation.normalise(spec, candidate.knobs, device)
        if len(found) < given.ours and not implementation.unsupported_reason(spec, knobs, device):
            exact = key == (spec.m, spec.n, spec.k) and not given.linear
            found.setdefault(Candidate.of(implementation.label, knobs), "shipped" if exact else "near")
    yield from ((name, own[candidate.backend], candidate.knobs) for candidate, name in found.items())
    rows = next((size for size in (16, 32, 64) if spec.m <= size), None) if given.linear else None
    for kind in ("fused", "weight_only") if rows else ():
        for columns in (32, 64):
            splits = next(s for s in (1, 2, 4, 8, 16) if s == 16 or spec.n // columns * s >= 2 * device.cu_num)
            shape = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": splits}
            more = {"GROUP_SIZE_M": 16, "num_warps": 4, "num_stages": 4, "kernel_type": kind, "SWAP_AB": False}
            amd = {"waves_per_eu": 0, "matrix_instr_nonkdim": 16, "kpack": 1, "cache_modifier": ""}
            yield kind, own[kind], {**shape, **more, **amd, "CTAS_PER_SM": 1, "CLUSTER_SIZE": 1}


def contenders(
    spec: GemmSpec, peers: Mapping[str, Implementation], device: Device, given: argparse.Namespace
) -> list[Contender]:
    """Ours and the peers' candidates, each in both layouts."""
    offered = [(f"{OURS} {name} {own.label}", own, knobs) for name, own, knobs in ours(spec, device, given)]
    for label, peer in peers.items():
        for knobs in peer.configs(spec, device, NO_SPACE):
            own_call = label == "deepgemm" and not knobs and not given.extension
            if not own_call and (given.triton or knobs.get("product") != "triton"):
                offered.append((label, peer, knobs))
    found: dict[str, tuple[Implementation, Knobs]] = {}
    for name, implementation, knobs in offered:
        knobs = implementation.normalise(spec, knobs, device)
        if not implementation.unsupported_reason(spec, knobs, device):
            found.setdefault(f"{name} {json.dumps(knobs, sort_keys=True)}", (implementation, knobs))
    layouts = LAYOUTS[:1] if given.linear else LAYOUTS
    return [
        Contender(name=name, implementation=implementation, knobs=knobs, layout=layout)
        for name, (implementation, knobs) in found.items()
        for layout in layouts
    ]


def needed(spec: GemmSpec, contender: Contender, device: Device) -> tuple[Build, ...]:
    """The builds of a contender."""
    spec = spec.with_scale_order(contender.layout)
    return contender.implementation.builds(spec, contender.knobs, device)


def compile_all(builds: Iterable[Build], device: Device, until: float) -> set[Build]:
    """Compiles in parallel until the time is over; returns nvcc's builds that are then missing."""
    distinct = dict.fromkeys(builds)
    own, foreign = ([b for b in distinct if bool(b.signature) == signed] for signed in (True, False))
    begin = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_build, own, [device] * len(own)))
    print(f"{len(own)} of our kernels, {time.perf_counter() - begin:.0f} s", flush=True)

    def compile_one(build: Build) -> bool | None:
        return compile_build(build, device).cached if time.time() < until else None

    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # nvcc is a process of its own
        cached = list(threads.map(compile_one, foreign))
    missing = {build for build, known in zip(foreign, cached, strict=True) if known is None}
    counts = f"{cached.count(True)} from the cache, {len(missing)} left out"
    print(f"{len(foreign)} of DeepGEMM's kernels, {counts}, {time.perf_counter() - begin:.0f} s", flush=True)
    return missing


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls one after the other."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


class Problem:
    """The operands of a case: weights in rotation, x with its scales in both layouts, and the reference."""

    def __init__(self, spec: GemmSpec, family: Family, device: Device) -> None:
        generator = torch.Generator(device=device.torch_name).manual_seed(5)
        self.spec, self.device = spec, device
        first, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
        count = min(128, max(2, math.ceil(ROTATE_BYTES / (spec.n * spec.k))))
        self.weights = [first, *(replace(first, w=first.w.clone()) for _ in range(count - 1))]
        self.calls = max(count, LEAST_CALLS)
        self.inputs = {"row": inputs}
        if inputs.x_scale is not None:
            # A padded column is what an engine that writes M-major scales has.
            padded = torch.zeros(inputs.x_scale.shape[1], -(-spec.m // 4) * 4, device=device.torch_name)
            columns = padded[:, : spec.m].copy_(inputs.x_scale.t()).t()
            self.inputs["column"] = replace(inputs, x_scale=columns)
        self.out = torch.empty((spec.m, spec.n), dtype=torch.bfloat16, device=device.torch_name)
        self.reference, self.tolerance = family.reference(spec, inputs, first), family.tolerance(spec)

    def bind(self, contender: Contender, weights: Weights) -> Callable[[], torch.Tensor]:
        """A call that writes `out`, or an output of its own."""
        spec = self.spec.with_scale_order(contender.layout)
        inputs: Inputs = self.inputs[contender.layout]
        prepared = contender.implementation.prepare(spec, weights, contender.knobs)
        return contender.implementation.bind(spec, contender.knobs, self.device, inputs, prepared, self.out)

    def replay(self, contender: Contender) -> tuple["Replay", float]:
        """(The graph over the weights, the share of wrong elements)."""
        launches = [self.bind(contender, weights) for weights in self.weights]
        self.out.fill_(torch.nan)
        error = float(error_ratio(launches[0](), self.reference, *self.tolerance))
        graph = graph_of([launches[i % len(launches)] for i in range(self.calls)])
        graph.replay()
        torch.cuda.synchronize()
        return Replay(graph=graph, launches=launches), error


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A graph and its launches, which hold memory that it reads and writes: copies of scales, prepared weights."""

    graph: torch.cuda.CUDAGraph
    launches: list[Callable[[], torch.Tensor]]


def measure(problem: Problem, chosen: list[Contender], pause_s: float, flight: Path) -> Iterator[dict[str, object]]:
    """A row per contender."""
    key = {"M": problem.spec.m, "N": problem.spec.n, "K": problem.spec.k}
    replays: dict[int, Replay] = {}
    errors: dict[int, float] = {}
    notes: dict[int, str] = {}
    for i, contender in enumerate(chosen):
        flight.write_text(json.dumps([contender.label, contender.name, list(key.values())]))
        try:
            replays[i], errors[i] = problem.replay(contender)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a peer's failure is a row
            notes[i] = one_line(error)
    times: dict[int, list[float]] = {i: [] for i in replays}
    states: dict[int, Mapping[str, object]] = {}
    for turn in range(REPLAYS):
        for i in replays if turn % 2 else reversed(replays):
            flight.write_text(json.dumps([chosen[i].label, chosen[i].name, list(key.values())]))
            if pause_s:
                time.sleep(pause_s)
            times[i].append(time_us(replays[i].graph, problem.calls))
            if turn == REPLAYS - 1:
                states[i] = conditions(problem.device)  # NVML's averages of the time before
    flight.unlink()
    for i, contender in enumerate(chosen):
        us = round(statistics.median(times[i]), 3) if i in times and errors[i] <= WRONG else ""
        rate = round(2 * math.prod(key.values()) / us / 1e6, 1) if us else ""
        state = {name: states.get(i, {}).get(name, "") for name in ("sm_mhz", "power_w")}
        result = {"us": us, "tflops": rate, **state, "error": errors.get(i, ""), "note": notes.get(i, "")}
        yield {**key, "contender": contender.name, "layout": contender.layout, **result}


def child(given: argparse.Namespace) -> None:
    """Measures what the file does not have yet, until the time is over."""
    device, banned = gpu_device(0), set(filter(None, given.banned.split(";")))
    done = {(row["M"], row["N"], row["K"]) for row in read(given.out)}
    peers = available(device, given)
    todo = [(spec, contenders(spec, peers, device, given)) for spec in specs(given)]
    todo = [(spec, [c for c in of if c.label not in banned and c.name not in banned]) for spec, of in todo]
    builds = [build for spec, of in todo for c in of for build in needed(spec, c, device)]
    missing = compile_all(builds, device, time.time() + 0.4 * (given.until - time.time()))
    todo = [(spec, [c for c in of if missing.isdisjoint(needed(spec, c, device))]) for spec, of in todo]
    flight, begin = given.out.with_suffix(".flight"), time.time()
    with torch.inference_mode():
        for number, (spec, of) in enumerate(todo):
            if (str(spec.m), str(spec.n), str(spec.k)) in done:
                continue
            if time.time() > given.until:
                print(f"time is over after {number} of {len(todo)} problems ({time.time() - begin:.0f} s)", flush=True)
                break
            problem = Problem(spec, LINEAR if given.linear else FAMILY, device)
            append(given.out, list(measure(problem, of, given.pause_ms / 1000, flight)))


def append(path: Path, rows: Sequence[Mapping[str, object]], fields: Sequence[str] = FIELDS) -> None:
    """Add rows to the file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, fields)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[Row]:
    """The rows of the file; none without it."""
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def label_of(row: Row) -> str:
    """Its backend, or `ours`."""
    return row["contender"].split(" ")[0]


def by_problem(rows: Iterable[Row]) -> dict[tuple[int, int, int], list[Row]]:
    """The timed rows of each (M, N, K)."""
    found: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        if row["us"]:
            found.setdefault((int(row["M"]), int(row["N"]), int(row["K"])), []).append(row)
    return found


def fastest(rows: Iterable[Row], label: str, layout: str = "") -> Row | None:
    """Samples of `ours`, of `ours shipped`, of a backend, or of all `peers`, in this layout unless it is empty."""
    of = (
        row
        for row in rows
        if (label_of(row) != OURS if label == "peers" else f"{row['contender']} ".startswith(f"{label} "))
    )
    return min((row for row in of if layout in ("", row["layout"])), key=lambda row: float(row["us"]), default=None)


def ratios(
    rows: Iterable[Row], label: str = "peers", layout: str = "", own: str = OURS
) -> dict[tuple[int, int, int], float]:
    """By problem: the time of the peers' fastest candidate over ours, both in this layout, or each in its best."""
    found = {}
    for key, of in by_problem(rows).items():
        mine, other = fastest(of, own, layout), fastest(of, label, layout)
        if mine is not None and other is not None:
            found[key] = float(other["us"]) / float(mine["us"])
    return found


def line(name: str, found: Mapping[tuple[int, int, int], float]) -> str:
    """Geomean (least) by regime."""
    cells = []
    for low, high in REGIMES.values():
        of = [ratio for (m, _, _), ratio in found.items() if low <= m <= high]
        mean = math.exp(statistics.fmean(map(math.log, of))) if of else 0
        cells.append(f"{mean:.3f} ({min(of):.3f}) {len(of):2}" if of else "-")
    return f"| {name} | " + " | ".join(cells) + " |"


def report(rows: list[Row]) -> None:
    """The table by regime, the problems where a peer is ahead, the contenders without a time."""
    print("Time over ours, geomean (least), problems")
    print("| | " + " | ".join(REGIMES) + " |\n|" + "---|" * (len(REGIMES) + 1))
    for label in dict.fromkeys(label_of(row) for row in rows if label_of(row) != OURS):
        print(line(label, ratios(rows, label)))
    print(line("the fastest peer", ratios(rows)))
    for layout in LAYOUTS:
        print(line(f"the same, x_scale {layout} for both", ratios(rows, "peers", layout)))
    print(line("the same over the shipped winner, where there is one", ratios(rows, own=f"{OURS} shipped")))
    known = by_problem(rows)
    behind = sorted((ratio, key) for key, ratio in ratios(rows).items() if ratio < 1)
    print(f"a peer is ahead of the best of ours on {len(behind)} of {len(known)}:")
    for ratio, key in behind:
        mine, other = fastest(known[key], OURS), fastest(known[key], "peers")
        assert mine is not None and other is not None
        sizes = "x".join(map(str, key))
        print(f"  {ratio:.3f} {sizes}: {other['us']} us {other['contender']}; {mine['us']} us {mine['contender']}")
    failed = [row for row in rows if not row["us"]]
    for label in dict.fromkeys(label_of(row) for row in failed):
        of = [row for row in failed if label_of(row) == label]
        wrong, first = sum(bool(row["error"]) for row in of), of[0]
        print(f"{label}: {wrong} wrong results, {len(of) - wrong} failed, e.g. {' '.join(first.values())}")


def own_process(
    options: list[str], seconds: float, show: bool, environment: Mapping[str, str], program: str = __file__
) -> tuple[int, str]:
    """(Exit status, the last lines) of this program with other arguments, ended after so many seconds."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", program, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    printed: list[str] = []
    assert process.stdout is not None
    for text in process.stdout:
        printed.append(text.rstrip()[:500])
        if show:
            print(text, end="", flush=True)
    code = process.wait()
    timer.cancel()
    return code, "\n".join(printed[-25:])


def probe() -> None:
    """Runs DeepGEMM's extension in two processes, with nvcc and with NVRTC."""

    def one(name: str, environment: Mapping[str, str]) -> str:
        begin = time.time()
        with tempfile.TemporaryDirectory() as cache:
            debug = {"DG_JIT_DEBUG": "1", "DG_JIT_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
            code, printed = own_process(["--probe-child"], _PROBE_S, False, {**debug, **environment})
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        seconds = time.time() - begin
        return f"== DeepGEMM's extension with {name}: {end}, {seconds:.0f} s; its last lines:\n{printed}"

    with ThreadPoolExecutor(2) as threads:
        for text in threads.map(one, ("nvcc", "NVRTC"), ({}, {"DG_JIT_USE_NVRTC": "1"})):
            print(text, flush=True)


def probe_child() -> None:
    """One product by the extension, checked; prints each step before it."""
    package = find_package()
    print("step: package", package, package and package.extension_problem(), flush=True)
    assert package is not None
    module = load_module()
    print("step: loaded", module.__version__, "CUDA_HOME", os.environ.get("CUDA_HOME"), flush=True)
    device = gpu_device(0)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    key = {"M": 64, "N": 1280, "K": 8192}
    problem = Problem(FAMILY.spec(make_problem(FAMILY, key, defaults, device.gfx, "probe")), FAMILY, device)
    contender = Contender(name="deepgemm", implementation=DeepGemm(), knobs={}, layout="column")
    call = problem.bind(contender, problem.weights[0])
    print("step: first call", flush=True)
    out = call()
    torch.cuda.synchronize()
    print("step: share of wrong elements", float(error_ratio(out, problem.reference, *problem.tolerance)), flush=True)


def race(given: argparse.Namespace) -> None:
    """Measures in processes of its own until all is measured or the time is over, then reports."""
    until, banned = time.time() + given.limit_s, set[str]()
    flight = given.out.with_suffix(".flight")
    for _ in range(6):
        flight.unlink(missing_ok=True)
        if time.time() > until - 8:
            break
        extra = ["--until", str(until - 4), "--banned", ";".join(banned)]
        code, _ = own_process([*sys.argv[1:], *extra], until - time.time() + 8, True, {})
        if not code:
            break
        culprit = json.loads(flight.read_text()) if flight.exists() else None
        print(f"the measuring process ended with {code} at {culprit}", flush=True)
        if culprit is None:
            break
        # The second crash of a backend excludes all of it
        banned.add(culprit[0] if any(name.startswith(culprit[0]) for name in banned) else culprit[1])
    report(read(given.out))


def main() -> None:
    """As the module says."""
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("peers.py: needs a GPU")
    if given.probe_child:
        probe_child()
    elif given.probe:
        probe()
    elif given.until is not None:
        child(given)
    else:
        race(given)


if __name__ == "__main__":
    main()
