"""Time a table's choices as a recorded space was timed: python tests/benchmarks/against_recorded.py TABLE RECORDED.csv

The recording's policy: graph replays over rotating weights (over 200 MB in all), x and the output stay; the least of
five replays. Prints, for each (M, N, K) of the recording, its best time, ours, and the ratio.
"""

import argparse
import csv
import math
from pathlib import Path

from paired import chosen, worker_bench

from gemmpipe.bench.gpu_clock import clock_for
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.core.data import Candidate, Problem
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Launch, load_family

FAMILY = "a8w8_blockscale"
ROTATE_BYTES = 200e6


def recorded_best(path: Path) -> dict[tuple[int, int, int], float]:
    """The least time of each (M, N, K), microseconds."""
    best: dict[tuple[int, int, int], float] = {}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            key = (int(row["M"]), int(row["N"]), int(row["K"]))
            best[key] = min(best.get(key, math.inf), float(row["time_us"]))
    return best


def rotated(bench: WorkerBench, problem: Problem, candidate: Candidate, count: int) -> list[Launch]:
    """Launches over `count` weights with x and the output in place."""
    setup = bench.set_up(problem)
    implementation = bench.implementation(candidate)
    prepared = [
        implementation.prepare(setup.spec, bench.family.make_weights(setup.spec, bench.generator(i)), candidate.knobs)
        for i in range(max(2, count))
    ]
    inputs, out = setup.inputs(0), setup.out(0)
    return [implementation.bind(setup.spec, candidate.knobs, bench.device, inputs, p, out) for p in prepared]


def main() -> None:
    """Time all problems of the recording that the table holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("recorded", type=Path)
    arguments = parser.parse_args()
    family = load_family(FAMILY)
    device = DeviceChoice(kind="cuda", index=0, shared=False).find()[0]
    bench, clock = worker_bench(family, device), clock_for(device)
    table = chosen(arguments.table, family)
    names = [c.name for c in family.key_columns]
    ratios = []
    for (m, n, k), best_us in sorted(recorded_best(arguments.recorded).items()):
        key = next(key for key in table if key[2:5] == (m, n, k))
        problem = Problem(family=FAMILY, key=tuple(zip(names, key[2:], strict=True)))  # type: ignore[arg-type]
        launches = rotated(bench, problem, table[key], math.ceil(ROTATE_BYTES / (n * k)))
        launches[0]()
        replay = clock.replay(launches)
        for _ in range(50):  # the device leaves its idle clocks behind
            replay()
        time_us = min(replay() for _ in range(5))
        ratios.append(time_us / best_us)
        print(f"{m:5} {n:5} {k:5}  recorded {best_us:7.2f}  ours {time_us:7.2f}  ratio {ratios[-1]:.3f}"
              f"  {table[key].backend} {table[key].knobs}")  # fmt: skip
    print(f"worst ratio {max(ratios):.3f}, above 1.03: {sum(r > 1.03 for r in ratios)} of {len(ratios)}")


if __name__ == "__main__":
    main()
