"""Faults of the hands at the keyboard: a run that is put to sleep, or that has its folders deleted under it."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable

from soak_faults import BROKEN, MS, Act, ended, in_session, problems
from soak_runs import Site, Started, artifacts_are_whole, nothing_is_repeated, table_is_right

SLOW = (problems(), "space.PACE_MS=[0,10,11,12]", "search=exhaustive", "batch=2")


def everyone(started: Started) -> list[int]:
    """As Ctrl-Z does."""
    return started.kin()


def driver_alone(started: Started) -> list[int]:
    """As a debugger does."""
    return [started.process.pid]


def workers_alone(started: Started) -> list[int]:
    """As a machine does that swaps them out, for less than a candidate may take."""
    return started.workers()


def suspended(whom: Callable[[Started], list[int]], least_s: float, most_s: float) -> Act:
    """Processes are stopped at random moments and go on: nobody is blamed, however long that was."""

    def act(site: Site, chance: random.Random) -> int:
        started = site.start(*SLOW)
        assert in_session(site, started)
        stops = 0
        for _ in range(3):
            time.sleep(chance.uniform(0.2, 2.0))
            if started.process.poll() is not None:
                break
            stopped = whom(started)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in stopped:
                    if os.path.exists(f"/proc/{pid}"):
                        os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(chance.uniform(least_s, most_s))
            stops += 1
        ended(started, 0)
        blamed = [row for row in site.rows("trial") if row["status"] in BROKEN]
        assert not blamed, f"healthy candidates are blamed: {blamed[:2]}"
        nothing_is_repeated(site.rows())
        artifacts_are_whole(site)
        table_is_right(site, MS)
        return stops

    return act


def deleted_outputs(site: Site, chance: random.Random) -> int:
    """`rm -rf outputs` under a run: it ends well, and journal and table hold everything in the end."""
    started = site.start(*SLOW)
    assert in_session(site, started)
    deletions = 0
    for _ in range(chance.randrange(1, 4)):
        time.sleep(chance.uniform(0.1, 1.0))
        # Files deleted after the last row are lost, although the process takes a second more to end.
        if started.process.poll() is None and len(site.rows("done")) <= len(MS) - 2:
            shutil.rmtree(site.folder / chance.choice(("outputs", "outputs/tuned", "outputs/runs")), ignore_errors=True)
            deletions += 1
    error = ended(started, 0)
    assert error == "", error[-600:]
    assert len(site.rows("done")) == len(MS), "the journal was lost"
    nothing_is_repeated(site.rows())
    artifacts_are_whole(site)
    table_is_right(site, MS)
    return deletions


def left_behind(site: Site, chance: random.Random) -> int:
    """The remains of a crashed machine: locks without an owner, half-written files, a journal of zeros."""
    tuned, runs = site.table.parent, site.folder / "outputs" / "runs" / "tune" / "2020-01-01_00-00-00-000000"
    tuned.mkdir(parents=True)
    runs.mkdir(parents=True)
    (tuned / f".{site.table.name}.lock").write_text("12345")
    (tuned / f".{site.table.name}.{os.uname().nodename}-999999999-x.tmp").write_text("gfx,cu")
    (tuned / f"{site.table.name}.meta.json").write_text('{"runs": {"a')
    (runs / "trials.jsonl").write_bytes(b"\0" * chance.randrange(0, 5000))
    for name in ("cpu", "cpu-0", "cuda-0"):
        with open(os.path.join(site.temporary, f"gemmpipe-{name}.lock"), "w") as stream:
            stream.write("1\n")
    error = ended(site.start(problems(), "space.PACE_MS=[0]"), 0)
    assert "set aside as" in error and len(error.splitlines()) == 1, error[-600:]
    table_is_right(site, MS)
    artifacts_are_whole(site)
    return 6
