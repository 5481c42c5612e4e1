"""What a Hopper GPU allows beside some aims: reads of a weight alone, products without block scales, layers.

    python tests/benchmarks/limits.py [read] [large] [linear] --limit-s 420 --out limits.csv [--rows 1,8] [--sizes NxK]

For the 14 (N, K) of peers.py; times are of separate launches, by the timer with which gemmpipe tunes: a small kernel
before each launch, its time subtracted, weights that rotate through 200 MB, all contenders in turn, medians of nine.

`read`: kernels that only read the weight once, an empty kernel, and the shipped choice, beside the floor; from M = 128
on also products with one scale per tensor. `large`: those, with a scale per row too, the shipped choice and DeepGEMM's
tiles, after `--warm-s` of the same load. `linear`: vLLM's pair of quantiser and product, our ways of peers.py, the
product of the shipped choice alone, and the read. The tables come last (limits_report.py); rows of the file `--out`
are not measured again. Measuring runs in a process of its own: where a contender ends it, the next one goes on without.
"""

import argparse
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import limits_report
import peers
import torch
from limits_read import WAYS
from limits_report import LARGE, LINEAR, PARTS, READ, Row
from peers import OURS, WRONG, Contender, Problem
from scale_layouts import FAMILY, REPLAYS, SIDES, nearest

from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.engine_pair import VllmPair
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.bench.gpu_clock import GpuClock
from gemmpipe.bench.timer import TimedCall, TimedReplay
from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.core.device import gpu_device
from gemmpipe.core.errors import one_line
from gemmpipe.core.nvml import conditions
from gemmpipe.core.paths import shipped_tables
from gemmpipe.core.spec import Scaling
from gemmpipe.family import Family, GemmSpec, Implementation, Weights
from gemmpipe.family.reference import error_ratio
from gemmpipe.family.roofline import roofline_or_reference
from gemmpipe.launch._empty import empty
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

