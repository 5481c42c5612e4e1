"""What a product takes after a kernel that allows no early start, as in an engine, and after itself, on a Hopper GPU.

    python tests/benchmarks/product_neighbours.py --table TABLE.csv --limit-s 60 --out neighbours.csv

Our kernels let the next kernel start early (programmatic dependent launch): in a graph of one product the launch and
the start of each are hidden behind the end of the one before. In an engine a quantiser precedes each product and lets
nothing start early. Graphs over weights that rotate through 200 MB: `alone` has products only, `after` a small kernel
before each (it writes the scales of x), whose own time, as a graph of it alone, is subtracted. Contenders: the rows
of the table for these products (else those of the nearest shipped rows) and DeepGEMM's first tiles. Sizes:
Qwen3-8B's. Prints the times, and by M the geometric mean of DeepGEMM's fastest over ours, alone and after. --add
times ours also with further knobs, each by itself. Last come
the four products of a layer in turn, each after the small kernel, so that each finds another kernel's instructions in
the caches: the layer's time, without the small kernels, beside the sums of the times of single products.
"""

import argparse
import csv
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import peers
import torch
from peers import OURS, WRONG, Contender, Problem
from scale_layouts import FAMILY, REPLAYS, time_us
from vllm_models import DENSE, products

from gemmpipe.core.data import Device
from gemmpipe.core.device import gpu_device
from gemmpipe.core.errors import one_line
from gemmpipe.family import GemmSpec, Implementation, KernelDefaults
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

FIELDS = ("M", "N", "K", "contender", "alone_us", "after_us", "added_us", "note")
GRAPHS = ("alone", "after")
LAYERS = 6


def arguments() -> Namespace:
    """The command line, with what the functions of peers.py read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=None, help="a tuned table of a8w8_blockscale")
    parser.add_argument("--out", type=Path, default=Path("neighbours.csv"))
    parser.add_argument("--rows", default="16,64,256")
    parser.add_argument("--tiles", type=int, default=2, help="DeepGEMM's tiles per product")
    parser.add_argument("--add", default="", help="knobs of which each is added to the Hopper kernel's")
    parser.add_argument("--limit-s", type=float, default=60)
    given = parser.parse_args()
    if given.table is not None and not given.table.is_file():
        parser.error(f"--table: {given.table}: no such file")
    return Namespace(**vars(given), linear=False, ours=1, extension=False, triton=False)


def specs(rows: str) -> list[GemmSpec]:
    """The quantised products of Qwen3-8B, in the order of a layer."""
    sides = [(each.n, each.k) for each in products(DENSE) if each.layer != "lm_head"]
    keys = [{"M": int(m), "N": n, "K": k} for m in rows.split(",") for n, k in sides]
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return [FAMILY.spec(make_problem(FAMILY, key, defaults, "sm_90", "neighbours")) for key in keys]


def tuned(table: Path, device: Device) -> dict[tuple[int, int, int], Contender]:
    """(M, N, K) -> the row's candidate, for rows of our own kernels for this device."""
    own = {implementation.label: implementation for implementation in FAMILY.implementations}
    found = {}
    for row in store.read(table, FAMILY):
        if row["gfx"] != device.gfx or str(row["libtype"]) not in own:
            continue
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        key = (int(str(row["M"])), int(str(row["N"])), int(str(row["K"])))
        name = f"{OURS} tuned {candidate.backend} {row['config']}"
        found[key] = Contender(
            name=name, implementation=own[candidate.backend], knobs=candidate.knobs, layout=peers.LAYOUTS[1]
        )
    return found


def chosen(
    spec: GemmSpec,
    known: Mapping[tuple[int, int, int], Contender],
    libraries: Mapping[str, Implementation],
    device: Device,
    given: Namespace,
) -> list[Contender]:
    """Ours and DeepGEMM's candidates, with scales of x in columns."""
    offered = [each for each in peers.contenders(spec, libraries, device, given) if each.layout == peers.LAYOUTS[1]]
    row = known.get((spec.m, spec.n, spec.k))
    found = offered if row is None else [row, *(each for each in offered if each.label != OURS)]
    mine = [each for each in found if each.label == OURS and each.implementation.label == "gluon"]
    return [*found, *(with_knob(each, name) for each in mine for name in given.add.split(",") if name)]


