"""Time the choices of two tuned tables against each other: python tests/benchmarks/paired.py FAMILY A.csv B.csv

Every (gfx, cu_num, key) that both hold: both choices interleaved over 30 rounds of graph replays on cold operands,
the ratio A / B paired by round. Prints the share of problems within 1 % and 3 %, and writes OUT.csv when given.
"""

import argparse
import csv
from pathlib import Path

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.own import Own
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.bench.gpu_clock import clock_for
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.bench.timer import Clock, paired_ratio
from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, load_family
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store
from gemmpipe.tables.merge import row_key


def chosen(path: Path, family: Family) -> dict[tuple[object, ...], Candidate]:
    """The choice of every row, by its whole key."""
    rows = store.read(path, family)
    return {row_key(row, family): candidate_of(str(row["libtype"]), str(row["config"])) for row in rows}


def race(bench: WorkerBench, clock: Clock, problem: Problem, pair: list[Candidate], rounds: int) -> list[list[float]]:
    """Samples of each candidate, one a round."""
    setup = bench.set_up(problem)
    launches = [setup.bind(candidate, 0) for candidate in pair]
    for launch in launches:
        launch()
    # As many launches a sample for both: starting a graph takes some microseconds.
    count = clock.launches_per_sample(min(clock.sequence(3 * launches)), setup.sets)
    replays = [clock.replay_of([setup.bind(c, i) for i in range(count)], separate=True) for c in pair]
    for _ in range(20):  # the device leaves its idle clocks behind
        for replay in replays:
            replay()
    samples: list[list[float]] = [[] for _ in pair]
    for turn in range(rounds):
        for i in range(len(pair)) if turn % 2 else reversed(range(len(pair))):
            samples[i].append(replays[i]())
    return samples


def worker_bench(family: Family, device: Device) -> WorkerBench:
    """A bench in this process, with every backend that needs no extra."""
    own = [Own(label=label) for label in ("triton", "gluon", "skinny", "sliced", "streamed")]
    backends = (*own, Torch(), ScaledMm())
    return WorkerBench(family, {i.label: i for b in backends for i in b.implementations(family)}, device)


def main() -> None:
    """Race all common problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    family = load_family(arguments.family)
    device = DeviceChoice(kind="auto", index=None, shared=False).find()[0]
    bench, clock = worker_bench(family, device), clock_for(device)
    a, b = chosen(arguments.a, family), chosen(arguments.b, family)
    rows = []
    for key in a:
        if key not in b or key[:2] != (device.gfx, device.cu_num):
            continue
        names = [c.name for c in family.key_columns]
        problem = Problem(family=family.name, key=tuple(zip(names, key[2:], strict=True)))  # type: ignore[arg-type]
        same = a[key] == b[key]
        ratio = 1.0
        if not same:
            first, second = race(bench, clock, problem, [a[key], b[key]], arguments.rounds)
            ratio = paired_ratio(first, second).median
        rows.append({**dict(problem.key), "same": same, "ratio": round(ratio, 4)})
    ratios = sorted(row["ratio"] for row in rows)
    within = [sum(r <= limit for r in ratios) / len(ratios) for limit in (1.01, 1.03)]
    print(f"{len(ratios)} problems, {sum(r['same'] for r in rows)} with the same choice; A / B: "
          f"<= 1.01 on {within[0]:.1%}, <= 1.03 on {within[1]:.1%}, worst {ratios[-5:]}")  # fmt: skip
    if arguments.out:
        with arguments.out.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