ROWS = {READ: "1,8,64,128,256,512,1024", LARGE: "512,1024,4096", LINEAR: "1,8,16,32"}
TENSOR_ROWS = 128
"""From this M on, `read` also times products with one scale per tensor."""
TRIES = 6
COMPILE_SHARE = 0.35
END_S, START_S = 4, 25
"""Seconds between the end of measuring and that of the process, and the least with which a process starts."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is timed; `make` returns launches on the weights in rotation, or raises an error with the reason."""

    name: str
    make: Callable[[], list[TimedCall]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A product, its contenders, and contenders that are whole linear layers of the size."""

    spec: GemmSpec
    products: list[Contender]
    layer: GemmSpec
    layers: list[Contender]

    @property
    def size(self) -> str:
        """MxNxK."""
        return f"{self.spec.m}x{self.spec.n}x{self.spec.k}"

    def needed(self, device: Device) -> Iterator[tuple[Contender, tuple[Build, ...]]]:
        """Each contender with its builds."""
        for spec, of in ((self.spec, self.products), (self.layer, self.layers)):
            yield from ((each, peers.needed(spec, each, device)) for each in of)

    def without(self, missing: set[Build], device: Device) -> "Case":
        """The same without contenders whose builds are missing."""
        out = {each.name for each, builds in self.needed(device) if not missing.isdisjoint(builds)}
        products, layers = ([c for c in of if c.name not in out] for of in (self.products, self.layers))
        return replace(self, products=products, layers=layers)


def arguments(given: list[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--limit-s", type=float, default=420, help="seconds for everything, compilers included")
    parser.add_argument("--out", type=Path, default=Path("limits.csv"))
    parser.add_argument("--rows", default="", help="M, ... instead of each part's own")
    parser.add_argument("--sizes", default=",".join(f"{n}x{k}" for n, k in SIDES), help="NxK, ...")
    parser.add_argument("--tiles", type=int, default=3, help="DeepGEMM's tiles per product")
    parser.add_argument("--ours", type=int, default=4, help="our ways per linear layer: nearest shipped rows")
    parser.add_argument("--layout", choices=peers.LAYOUTS, default=peers.LAYOUTS[1], help="the order of x's scales")
    parser.add_argument("--warm-s", type=float, default=0.4, help="load before each product of `large`")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--banned", default="", help=argparse.SUPPRESS)
    found = parser.parse_args(given)
    if unknown := [part for part in found.parts if part not in PARTS]:
        parser.error(f"part: {unknown[0]}: expected one of {', '.join(PARTS)}")
    found.parts = [part for part in PARTS if part in (found.parts or PARTS)]
    return found


def family_of(linear: bool) -> Family:
    """That of linear layers, or that of products of fp8 operands."""
    return peers.LINEAR if linear else FAMILY


@cache
def shipped_rows(linear: bool, device: Device) -> Mapping[tuple[Scalar, ...], tuple[str, str]]:
    """Backend and configuration of the shipped rows by key; those of this model of device come before others'."""
    family = family_of(linear)
    found: dict[tuple[Scalar, ...], tuple[str, str]] = {}
    own = {implementation.label for implementation in family.implementations}
    paths = sorted(shipped_tables().glob(f"{Path(family.csv_name).stem}*.csv"))
    rows = [row for path in paths for row in store.read(path, family) if row["gfx"] == device.gfx]
    for row in sorted(rows, key=lambda row: row.get("device") != device.name):
        if row["libtype"] in own:
            key = tuple(row[column.name] for column in family.key_columns)
            found.setdefault(key, (str(row["libtype"]), str(row["config"])))
    return found


def shipped(linear: bool, spec: GemmSpec, device: Device, layout: str) -> Contender | None:
    """The shipped choice of a product, of the nearest size where it has no row; None without a table."""
    rows = shipped_rows(linear, device)
    if not rows:
        return None
    rest = next(iter(rows))[3:]
    key = (spec.m, spec.n, spec.k, *rest)
    candidate = candidate_of(*nearest(rows, key))
    implementation = next(each for each in family_of(linear).implementations if each.label == candidate.backend)
    knobs = implementation.normalise(spec, candidate.knobs, device)
    if reason := implementation.unsupported_reason(spec, knobs, device):
        print(f"{spec.m}x{spec.n}x{spec.k}: the shipped choice cannot run: {reason}", flush=True)
        return None
    exact = "shipped" if key in rows else "nearest"
    order = layout if len(spec.x_scale_orders) > 1 else spec.x_scale_orders[0]
    name = f"{OURS} {exact} {candidate.backend} {json.dumps(knobs, sort_keys=True)}"
    return Contender(name=name, implementation=implementation, knobs=knobs, layout=order)


def libraries(part: str, device: Device, given: Namespace) -> dict[str, Implementation]:
    """The part's library; prints why it is missing."""
    offered: dict[str, Implementation] = {}
    if part == LARGE:
        offered = {"deepgemm": DeepGemm(tiles=given.tiles)}
    elif part == LINEAR:
        offered = {"vllm": VllmPair()}
    found = {}
    for label, backend in offered.items():
        if reason := backend.unavailable(device):
            print(f"without {label}: {reason}", flush=True)
        else:
            found[label] = backend
    return found


def cases(part: str, device: Device, given: Namespace, offered: Mapping[str, Implementation]) -> list[Case]:
    """The part's products, in an order that spans all when the time is over."""
    asked = {"rows": given.rows or ROWS[part], "sizes": given.sizes, "triton": False, "extension": False}
    products, layers = (Namespace(**asked, linear=linear, ours=given.ours * linear) for linear in (False, True))
    found = []
    for spec, layer in zip(peers.specs(products), peers.specs(layers), strict=True):
        own = shipped(False, spec, device, given.layout)
        of = [] if own is None else [own]
        whole: list[Contender] = []
        if part == LARGE:
            of += [each for each in peers.contenders(spec, offered, device, products) if each.layout == given.layout]
        elif part == LINEAR:
            tuned = shipped(True, layer, device, peers.LAYOUTS[0])
            whole = peers.contenders(layer, offered, device, layers)
            if tuned is not None and tuned.name.startswith(f"{OURS} shipped"):
                whole = [tuned, *(each for each in whole if each.label != OURS)]
        found.append(Case(spec=spec, products=of, layer=layer, layers=whole))
    return found


def checked(problem: Problem, launches: list[TimedCall], reference: torch.Tensor) -> list[TimedCall]:
    """The launches. Raises ValueError if the first one's product is wrong."""
    problem.out.fill_(torch.nan)
    out = launches[0]()
    assert isinstance(out, torch.Tensor)
    error = float(error_ratio(out, reference, *problem.tolerance))
    if not error <= WRONG:
        raise ValueError(f"{error:.3f} of the results are wrong")
    return launches


def product(problem: Problem, contender: Contender, name: str = "") -> Entry:
    """A contender of peers.py."""

    def make() -> list[TimedCall]:
        launches: list[TimedCall] = [problem.bind(contender, weights) for weights in problem.weights]
        return checked(problem, launches, problem.reference)

    return Entry(name=name or contender.name, make=make)


def ones(rows: int, granularity: str, device: str) -> torch.Tensor:
    """Scales of an operand with so many rows."""
    return torch.ones((rows, 1) if granularity == "row" else (1,), device=device)


def unblocked(problem: Problem, granularity: str, fast: bool) -> Entry:
    """torch's scaled product of the same fp8 operands with a scale per `tensor` or `row`, all of them 1."""
    scaling, library = Scaling(granularity=granularity), ScaledMm()
    spec = replace(problem.spec, x_scale=scaling, w_scale=scaling)
    knobs: Knobs = {"use_fast_accum": fast}

    def make() -> list[TimedCall]:
        if reason := library.unavailable(problem.device) or library.unsupported_reason(spec, knobs, problem.device):
            raise ValueError(reason)
        x_scale, w_scale = (ones(rows, granularity, problem.device.torch_name) for rows in (spec.m, spec.n))
        inputs = replace(problem.inputs["row"], x_scale=x_scale)

        def bind(weights: Weights) -> TimedCall:
            prepared = library.prepare(spec, replace(weights, w_scale=w_scale), knobs)
            return library.bind(spec, knobs, problem.device, inputs, prepared, problem.out)

        reference = FAMILY.reference(spec, inputs, replace(problem.weights[0], w_scale=w_scale))
        return checked(problem, [bind(weights) for weights in problem.weights], reference)

    return Entry(name=f"{granularity}{'_fast' if fast else ''} torch's scaled product", make=make)


def entries(part: str, case: Case, device: Device, best: Mapping[tuple[int, int], str]) -> tuple[Problem, list[Entry]]:
    """What is timed for a case; of the reads, only the fastest one once it is known for the weight."""
    problem = Problem(case.spec, FAMILY, device)
    alone = part == LINEAR  # there `ours` is a layer
    found = [product(problem, each, f"alone {each.name}" if alone else "") for each in case.products]
    if part != LARGE:
        known = best.get((case.spec.n, case.spec.k))
        reads = {way.name: partial(way.launches, problem.weights, device) for way in WAYS}
        found += [Entry(name=name, make=make) for name, make in reads.items() if known in (None, name)]
        found.append(Entry(name="empty kernel", make=lambda: [lambda: empty[(1,)]()]))
    if alone:
        layer = Problem(case.layer, peers.LINEAR, device)
        found += [product(layer, each) for each in case.layers]
    elif case.spec.m >= TENSOR_ROWS:
        kinds = ("tensor", "row") if part == LARGE else ("tensor",)
        found += [unblocked(problem, kind, fast) for kind in kinds for fast in (True, False)]
    return problem, found


def measure(
    clock: GpuClock, device: Device, offered: list[Entry], calls: int, warm_s: float, begin: Callable[[str], object]
) -> list[Row]:
    """A row per entry: the median of replays in turn, or the reason why there is none. Calls `begin` with its name."""
    replays: dict[str, TimedReplay] = {}
    held: list[list[TimedCall]] = []
    notes: dict[str, str] = {}
    for entry in offered:
        begin(entry.name)
        try:
            launches = entry.make()
            held.append(launches)
            launches[-1]()
            clock.synchronize()
            replay = clock.replay_of([launches[i % len(launches)] for i in range(calls)], separate=True)
            replay()
            replays[entry.name] = replay
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a contender's failure is a row
            notes[entry.name] = one_line(error)
    until = time.perf_counter() + warm_s
    while replays and time.perf_counter() < until:
        for replay in replays.values():
            replay()
    times: dict[str, list[float]] = {name: [] for name in replays}
    states: dict[str, Mapping[str, Scalar]] = {}
    for turn in range(REPLAYS):
        for name in replays if turn % 2 else reversed(replays):
            begin(name)
            times[name].append(replays[name]())
            if turn == REPLAYS - 1:
                states[name] = conditions(device)
    rows = []
    for entry in offered:
        us = f"{statistics.median(times[entry.name]):.3f}" if entry.name in times else ""
        state = {name: str(states.get(entry.name, {}).get(name) or "") for name in ("sm_mhz", "power_w")}
        rows.append({"contender": entry.name, "us": us, **state, "note": notes.get(entry.name, "")})
    return rows


def compiled(todo: list[Case], device: Device, until: float) -> list[Case]:
    """The cases without contenders that could not be compiled in a share of the time."""
    builds = [build for case in todo for _, of in case.needed(device) for build in of]
    try:
        missing = peers.compile_all(builds, device, time.time() + COMPILE_SHARE * (until - time.time()))
    except Exception as error:  # noqa: BLE001 - ours compile when they are bound
        print(f"compiling ended: {one_line(error)}", flush=True)
        missing = {build for build in builds if not build.signature}
    return [case.without(missing, device) for case in todo]


def child(part: str, given: Namespace) -> None:
    """Measures what the file does not have yet of a part, until the time is over."""
    device, banned = gpu_device(0), set(filter(None, given.banned.split(";")))
    done = {(row["M"], row["N"], row["K"]) for row in peers.read(given.out) if row["part"] == part}
    todo = compiled(cases(part, device, given, libraries(part, device, given)), device, given.until)
    todo = [case for case in todo if tuple(case.size.split("x")) not in done]
    clock, best, begin = GpuClock(device), dict[tuple[int, int], str](), time.time()
    with torch.inference_mode():
        for number, case in enumerate(todo):
            if time.time() > given.until:
                print(f"{part}: time is over after {number} of {len(todo)} products", flush=True)
                break
            try:
                rows = timed(part, case, clock, device, best, banned, given)
            except torch.AcceleratorError:
                raise
            except Exception as error:  # noqa: BLE001 - such as no memory for one size
                print(f"{part} {case.size}: {one_line(error)}", flush=True)
                continue
            peers.append(given.out, rows, limits_report.FIELDS)
            reads = [row for row in rows if row["us"] and row["contender"].startswith(READ)]
            if reads:
                best[case.spec.n, case.spec.k] = min(reads, key=lambda row: float(row["us"]))["contender"]
            torch.cuda.empty_cache()
    print(f"{part}: {time.time() - begin:.0f} s on the GPU", flush=True)


def timed(
    part: str,
    case: Case,
    clock: GpuClock,
    device: Device,
    best: Mapping[tuple[int, int], str],
    banned: set[str],
    given: Namespace,
) -> list[Row]:
    """The rows of a case; the file `.flight` has its size and the contender at work."""
    flight = given.out.with_suffix(".flight")
    problem, offered = entries(part, case, device, best)
    offered = [each for each in offered if banned.isdisjoint((each.name, f"{case.size} {each.name}"))]
    floor_us = roofline_or_reference(device.gfx, device.name).floor_us(FAMILY, case.spec)
    calls = clock.launches_per_sample(floor_us, len(problem.weights))
    warm_s = given.warm_s if part == LARGE else 0
    rows = measure(clock, device, offered, calls, warm_s, lambda name: flight.write_text(f"{case.size} {name}"))
    flight.unlink(missing_ok=True)
    m, n, k = case.size.split("x")
    common = {"part": part, "M": m, "N": n, "K": k, "device": device.name, "floor_us": f"{floor_us:.3f}"}
    return [{**common, **row} for row in rows]


def run_part(part: str, given: Namespace, until: float) -> None:
    """Measures a part in processes of its own until all is measured or the time is over."""
    banned, flight = set[str](), given.out.with_suffix(".flight")
    for _ in range(TRIES):
        flight.unlink(missing_ok=True)
        if time.time() > until - START_S:
            print(f"{part}: no time is left", flush=True)
            return
        options = ["--child", part, "--until", str(until - END_S), "--banned", ";".join(sorted(banned))]
        left_s = until - time.time()
        code, _ = peers.own_process([*sys.argv[1:], *options], left_s, True, {}, __file__)
        if not code or time.time() > until - 1:
            return
        culprit = flight.read_text() if flight.exists() else ""
        print(f"{part}: the measuring process ended with {code} at {culprit or 'no contender'}", flush=True)
        if not culprit:
            return
        name = culprit.partition(" ")[2]
        # The second end by a contender excludes it at all sizes
        banned.add(name if any(each.endswith(f" {name}") for each in banned) else culprit)


def main() -> None:
    """As the module says."""
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("limits.py: needs a GPU")
    if given.child:
        child(given.child, given)
        return
    end = time.time() + given.limit_s
    for number, part in enumerate(given.parts):
        run_part(part, given, time.time() + (end - time.time()) / (len(given.parts) - number))
    print("\n".join(limits_report.lines(peers.read(given.out), given.parts)))


if __name__ == "__main__":
    main()