def with_knob(contender: Contender, name: str) -> Contender:
    """The same candidate with one more knob, which is true."""
    return replace(contender, name=f"{contender.name} +{name}", knobs={**contender.knobs, name: True})


def graphs_of(problem: Problem, contender: Contender) -> dict[str, tuple[torch.cuda.CUDAGraph, list[object]]]:
    """The graphs of a contender, with what they need to live. Raises ValueError for wrong results."""
    launches = [problem.bind(contender, weights) for weights in problem.weights]
    problem.out.fill_(torch.nan)
    error = float(error_ratio(launches[0](), problem.reference, *problem.tolerance))
    if not error <= WRONG:
        raise ValueError(f"{error:.3f} of the results are wrong")
    small, held = small_kernel(problem)
    series = [launches[i % len(launches)] for i in range(problem.calls)]
    mixed = [call for launch in series for call in (small, launch)]
    calls = {"alone": series, "after": mixed}
    return {name: (peers.graph_of(list(calls[name])), [launches, held]) for name in GRAPHS}


def small_kernel(problem: Problem) -> tuple[Callable[[], object], torch.Tensor]:
    """A kernel that writes the scales of x with their own values, and what it reads."""
    scale = problem.inputs[peers.LAYOUTS[1]].x_scale
    assert scale is not None
    source = scale.clone()
    return (lambda: torch.mul(source, 1.0, out=scale)), source


def measure(problem: Problem, contenders: Sequence[Contender]) -> Iterator[dict[str, object]]:
    """A row per contender: medians of graphs in turn."""
    key = {"M": problem.spec.m, "N": problem.spec.n, "K": problem.spec.k}
    small, held = small_kernel(problem)
    between = peers.graph_of([small] * problem.calls)
    ready, notes = {}, {}
    for i, contender in enumerate(contenders):
        try:
            ready[i] = graphs_of(problem, contender)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a contender's failure is a row
            notes[i] = one_line(error)
    times: dict[tuple[int, str], list[float]] = {(i, name): [] for i in ready for name in GRAPHS}
    own: list[float] = []
    for turn in range(REPLAYS):
        own.append(time_us(between, problem.calls))
        for i, name in times if turn % 2 else reversed(times):
            times[i, name].append(time_us(ready[i][name][0], problem.calls))
    del held
    for i, contender in enumerate(contenders):
        row: dict[str, object] = {**key, "contender": contender.name, "note": notes.get(i, "")}
        if i in ready:
            alone, after = (statistics.median(times[i, name]) for name in GRAPHS)
            after -= statistics.median(own)
            row |= {name: round(us, 3) for name, us in zip(FIELDS[4:7], (alone, after, after - alone), strict=True)}
        yield row


@dataclass(frozen=True)
class Layer:
    """The products of a layer at one M, in order, with the rows and contenders of each."""

    problems: list[Problem]
    contenders: list[list[Contender]]
    rows: list[list[dict[str, object]]]

    def side(self, mine: bool) -> tuple[list[Contender], float, float]:
        """(the fastest of ours, or of DeepGEMM's, for each product; the sums of their times alone and after)."""
        best, sums = [], [0.0, 0.0]
        for of, rows in zip(self.contenders, self.rows, strict=True):
            timed = [(row, each) for row, each in zip(rows, of, strict=True) if "after_us" in row]
            row, contender = min(
                ((row, each) for row, each in timed if (each.label == OURS) == mine),
                key=lambda pair: float(str(pair[0]["after_us"])),
            )
            best.append(contender)
            sums = [one + float(str(row[name])) for one, name in zip(sums, FIELDS[4:6], strict=True)]
        return best, sums[0], sums[1]


