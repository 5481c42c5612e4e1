"""Cost of the driver, without a GPU: python tests/benchmarks/driver_cost.py [--workers 1 2 4 8] [--slow 10]

The real command on 288 problems (scaling.py's 16 products and 18 Ms) with `executor=modelled`: workers and compilers
are processes that sleep for as long as an H200 would work; the driver, the processes that search, pipes and journal are
real. Prints a line a run: the time from the moment when all workers are ready to the end of the last stage, the
driver's CPU time by purpose and that of the search in ms a problem, and at the end t1 / (n * tn). `--small` takes
scaling.py's reduced space, `--profile FILE` profiles the driver.

On a few cores the processes stand in each other's way. There the CPU times are told as above, and how well the work is
spread with `--slow 10`, which makes everything modelled last ten times as long: as if all processes had cores to spare.
"""

import argparse
import cProfile
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from scaling import MS, PRODUCTS, SPACE, arguments, seconds

MODELLED = Path(__file__).parents[1] / "modelled"


def command(given: argparse.Namespace, workers: int, folder: Path) -> list[str]:
    """The tuning command."""
    base = [word for word in arguments(given.products) if given.small or word not in SPACE]
    return [
        f"--config-dir={MODELLED}",
        *base,
        "executor=modelled",
        f"executor.workers={workers}",
        "executor.compile_workers=8",  # they sleep
        f"executor.slow={given.slow}",
        f"hydra.run.dir={folder / str(workers)}",
        f"output={folder / str(workers)}",
    ]


def run(given: list[str], profile: str | None) -> None:
    """One run in this process, its stopwatch counting the driver's CPU time; prints what children used."""
    from gemmpipe.cli.main import main
    from gemmpipe.core import events as stopwatch
    from gemmpipe.pipeline import runner

    stopwatch.time = SimpleNamespace(monotonic=time.thread_time)  # type: ignore[attr-defined]
    profiler, carry_out = cProfile.Profile(time.thread_time), runner.run
    if profile:
        runner.run = lambda plan, events: profiler.runcall(carry_out, plan, events)
    code = main(given)
    if profile:
        profiler.dump_stats(profile)
    print(json.dumps({"code": code, "driver_s": resource.getrusage(resource.RUSAGE_SELF).ru_utime}))


def measured(given: argparse.Namespace, workers: int, folder: Path) -> dict[str, object]:
    """The manifest of a run in a process of its own."""
    again = [sys.executable, __file__, "--run", *command(given, workers, folder)]
    if given.profile:
        again[2:2] = ["--profile", given.profile]
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return dict(json.loads((folder / str(workers) / "manifest.json").read_text()))


def line(manifest: dict[str, object], workers: int, problems: int) -> str:
    """Where the time of one run went."""
    rows = {row["name"]: row for row in manifest["resources"]}  # type: ignore[attr-defined]
    account = manifest["account_s"]
    driver = {k: v for k, v in rows["driver"]["busy_s"].items() if k not in ("start", "write", "capture")}
    each = ", ".join(f"{k} {1e3 * v / problems:.1f}" for k, v in sorted(driver.items(), key=lambda kv: -kv[1]))
    beside = [row["busy_s"] for name, row in rows.items() if name.startswith("search")]
    far = ", ".join(f"{k} {1e3 * v / problems:.1f}" for row in beside for k, v in row.items() if k != "start")
    idle = " ".join(f"{row['idle_s']:.1f}" for name, row in rows.items() if name.startswith("cuda"))
    busy = sum(sum(r["busy_s"].values()) - r["busy_s"]["start"] for n, r in rows.items() if n.startswith("cuda"))
    return (
        f"{workers} workers: t {seconds(manifest):.1f} s (screen {account['screen_s']:.1f}, bench"  # type: ignore[index]
        f" {account['bench_s']:.1f}); busy {busy / workers:.1f} s each, idle {idle};"  # type: ignore[index]
        f" CPU ms a problem: driver {1e3 * sum(driver.values()) / problems:.1f} ({each}); search processes {far or '-'}"
    )


def main() -> None:
    """Measure each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--products", type=int, default=len(PRODUCTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--profile")
    parser.add_argument("--run", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.run:
        run(given.run, given.profile)
        return
    problems, times = given.products * len(MS), {}
    with tempfile.TemporaryDirectory() as folder:
        for workers in given.workers:
            manifest = measured(given, workers, Path(folder))
            times[workers] = seconds(manifest)
            print(line(manifest, workers, problems), flush=True)
    for n in times if 1 in times else ():
        print(f"t1 / ({n} * t{n}) = {times[1] / (n * times[n]):.2f}")


if __name__ == "__main__":
    main()
