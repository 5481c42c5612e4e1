"""Who is blamed when a worker dies, with real workers that really die."""

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver as server
from pathlib import Path
from typing import Any

import pytest

from gemmpipe.backends.own import Own
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.forkserver import ForkedProcess, forkserver
from gemmpipe.bench.jobs import AutotuneJob, Job
from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.timer import Timer
from gemmpipe.bench.worker import WorkerConfig
from gemmpipe.core import device as devices
from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Event, Events
from gemmpipe.executors import JobResult
from gemmpipe.executors.supervisor import CrashHistory, WorkerSupervisor
from gemmpipe.search import TrialRequest

FAULTY = Path(__file__).parents[1] / "faulty"
TIMER = Timer(warmup=0, iters=2, rounds=3, budget_ms=10)
GB = 1 << 30


def _candidate(kind: str) -> Candidate:
    return Candidate.of("faulty", {"KIND": kind, "PACE_MS": 0})


def _problem(m: int = 4, n: int = 16) -> Problem:
    return Problem(family="faulty", key=(("M", m), ("N", n), ("K", 32)))


def _screen(*kinds: str, m: int = 4, launches: int = 2) -> ScreenJob:
    requests = tuple(TrialRequest(candidate=_candidate(kind), launches=launches) for kind in kinds)
    return ScreenJob(stage="screen", problem=_problem(m), requests=requests, timer=TIMER)


def _finals(*kinds: str) -> FinalsJob:
    return FinalsJob(
        stage="bench",
        problem=_problem(),
        finalists=tuple(_candidate(kind) for kind in kinds),
        library=frozenset(),
        always_timed=frozenset(),
        timer=TIMER,
        err_ratio=0.05,
    )


class Office:
    """A desk with all that was heard from it."""

    def __init__(self, timeout_s: float | None, memory_bytes: int, backends: tuple[Any, ...] = ()) -> None:
        self.said: list[Event] = []
        cpu = devices.DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
        chosen = (Own(label="faulty"), *backends)
        post = WorkerConfig(device=cpu, family="faulty", backends=chosen, python_path=(str(FAULTY),))
        self.desk = WorkerSupervisor(
            post, timeout_s, memory_bytes, Events(listeners=[self.said.append]), CrashHistory()
        )
        self.messages: list[JobResult] = []

    def work(self, *jobs: Job, limit_s: float = 300) -> dict[str, Status]:
        """Do the jobs to their end; the status of each KIND (by M too where there are several)."""
        for job in jobs:
            self.desk.submit(job)
        deadline = time.monotonic() + limit_s
        while self.desk.backlog:
            assert time.monotonic() < deadline, "the desk does not come to an end"
            self.messages += self.desk.messages()
            time.sleep(0.01)
        self.messages += self.desk.messages()
        return {str(t.candidate.knobs.get("KIND")): t.status for t in self.trials}

    @property
    def trials(self) -> list[Trial]:
        return [t for message in self.messages for t in message.trials]

    @property
    def complete(self) -> list[Job]:
        return [message.job for message in self.messages if message.complete]

    @property
    def quarantined(self) -> int:
        return sum(event.text.startswith("quarantined") for event in self.said)


Open = Callable[..., Office]


@pytest.fixture
def office() -> Iterator[Open]:
    """Opens offices, and forgets afterwards what their candidates did once."""
    opened: list[Office] = []

    def open_(timeout_s: float = 30, memory_bytes: int = 64 * GB, backends: tuple[Any, ...] = ()) -> Office:
        opened.append(Office(timeout_s, memory_bytes, backends))
        return opened[-1]

    yield open_
    for each in opened:
        each.desk.close(kill=True)
    for path in Path(tempfile.gettempdir()).glob(f"faulty-{os.getpid()}-*"):
        path.unlink()