def layer_lines(layer: Layer) -> Iterator[str]:
    """The layer's time with our products and with DeepGEMM's; nothing where one is missing."""
    try:
        sides = {name: layer.side(mine) for name, mine in (("ours", True), ("DeepGEMM", False))}
    except ValueError:  # of an empty sequence: a product without a time
        return
    smalls = [small_kernel(problem) for problem in layer.problems]
    graphs = {"small": peers.graph_of([small for small, _ in smalls] * LAYERS)}
    held = []
    for name, (best, _, _) in sides.items():
        bound = [
            [problem.bind(contender, weights) for weights in problem.weights[:LAYERS]]
            for problem, contender in zip(layer.problems, best, strict=True)
        ]
        held.append(bound)
        for small, launches in zip(smalls, bound, strict=True):
            small[0]()
            launches[0]()
        each = [(small, ws[i % len(ws)]) for i in range(LAYERS) for (small, _), ws in zip(smalls, bound, strict=True)]
        graphs[name] = peers.graph_of([call for pair in each for call in pair])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(REPLAYS):
        for name in graphs if turn % 2 else reversed(graphs):
            times[name].append(time_us(graphs[name], LAYERS))
    small_us = statistics.median(times["small"])
    for name, (_, alone, after) in sides.items():
        us = statistics.median(times[name]) - small_us
        m = layer.problems[0].spec.m
        yield f"M={m} layer, {name}: {us:.1f} us; sums: alone {alone:.1f}, after {after:.1f}"


def report(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Each contender's times, and DeepGEMM's fastest over ours by M, alone and after."""
    timed = [row for row in rows if row.get("alone_us")]
    for row in sorted(rows, key=lambda row: (row["M"], row["N"], row["K"], str(row["contender"]))):
        times = " ".join(f"{row.get(name, '')!s:>8}" for name in FIELDS[4:7])
        yield f"{row['M']:>5}x{row['N']}x{row['K']:<6} {times}  {str(row['contender'])[:110]} {row['note']}"
    for m in sorted({int(str(row["M"])) for row in timed}):
        cells = []
        for column in FIELDS[4:6]:
            ratios = []
            for key in {(row["N"], row["K"]) for row in timed if row["M"] == m}:
                of = [row for row in timed if (row["M"], row["N"], row["K"]) == (m, *key)]
                ours = {id(row) for row in of if str(row["contender"]).startswith(OURS)}
                mine = [float(str(row[column])) for row in of if id(row) in ours]
                theirs = [float(str(row[column])) for row in of if id(row) not in ours]
                if mine and theirs:
                    ratios.append(min(theirs) / min(mine))
            cells.append(f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}" if ratios else "-")
        yield f"M={m}: DeepGEMM over ours: alone {cells[0]}, after a quantiser {cells[1]}"


def main() -> None:
    """As the module says."""
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("product_neighbours.py: needs a GPU")
    until, device = time.time() + given.limit_s, gpu_device(0)
    libraries = {name: each for name, each in peers.available(device, given).items() if name == "deepgemm"}
    known = {} if given.table is None else tuned(given.table, device)
    todo = [(spec, chosen(spec, known, libraries, device, given)) for spec in specs(given.rows)]
    builds = [build for spec, of in todo for each in of for build in peers.needed(spec, each, device)]
    missing = peers.compile_all(builds, device, time.time() + 0.5 * given.limit_s)
    rows: list[dict[str, object]] = []
    lines: list[str] = []
    with torch.inference_mode():
        for m in dict.fromkeys(spec.m for spec, _ in todo):
            if time.time() > until:
                print(f"time is over: not measured from M={m} on", flush=True)
                break
            layer = Layer([], [], [])
            for spec, of in todo:
                if spec.m == m:
                    layer.problems.append(Problem(spec, FAMILY, device))
                    of = [each for each in of if missing.isdisjoint(peers.needed(spec, each, device))]
                    layer.contenders.append(of)
                    layer.rows.append(list(measure(layer.problems[-1], of)))
                    rows += layer.rows[-1]
            with given.out.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
            lines += layer_lines(layer)
    print("\n".join([*report(rows), *lines]))


if __name__ == "__main__":
    main()
