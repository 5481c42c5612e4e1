"""Tables of experts tuned under several routings: is the row of each routing the fastest one under it?

    gemmpipe kernel=fmoe kernel.key.routing=ROUTING shapes=list 'shapes.items=[...]' output=TABLE    # for each routing
    python tests/benchmarks/experts_routings.py TABLE [TABLE ...] --limit-s 110

For each mixture, type and number of tokens the contenders are the rows of all routings. Under each routing they are
timed beside one another: one CUDA graph with several draws of the routing and a small kernel before each call, as other
kernels run between the layers of a model; after a warm-up, in random turns, every result checked. `own`: the time of
the row tuned under this routing over the fastest contender's; `usual`: that of the row without a routing; `robust`:
that of the row with the least geometric mean over all routings. Written to experts_routings.csv.
"""

import argparse
import csv
import itertools
import math
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from engine_experts import FAMILY, MIXTURES, Case
from experts_variants import (
    Compilation,
    Contender,
    Operands,
    checked_calls,
    geomean,
    implementation,
)

from gemmpipe.bench.gpu_clock import clock_for
from gemmpipe.bench.timer import Clock
from gemmpipe.core.data import Device
from gemmpipe.core.device import gpu_device
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

USUAL = ""
WARM_S = 0.2  # a GPU at its power limit takes 0.1 s to lower its clocks
REPEATS = 2  # of the draws in the graph of a short call
Rows = dict[str, Contender]
"""The contender of each routing; "" is the row without one."""


def cases_of(tables: Sequence[Path], device: Device) -> dict[Case, Rows]:
    """The rows of this device by case and routing; only cases with rows of several routings."""
    names = {sizes: name for name, sizes in MIXTURES.items()}
    found: dict[Case, Rows] = defaultdict(dict)
    for row in itertools.chain.from_iterable(store.read(table, FAMILY) for table in tables):
        sizes = tuple(int(str(row[name])) for name in ("model_dim", "inter_dim", "expert", "topk"))
        if row["gfx"] != device.gfx or sizes not in names:
            continue
        case = Case(names[sizes], str(row["q_dtype_w"]).removeprefix("torch."), int(str(row["token"])))
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        found[case][str(row["routing"] or USUAL)] = (implementation(candidate.backend), candidate.knobs)
    order = sorted(found, key=lambda case: (case.tokens < 16, case.mixture, case.dtype, case.tokens))  # few tokens last
    return {case: found[case] for case in order if len(found[case]) > 1}


def contenders(case: Case, rows: Rows, device: Device) -> tuple[dict[str, Contender], dict[str, str]]:
    """(the different ones by the name of their first routing, each routing's name)."""
    kept: dict[str, Contender] = {}
    named: dict[str, str] = {}
    for routing, (own, knobs) in rows.items():
        each = (own, own.normalise(case.spec, knobs, device))
        known = next((name for name, other in kept.items() if other == each), None)
        named[routing] = known or f"row {routing[:12] or 'usual'}"
        kept[named[routing]] = each
    return kept, named


def times_under(
    case: Case, clock: Clock, device: Device, made: dict[str, Contender], operands: Operands, routing: str, rounds: int
) -> dict[str, float]:
    """us of each contender under this routing: the median over the rounds of a call's mean over the draws."""
    alive: list[object] = []
    calls = checked_calls(case, device, made, operands, alive, routing or None, engine=False)
    repeats = REPEATS if case.tokens <= 64 else 1
    replays = {name: clock.replay_of(own * repeats, separate=True) for name, own in calls.items()}
    samples: dict[str, list[float]] = defaultdict(list)
    warm_until = time.monotonic() + WARM_S
    while replays and time.monotonic() < warm_until:
        for replay in replays.values():
            replay()
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample([*replays], len(replays)):
            samples[name].append(replays[name]())
    return {name: statistics.median(values) for name, values in samples.items()}


def regrets(named: dict[str, str], times: dict[str, dict[str, float]]) -> list[tuple[str, float, float, float]]:
    """(routing, own, usual, robust) of each routing: the times of these rows over the fastest contender's."""
    fastest = {routing: min(found.values()) for routing, found in times.items()}
    means = {
        name: geomean([times[routing].get(name, math.inf) / fastest[routing] for routing in times])
        for name in set(named.values())
    }
    robust = min(means, key=lambda name: means[name])
    return [
        (
            routing,
            found.get(named[routing], math.nan) / fastest[routing],
            found.get(named.get(USUAL, ""), math.nan) / fastest[routing],
            found.get(robust, math.nan) / fastest[routing],
        )
        for routing, found in times.items()
    ]


def summary(rows: Sequence[Sequence[object]]) -> None:
    """Geomean, worst and share within 3 % of each column, by routing and over all."""
    print("routing: own, usual, robust: geomean, worst, share within 3 %")
    for wanted in [*dict.fromkeys(row[3] for row in rows), None]:
        own, cells = [row for row in rows if wanted is None or row[3] == wanted], []
        for column in (4, 5, 6):
            values = [float(str(row[column])) for row in own]
            values = [value for value in values if not math.isnan(value)]
            if values:
                near = sum(value <= 1.03 for value in values) / len(values)
                cells.append(f"{geomean(values):.3f} {max(values):.3f} {near:.0%}")
        print(f"{'all' if wanted is None else str(wanted)[:14] or 'usual':14} {len(own):4}: {'; '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--limit-s", type=float, default=110)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    deadline, device, operands = time.monotonic() + arguments.limit_s, gpu_device(0), Operands()
    clock = clock_for(device)
    tuned = cases_of(arguments.tables, device)
    found = {case: contenders(case, rows, device) for case, rows in tuned.items()}
    compilation = Compilation({case: made for case, (made, _) in found.items()}, device, arguments.processes)
    lines: list[list[object]] = []
    for case, (made, named) in found.items():
        if time.monotonic() > deadline - 3:
            print("time is up before", case)
            break
        compilation.wait(case, deadline)
        times = {each: times_under(case, clock, device, made, operands, each, arguments.rounds) for each in named}
        torch.cuda.empty_cache()
        for routing, own, usual, robust in regrets(named, times):
            cells = [f"{value:.4f}" for value in (own, usual, robust)]
            row_us = " ".join(f"{name}: {us:.3f};" for name, us in sorted(times[routing].items(), key=lambda it: it[1]))
            lines.append([case.mixture, case.dtype, case.tokens, routing, *cells, row_us])
        with (Path(arguments.out) / "experts_routings.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["mixture", "dtype", "tokens", "routing", "own", "usual", "robust", "times"])
            table.writerows(lines)
    compilation.close()
    summary(lines)


if __name__ == "__main__":
    main()