def _once_each(office: Office, jobs: int) -> None:
    """Every candidate has one trial, every job one end."""
    assert len({(t.problem, t.candidate) for t in office.trials}) == len(office.trials)
    assert len(office.complete) == jobs


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("raise_bind", Status.LAUNCH_ERROR),
        ("raise_launch", Status.LAUNCH_ERROR),
        ("raise_odd", Status.LAUNCH_ERROR),
        ("segfault", Status.DIED),
        ("kill", Status.DIED),
        ("exit", Status.DIED),
        ("sys_exit", Status.DIED),
        ("die_later", Status.DIED),
        ("raise_later", Status.LAUNCH_ERROR),
        ("odd_later", Status.LAUNCH_ERROR),
    ],
)
def test_the_faulty_one_is_named_and_the_healthy_ones_are_timed(office: Open, kind: str, status: Status) -> None:
    here = office()
    assert here.work(_screen("right", kind, "other")) == {
        "right": Status.OK,
        kind: status,
        "other": Status.OK,
    }
    _once_each(here, jobs=len(here.complete))
    assert here.quarantined == (status is Status.DIED)


@pytest.mark.parametrize("kind", ["hang", "hang_later"])
def test_a_hang_is_a_timeout(office: Open, kind: str) -> None:
    here = office(timeout_s=0.3)
    found = here.work(_screen("right", kind, "other"))
    assert found == {"right": Status.OK, kind: Status.TIMEOUT, "other": Status.OK}
    (trial,) = [t for t in here.trials if t.status is Status.TIMEOUT]
    assert trial.error == "no result after executor.timeout_s=0.3"


@pytest.mark.parametrize("kind", ["hang_once", "die_once"])
def test_bad_luck_is_no_fault(office: Open, kind: str) -> None:
    here = office(timeout_s=1)
    assert here.work(_screen(kind, "right")) == {kind: Status.OK, "right": Status.OK}
    assert here.quarantined == 0
    _once_each(here, jobs=1)


def test_memory_is_watched(office: Open) -> None:
    here = office(memory_bytes=GB)
    assert here.work(_screen("right", "eat")) == {"right": Status.OK, "eat": Status.DIED}
    assert [t.error for t in here.trials if t.status is Status.DIED] == [
        "out of host memory: stopped by executor.memory_pct"
    ]


def test_blame_is_right_in_the_second_job(office: Open) -> None:
    """The worker has two jobs: it dies in the second while the first one's answer may be unread."""
    here = office()
    here.work(_screen("right"))
    for m in (8, 9, 10):
        here.messages.clear()
        for job in (_screen("right", "other"), _screen("right", "kill", m=m)):
            here.desk.submit(job)
        time.sleep(0.5)  # it is dead by now, and nobody listened
        found = here.work()
        assert found == {"right": Status.OK, "other": Status.OK, "kill": Status.DIED}
        assert {t.problem for t in here.trials if t.status is Status.DIED} == {_problem(m).id}
        assert len(here.trials) == 4
        assert len(here.complete) == 2


def test_many_faulty_ones_in_many_jobs(office: Open) -> None:
    here = office()
    kinds = ("kill", "right", "raise_bind", "raise_later", "die_later")
    here.work(*[_screen(*kinds, m=m) for m in (1, 2)])
    assert len(here.trials) == 2 * len(kinds)
    assert {t.candidate.knobs["KIND"] for t in here.trials if t.status is Status.OK} == {"right"}
    assert {t.candidate.knobs["KIND"] for t in here.trials if t.status is Status.LAUNCH_ERROR} == {
        "raise_bind",
        "raise_later",
    }


def test_jobs_without_candidates_end(office: Open) -> None:
    here = office()
    empty = _screen("right").without({_candidate("right")})
    assert here.work(empty, _screen("right"), empty, _screen("right", m=8), empty) == {"right": Status.OK}
    _once_each(here, jobs=5)
    assert here.desk.usage().busy_s["start"] > 0


def test_a_job_whose_candidates_all_die_ends(office: Open) -> None:
    here = office()
    assert here.work(_screen("kill", "exit"), _screen("right", m=8)) == {
        "kill": Status.DIED,
        "exit": Status.DIED,
        "right": Status.OK,
    }
    _once_each(here, jobs=2)


def test_a_candidate_out_for_one_job_is_out_for_the_problem(office: Open) -> None:
    """What a probe finds holds for jobs that are queued, and none was sent behind the probe."""
    here = office()
    here.work(_screen("right", "kill"), _screen("kill", "other"), _screen("kill"))
    _once_each(here, jobs=3)
    assert here.quarantined == 1


