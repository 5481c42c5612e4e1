"""Injects faults into real runs until the time is up, and writes what became of them as a Markdown table.

python tests/soak/soak.py --minutes 30 [--gpu] [--jobs 2] [--only NAME] [--out FILE.md] [--seed N]

Mounts small file systems for full and read-only disks (left out where this user may not mount), and compiles a few
lines of C for the clock.
A fault that is not withstood is printed with its seed, its folder is kept, and the exit code is 1.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from soak_faults import Fault
from soak_list import DISKS, FAULTS
from soak_runs import Site
from soak_world import may_mount

from gemmpipe.family import load_family

TESTS = Path(__file__).resolve().parents[1]
LOCK = threading.Lock()


@dataclass
class Outcome:
    """The results of one fault so far."""

    rounds: int = 0
    injected: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def arguments(gpu: bool) -> tuple[str, ...]:
    """The arguments of every run."""
    kind = "poison" if gpu else "faulty"
    common = ("shapes=list", "format=[csv]", "timer@stages.bench.timer=quick")
    if gpu:
        own = (f"--config-dir={TESTS / 'faulty_gpu'}", "executor.timeout_s=5", "device=cuda")
    else:
        own = (f"--config-dir={TESTS / 'faulty'}", "executor.timeout_s=3", "device=cpu")
    return (*own, f"kernel={kind}", f"backend=[{kind},torch]", *common)


def inject(fault: Fault, seed: int, gpu: bool, folder: Path) -> tuple[int, str]:
    """One round of a fault in an empty folder: how often it was injected, and what was not withstood."""
    family = load_family("poison" if gpu else "faulty")
    site = Site(folder=folder, arguments=arguments(gpu), family=family)
    try:
        return fault.act(site, random.Random(seed)), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the table
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if "soak_" in f.filename), 0)
        return 1, f"seed {seed}, {folder}, line {line}: {type(error).__name__}: {' '.join(str(error).split())[:800]}"
    finally:
        site.close()


def soak(faults: list[Fault], until: float, gpu: bool, seeds: random.Random, outcomes: dict[str, Outcome]) -> None:
    """Take the fault that had the least of the time so far, again and again."""
    while time.monotonic() < until:
        with LOCK:
            fault = min(faults, key=lambda f: (outcomes[f.name].seconds, f.name))
            outcome, seed = outcomes[fault.name], seeds.randrange(1 << 32)
            outcome.seconds += 1  # it is taken
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        begun = time.monotonic()
        injected, failure = inject(fault, seed, gpu, folder)
        with LOCK:
            outcome.rounds += 1
            outcome.injected += injected
            outcome.seconds += time.monotonic() - begun - 1
            if failure:
                outcome.failures.append(failure)
                print(f"NOT WITHSTOOD: {fault.name}: {failure}", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def table(faults: list[Fault], outcomes: dict[str, Outcome]) -> str:
    """The table in Markdown."""
    lines = ["| fault | how | rounds | injected | outcome |", "|---|---|---|---|---|"]
    for fault in faults:
        found = outcomes[fault.name]
        failed = len(found.failures)
        outcome = f"**{failed} not withstood**" if failed else "withstood" if found.rounds else "not reached"
        lines.append(f"| {fault.name} | {fault.how} | {found.rounds} | {found.injected} | {outcome} |")
    return "\n".join(lines)


def main() -> int:
    """Soak and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    faults = [f for f in FAULTS if ("gpu" if given.gpu else "cpu") in f.where and given.only in (None, f.name)]
    if not may_mount():
        faults = [f for f in faults if f.act not in DISKS]
    sys.path.insert(0, str(TESTS / ("faulty_gpu" if given.gpu else "faulty")))
    outcomes = {fault.name: Outcome() for fault in faults}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup too: runs would inherit that they ignore it
    seeds, begun = random.Random(given.seed), time.monotonic()
    until = begun + given.minutes * 60
    threads = [
        threading.Thread(target=soak, args=(faults, until, given.gpu, seeds, outcomes)) for _ in range(given.jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begun
    injected = sum(o.injected for o in outcomes.values())
    rounds = sum(o.rounds for o in outcomes.values())
    failures = [failure for o in outcomes.values() for failure in o.failures]
    text = (
        f"{injected} faults in {rounds} rounds within {seconds / 60:.1f} minutes "
        f"(one every {seconds / max(1, injected):.1f} s), {len(failures)} not withstood; seed {given.seed}."
        f"\n\n{table(faults, outcomes)}\n"
    )
    print(text)
    if given.out:
        given.out.write_text(text + "".join(f"\n- {failure}" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
