"""Faults injected for real, each into runs of its own; a fault that is not withstood raises AssertionError."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from soak_runs import (
    Row,
    Site,
    Started,
    artifacts_are_whole,
    kill_after,
    knob_of,
    nothing_is_lost,
    nothing_is_repeated,
    table_is_right,
)

Act = Callable[[Site, random.Random], int]
"""Injects a fault into runs at a site; how often."""

MS = (1, 2, 3, 4, 5, 6)
HEALTHY = {"ok", "pruned"}
BROKEN = {"died", "timeout", "launch_error", "compile_error", "incorrect"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of the table."""

    name: str
    how: str
    act: Act
    where: tuple[str, ...] = ("cpu", "gpu")


def problems(ms: tuple[int, ...] = MS, n: int = 32, k: int = 64) -> str:
    """The word for these problems."""
    return f"shapes.items=[{{M: [{','.join(map(str, ms))}], N: {n}, K: {k}}}]"


def ended(started: Started, *codes: int) -> str:
    """Wait for the end of a run: its stderr; the exit code must be one of these."""
    code, _, error = started.end()
    assert code in codes, f"exit code {code}, expected {codes}: {error[-600:]}"
    assert "Traceback" not in error, error[-600:]
    assert started.gone(), "processes are left"
    return without_neighbours(error)


def ended_by_a_signal(site: Site, started: Started) -> None:
    """With code 130; or with 0, where the signal came after the last problem was through."""
    code, _, error = started.end()
    through = len(site.rows("done")) == len(MS)
    assert code in ((130, 0) if through else (130,)), f"exit code {code}, through: {through}: {error[-600:]}"
    assert "Traceback" not in error, error[-600:]
    assert started.gone(), "processes are left"


def without_neighbours(error: str) -> str:
    """Stderr without the warning that other processes used the device: runs of the soak share it."""
    return "".join(line for line in error.splitlines(keepends=True) if "timed while" not in line)


def go_on(site: Site, ms: tuple[int, ...] = MS, run: str = "last") -> None:
    """Resume to the end: nothing of before is lost, nothing is repeated, the table is right."""
    before = site.rows()
    ended(site.start(f"resume={run}"), 0)
    nothing_is_lost(before, site.rows())
    nothing_is_repeated(site.rows())
    artifacts_are_whole(site)
    table_is_right(site, ms)


# Candidates that fail


def faulty(kind: str, status: str, *arguments: str, paces: tuple[int, ...] = (0, 1)) -> Act:
    """Candidates that fail in one way beside healthy ones: each named with its status, no other blamed."""

    def act(site: Site, chance: random.Random) -> int:
        ms = tuple(sorted(chance.sample(range(1, 65), 4)))
        own = (f"space.KIND=[right,{kind}]", f"space.PACE_MS=[{','.join(map(str, paces))}]")
        error = ended(site.start(problems(ms), *own, *arguments), 0)
        kinds = knob_of(site, "KIND")
        trials = site.rows("trial")
        injected = 0
        for row in trials:
            of = kinds[str(row["candidate"])]
            if of != kind:
                assert row["status"] in HEALTHY, f"a healthy candidate is blamed: {row}"
            elif status != "incorrect" or row["stage"] == "bench":  # screen checks nothing
                if kind == "die_later" and row["status"] == "ok" and row["launches"] == 1:
                    continue  # on a busy machine one launch takes so long that it is all of a look
                not_run = str(row.get("error", "")).startswith("not run:")
                assert row["status"] == ("died" if not_run else status), f"expected {status}: {row}"
                assert row.get("error") or status == "incorrect", f"nothing is said of the fault: {row}"
                injected += not not_run
        named = {(row["problem"], row["candidate"]) for row in trials if kinds[str(row["candidate"])] == kind}
        assert len(named) == len(paces) * len(ms), "not every faulty candidate has its trial"
        assert injected, "no candidate failed"
        if status in ("died", "timeout"):
            assert error.count("warning: quarantined") == injected, error[-600:]
        nothing_is_repeated(site.rows())
        artifacts_are_whole(site)
        table_is_right(site, ms)
        return injected

    return act


def killed_workers(site: Site, chance: random.Random) -> int:
    """Kill workers and compilers from outside, at random moments: all candidates are healthy, and stay so."""
    started = site.start(problems(), "space.PACE_MS=[0,5,6,7,8,9,10]", "search=exhaustive")
    site.wait_for(started, "launch")
    kills = 0
    while started.process.poll() is None:
        workers = started.workers()
        if workers:
            os.kill(chance.choice(workers), signal.SIGKILL)
            kills += 1
        # A candidate that dies again in its second try alone would be quarantined, and rightly.
        seen = len(site.rows("trial"))
        deadline = time.monotonic() + chance.uniform(1, 4)
        while started.process.poll() is None and (len(site.rows("trial")) == seen or time.monotonic() < deadline):
            time.sleep(0.05)
    ended(started, 0)
    blamed = [row for row in site.rows("trial") if row["status"] in BROKEN]
    assert not blamed, f"healthy candidates are blamed: {blamed[:2]}"
    nothing_is_repeated(site.rows())
    artifacts_are_whole(site)
    table_is_right(site, MS)
    return kills


# Runs that are stopped


def in_session(site: Site, started: Started) -> bool:
    """Wait until a run's session has begun, or the run is over."""
    before = len(site.rows("session"))
    deadline = time.monotonic() + 180
    while len(site.rows("session")) == before:
        if started.process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "no session within 180 s: the machine is too busy for this"
        time.sleep(0.02)
    return True


def killed_driver(site: Site, chance: random.Random) -> int:
    """SIGKILL the driver at random moments and resume, five times, then to the end."""
    arguments = (problems(), "space.PACE_MS=[0,5,6,7,8]", "search=exhaustive", f"batch={chance.choice((1, 100))}")
    kills, before = 0, list[Row]()
    for _ in range(5):
        begun = bool(site.rows("problem"))
        started = site.start(*(("resume=last",) if begun else arguments))
        in_session(site, started)
        kills += kill_after(chance, started, 2.5, started.process.kill)
        started.process.communicate()
        assert started.gone(), "workers outlive the driver"
        nothing_is_lost(before, site.rows())
        nothing_is_repeated(site.rows())
        artifacts_are_whole(site)
        before = site.rows()
    go_on(site)
    return kills


def stopped(*signals: signal.Signals) -> Act:
    """Signals at a random moment; the run ends with code 130 and goes on when resumed."""

    def act(site: Site, chance: random.Random) -> int:
        arguments = (problems(), "space.PACE_MS=[0,10,11,12]", "search=exhaustive", "batch=2")
        started = site.start(*arguments)
        assert in_session(site, started)
        sent = 0
        for number in signals:
            sent += kill_after(chance, started, 2.0, lambda number=number: started.process.send_signal(number))  # type: ignore[misc]
        ended_by_a_signal(site, started)
        artifacts_are_whole(site)
        done = {row["problem"] for row in site.rows("done")}
        if len(signals) == 1 and sent:
            assert len(site.tuned()) == len(done), "what was finished is not in the table"
        if site.rows("trial"):
            go_on(site)
        else:  # stopped before its first trial: the folder of such a run is removed
            ended(site.start(*arguments), 0)
            table_is_right(site, MS)
        return sent

    return act