def test_what_ended_workers_on_three_problems_is_not_run_on_more(office: Open) -> None:
    here = office()
    here.work(*[_screen("right", "kill", "other", m=m) for m in range(1, 7)])
    _once_each(here, jobs=6)
    errors = [t.error for t in here.trials if t.candidate.knobs["KIND"] == "kill"]
    assert [error.startswith("not run: it ended its worker on 3 other problems") for error in errors] == [
        *[False] * 3,
        *[True] * 3,
    ]
    assert {t.status for t in here.trials if t.candidate.knobs["KIND"] != "kill"} == {Status.OK}
    assert here.quarantined == 3
    assert sum("trying" in event.text for event in here.said) == 1, "in company on the first problem alone"


def test_who_lived_on_another_problem_is_never_condemned(office: Open) -> None:
    here = office()
    here.work(*[_screen("right", "kill_even", m=m) for m in range(2, 13)])
    _once_each(here, jobs=11)
    found = {t.problem: t.status for t in here.trials if t.candidate.knobs["KIND"] == "kill_even"}
    assert found == {_problem(m).id: Status.OK if m % 2 else Status.DIED for m in range(2, 13)}


def test_what_a_probe_raises_is_told_once(office: Open) -> None:
    here = office()
    assert here.work(_screen("die_then_raise", "right")) == {
        "die_then_raise": Status.LAUNCH_ERROR,
        "right": Status.OK,
    }
    _once_each(here, jobs=1)


def test_finals_go_on_without_the_faulty_ones(office: Open) -> None:
    here = office()
    found = here.work(_finals("right", "kill", "spoil_nan", "untouched", "permute", "spoil_row", "slow"))
    assert found.pop("kill") is Status.DIED
    assert found.pop("right") is Status.OK
    assert found.pop("slow") is Status.PRUNED
    assert set(found.values()) == {Status.INCORRECT}
    _once_each(here, jobs=1)


def test_a_problem_that_cannot_be_set_up_fails_its_candidates(office: Open) -> None:
    here = office()
    assert here.work(_screen("right", "other", m=666), _screen("right")) == {
        "right": Status.OK,
        "other": Status.DIED,
    }
    told = [t.error for t in here.trials if t.status is Status.DIED]
    assert len(told) == 2
    said = r"the problem cannot be set up: /.*/faulty\.py:\d+: ValueError: no operands of 666 rows"
    assert all(re.fullmatch(said, each) for each in told), told
    assert here.quarantined == 0
    _once_each(here, jobs=2)


def test_a_worker_that_is_killed_from_outside_is_replaced(office: Open) -> None:
    here = office(timeout_s=3600)
    here.work(_screen("right"))
    here.desk._process._process.kill()
    here.messages.clear()
    assert here.work(_screen("right", m=8)) == {"right": Status.OK}
    assert here.quarantined == 0


def test_a_death_is_noticed_without_waiting_for_the_time_limit(office: Open) -> None:
    """Death, the probe's death, and the others' trials: `work` gives up long before the limit."""
    here = office(timeout_s=3600)
    here.work(_screen("right"))
    here.messages.clear()
    assert here.work(_screen("segfault", "right", m=8)) == {"segfault": Status.DIED, "right": Status.OK}
    _once_each(here, jobs=1)


def test_a_worker_that_cannot_start_is_the_environments_fault(tmp_path: Path) -> None:
    cpu = devices.DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
    post = WorkerConfig(device=cpu, family="no_such_family", backends=(), python_path=(str(tmp_path),))
    desk = WorkerSupervisor(post, 30, 64 * GB, Events(), CrashHistory())
    desk.submit(_screen("right"))

    def wait() -> None:
        for _ in range(6000):
            desk.messages()
            time.sleep(0.05)

    with pytest.raises(EnvironmentProblem, match=r"cpu: the worker cannot start: .*no family 'no_such_family'"):
        wait()
    desk.close(kill=True)


def _server() -> int:
    return int(vars(server)["_forkserver"]._forkserver_pid or 0)


def _is_over(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked for its end yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _kill_as_they_start(desk: WorkerSupervisor, times: int) -> set[int]:
    """Kill so many workers, each before it can work."""
    killed: set[int] = set()
    deadline = time.monotonic() + 60
    while len(killed) < times and time.monotonic() < deadline:
        pid = desk._process._process.pid
        if pid not in killed and desk._process._process.alive:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        desk.messages()
        time.sleep(0.01)
    return killed


def test_a_worker_that_is_killed_as_it_starts_is_started_again(office: Open) -> None:
    here = office()
    assert len(_kill_as_they_start(here.desk, 5)) == 5
    assert here.work(_screen("right")) == {"right": Status.OK}
    _once_each(here, jobs=1)
    here.desk._process._process.kill()  # later deaths are counted anew
    assert here.work(_screen("other")) == {"right": Status.OK, "other": Status.OK}


def test_a_worker_that_is_killed_each_time_it_starts_is_given_up_in_a_line(office: Open) -> None:
    here = office()
    with pytest.raises(EnvironmentProblem) as raised:
        _kill_as_they_start(here.desk, 100)
    assert str(raised.value) == "cpu: the worker cannot start: the worker died: signal 9, 6 times in a row"


def test_a_forkserver_that_is_killed_while_a_worker_starts_is_another_try(office: Open) -> None:
    """The fork that was asked of it fails, or nobody is left who knows how the worker ended."""
    os.kill(forkserver() and _server(), signal.SIGKILL)
    killers = [threading.Timer(delay_s, lambda: os.kill(_server(), signal.SIGKILL)) for delay_s in (0.05, 0.5, 1.5)]
    for killer in killers:
        killer.start()
    here = office()
    assert here.work(_screen("right")) == {"right": Status.OK}
    for killer in killers:
        killer.join()


def test_a_worker_outlives_its_forkserver_and_ends_with_its_desk(office: Open) -> None:
    here = office()
    here.work(_screen("right"))
    pid = here.desk._process._process.pid
    os.kill(_server(), signal.SIGKILL)
    here.messages.clear()
    assert here.work(_screen("right", "other", m=8)) == {"right": Status.OK, "other": Status.OK}
    assert here.desk._process._process.pid == pid, "the same one"
    here.messages.clear()
    assert here.work(_screen("kill", "right", m=9)) == {"kill": Status.DIED, "right": Status.OK}
    assert _is_over(pid)
    pid = here.desk._process._process.pid
    os.kill(_server(), signal.SIGKILL)
    here.desk.close(kill=True)
    assert _is_over(pid), "it would go on with the device"


def test_a_process_that_never_starts_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver is killed each time it was asked for a process, before it forks."""
    monkeypatch.setattr("gemmpipe.bench.forkserver.RETRY_PAUSES_S", (0.0, 0.1))
    kind = type(forkserver().Process(target=print))
    start, asked = kind.start, []

    def stopped(process: Any) -> None:
        forkserver()
        pid = _server()
        os.kill(pid, signal.SIGSTOP)
        asked.append(pid)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        start(process)

    monkeypatch.setattr(kind, "start", stopped)
    with pytest.raises(EnvironmentProblem, match="no process can be started: "):
        ForkedProcess(print, ())
    assert len(set(asked)) == 3


def test_closing_twice_and_while_it_works(office: Open) -> None:
    """A worker with work in hand, which would go on for an hour, is killed whatever was asked."""
    here = office(timeout_s=3600)
    here.work(_screen("right"))
    here.desk.submit(_screen("hang"))
    process = here.desk._process._process
    here.desk.close(kill=False)
    assert process.exitcode == -signal.SIGKILL
    here.desk.close(kill=True)
    assert list(here.desk.wait_handles()) == []


def test_a_tuner_that_kills_its_worker_is_tried_twice_and_given_up(office: Open, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(FAULTY))
    from faulty import DeadlyTuner

    open_ = office(backends=(DeadlyTuner(),))
    job = AutotuneJob(stage="autotune", problem=_problem(), configurations=(_candidate("right"),))
    assert open_.work(job, _screen("right")) == {"None": Status.DIED, "right": Status.OK}
    assert open_.quarantined == 1
    assert [done.stage for done in open_.complete] == ["autotune", "screen"]


def test_without_a_limit_a_candidate_takes_its_time() -> None:
    office = Office(None, 64 * GB)
    assert office.work(_screen("slow")) == {"slow": Status.OK}
