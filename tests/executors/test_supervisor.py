"""The candidate blamed when a worker dies, with real workers that really die."""

import contextlib
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
from pairwise import SLOW

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
from gemmpipe.executors import supervisor as supervision
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


class Harness:
    """A supervisor with its worker, its messages and its events."""

    def __init__(self, timeout_s: float | None, memory_bytes: int, backends: tuple[Any, ...] = ()) -> None:
        self.events: list[Event] = []
        cpu = devices.DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
        chosen = (Own(label="faulty"), *backends)
        config = WorkerConfig(device=cpu, family="faulty", backends=chosen, python_path=(str(FAULTY),))
        self.supervisor = WorkerSupervisor(
            config, timeout_s, memory_bytes, Events(listeners=[self.events.append]), CrashHistory()
        )
        self.messages: list[JobResult] = []

    def work(self, *jobs: Job, limit_s: float = 300) -> dict[str, Status]:
        """Run the jobs to their end; returns the last status of each KIND."""
        for job in jobs:
            self.supervisor.submit(job)
        deadline = time.monotonic() + limit_s
        while self.supervisor.backlog:
            assert time.monotonic() < deadline, "the jobs do not end"
            self.messages += self.supervisor.messages()
            time.sleep(0.01)
        self.messages += self.supervisor.messages()
        return {str(t.candidate.knobs.get("KIND")): t.status for t in self.trials}

    @property
    def trials(self) -> list[Trial]:
        return [t for message in self.messages for t in message.trials]

    @property
    def complete(self) -> list[Job]:
        return [message.job for message in self.messages if message.complete]

    @property
    def quarantined(self) -> int:
        return sum(event.text.startswith("quarantined") for event in self.events)


Make = Callable[..., Harness]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes harnesses, and afterwards deletes the marks of candidates that fail only once."""
    made: list[Harness] = []

    def start(timeout_s: float = 30, memory_bytes: int = 64 * GB, backends: tuple[Any, ...] = ()) -> Harness:
        made.append(Harness(timeout_s, memory_bytes, backends))
        return made[-1]

    yield start
    for each in made:
        each.supervisor.close(kill=True)
    for path in Path(tempfile.gettempdir()).glob(f"faulty-{os.getpid()}-*"):
        path.unlink()


def _check_once_each(harness: Harness, jobs: int) -> None:
    """Every candidate has one trial, every job ends once."""
    assert len({(t.problem, t.candidate) for t in harness.trials}) == len(harness.trials)
    assert len(harness.complete) == jobs


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("raise_bind", Status.LAUNCH_ERROR),
        pytest.param("raise_launch", Status.LAUNCH_ERROR, marks=SLOW),
        ("raise_odd", Status.LAUNCH_ERROR),
        ("segfault", Status.DIED),
        pytest.param("kill", Status.DIED, marks=SLOW),
        pytest.param("exit", Status.DIED, marks=SLOW),
        pytest.param("sys_exit", Status.DIED, marks=SLOW),
        ("die_later", Status.DIED),
        ("raise_later", Status.LAUNCH_ERROR),
        pytest.param("odd_later", Status.LAUNCH_ERROR, marks=SLOW),
    ],
)
def test_the_faulty_candidate_is_blamed_and_the_others_are_timed(make: Make, kind: str, status: Status) -> None:
    harness = make()
    assert harness.work(_screen("right", kind, "other")) == {
        "right": Status.OK,
        kind: status,
        "other": Status.OK,
    }
    _check_once_each(harness, jobs=len(harness.complete))
    assert harness.quarantined == (status is Status.DIED)


@pytest.mark.parametrize("kind", ["hang", pytest.param("hang_later", marks=SLOW)])
def test_a_hang_is_a_timeout(make: Make, kind: str) -> None:
    harness = make(timeout_s=0.3)
    found = harness.work(_screen("right", kind, "other"))
    assert found == {"right": Status.OK, kind: Status.TIMEOUT, "other": Status.OK}
    (trial,) = [t for t in harness.trials if t.status is Status.TIMEOUT]
    assert trial.error == "no result after executor.timeout_s=0.3"


def test_a_candidate_that_runs_long_is_named_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of a run stands still while a library compiles; FlashInfer's took four minutes (2026-11-29)."""
    monkeypatch.setattr(supervision, "_LONG_S", 0.1)
    harness = make(timeout_s=0.5)
    harness.work(_screen("hang"))
    lines = [event.text for event in harness.events if event.kind == "line"]
    problem = _problem().id
    assert lines
    assert set(lines) == {
        f"faulty for {problem}: no result after 0.1 s (limit: executor.timeout_s=0.5); "
        "some libraries compile when they are first called"
    }
    assert len(lines) == 2, "in the job, and alone"


@pytest.mark.parametrize("kind", [pytest.param("hang_once", marks=SLOW), "die_once"])
def test_a_single_failure_is_no_fault(make: Make, kind: str) -> None:
    harness = make(timeout_s=0.5)
    assert harness.work(_screen(kind, "right")) == {kind: Status.OK, "right": Status.OK}
    assert harness.quarantined == 0
    _check_once_each(harness, jobs=1)


@pytest.mark.slow  # the run of every fault in tests/e2e/test_faults.py has it too
def test_memory_is_limited(make: Make) -> None:
    harness = make(memory_bytes=GB)
    assert harness.work(_screen("right", "eat")) == {"right": Status.OK, "eat": Status.DIED}
    assert [t.error for t in harness.trials if t.status is Status.DIED] == [
        "out of host memory: stopped by executor.memory_pct"
    ]


def test_blame_is_correct_in_the_second_job(make: Make) -> None:
    """The worker has two jobs: it dies in the second while the reply to the first may be unread."""
    harness = make()
    harness.work(_screen("right"))
    for m in (8, 9, 10):
        harness.messages.clear()
        for job in (_screen("right", "other"), _screen("right", "kill", m=m)):
            harness.supervisor.submit(job)
        time.sleep(0.5)  # it is dead by now, with unread replies
        found = harness.work()
        assert found == {"right": Status.OK, "other": Status.OK, "kill": Status.DIED}
        assert {t.problem for t in harness.trials if t.status is Status.DIED} == {_problem(m).id}
        assert len(harness.trials) == 4
        assert len(harness.complete) == 2


@pytest.mark.slow
def test_many_faulty_candidates_in_many_jobs(make: Make) -> None:
    harness = make()
    kinds = ("kill", "right", "raise_bind", "raise_later", "die_later")
    harness.work(*[_screen(*kinds, m=m) for m in (1, 2)])
    assert len(harness.trials) == 2 * len(kinds)
    assert {t.candidate.knobs["KIND"] for t in harness.trials if t.status is Status.OK} == {"right"}
    assert {t.candidate.knobs["KIND"] for t in harness.trials if t.status is Status.LAUNCH_ERROR} == {
        "raise_bind",
        "raise_later",
    }


def test_jobs_without_candidates_end(make: Make) -> None:
    harness = make()
    empty = _screen("right").without({_candidate("right")})
    assert harness.work(empty, _screen("right"), empty, _screen("right", m=8), empty) == {"right": Status.OK}
    _check_once_each(harness, jobs=5)
    assert harness.supervisor.usage().busy_s["start"] > 0


def test_a_job_whose_candidates_all_die_ends(make: Make) -> None:
    harness = make()
    assert harness.work(_screen("kill", "exit"), _screen("right", m=8)) == {
        "kill": Status.DIED,
        "exit": Status.DIED,
        "right": Status.OK,
    }
    _check_once_each(harness, jobs=2)


def test_a_candidate_excluded_in_one_job_is_excluded_for_the_problem(make: Make) -> None:
    """The result of a probe applies to queued jobs, and no job was sent after the probe."""
    harness = make()
    harness.work(_screen("right", "kill"), _screen("kill", "other"), _screen("kill"))
    _check_once_each(harness, jobs=3)
    assert harness.quarantined == 1


def test_a_candidate_that_crashed_on_three_problems_is_not_run_on_others(make: Make) -> None:
    harness = make()
    harness.work(*[_screen("right", "kill", "other", m=m) for m in range(1, 7)])
    _check_once_each(harness, jobs=6)
    errors = [t.error for t in harness.trials if t.candidate.knobs["KIND"] == "kill"]
    assert [
        error.startswith("not run: it crashed its worker on 3 other problems and succeeded on none: ")
        for error in errors
    ] == [
        *[False] * 3,
        *[True] * 3,
    ]
    assert {t.status for t in harness.trials if t.candidate.knobs["KIND"] != "kill"} == {Status.OK}
    assert harness.quarantined == 3
    assert sum("trying" in event.text for event in harness.events) == 1, (
        "with other candidates on the first problem only"
    )


def test_a_candidate_that_succeeded_on_a_problem_is_never_excluded(make: Make) -> None:
    harness = make()
    harness.work(*[_screen("right", "kill_even", m=m) for m in range(2, 13)])
    _check_once_each(harness, jobs=11)
    found = {t.problem: t.status for t in harness.trials if t.candidate.knobs["KIND"] == "kill_even"}
    assert found == {_problem(m).id: Status.OK if m % 2 else Status.DIED for m in range(2, 13)}


def test_an_exception_in_a_probe_is_reported_once(make: Make) -> None:
    harness = make()
    assert harness.work(_screen("die_then_raise", "right")) == {
        "die_then_raise": Status.LAUNCH_ERROR,
        "right": Status.OK,
    }
    _check_once_each(harness, jobs=1)


def test_finals_continue_without_faulty_candidates(make: Make) -> None:
    harness = make()
    found = harness.work(_finals("right", "kill", "spoil_nan", "untouched", "permute", "spoil_row", "slow"))
    assert found.pop("kill") is Status.DIED
    assert found.pop("right") is Status.OK
    assert found.pop("slow") is Status.PRUNED
    assert set(found.values()) == {Status.INCORRECT}
    _check_once_each(harness, jobs=1)


def test_a_problem_that_cannot_be_set_up_fails_its_candidates(make: Make) -> None:
    harness = make()
    assert harness.work(_screen("right", "other", m=666), _screen("right")) == {
        "right": Status.OK,
        "other": Status.DIED,
    }
    errors = [t.error for t in harness.trials if t.status is Status.DIED]
    assert len(errors) == 2
    pattern = r"the problem cannot be set up: /.*/faulty\.py:\d+: ValueError: no operands of 666 rows"
    assert all(re.fullmatch(pattern, each) for each in errors), errors
    assert harness.quarantined == 0
    _check_once_each(harness, jobs=2)


def test_a_worker_that_is_killed_from_outside_is_replaced(make: Make) -> None:
    harness = make(timeout_s=3600)
    harness.work(_screen("right"))
    harness.supervisor._process._process.kill()
    harness.messages.clear()
    assert harness.work(_screen("right", m=8)) == {"right": Status.OK}
    assert harness.quarantined == 0


def test_a_death_is_noticed_without_waiting_for_the_time_limit(make: Make) -> None:
    """The crash, the probe's crash and the other trials take much less time than the limit."""
    harness = make(timeout_s=3600)
    harness.work(_screen("right"))
    harness.messages.clear()
    assert harness.work(_screen("segfault", "right", m=8)) == {"segfault": Status.DIED, "right": Status.OK}
    _check_once_each(harness, jobs=1)


@pytest.mark.usefixtures("short_pauses")
def test_a_worker_that_cannot_start_is_an_environment_error(tmp_path: Path) -> None:
    cpu = devices.DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
    config = WorkerConfig(device=cpu, family="no_such_family", backends=(), python_path=(str(tmp_path),))
    supervisor = WorkerSupervisor(config, 30, 64 * GB, Events(), CrashHistory())
    supervisor.submit(_screen("right"))

    def wait() -> None:
        for _ in range(30000):
            supervisor.messages()
            time.sleep(0.01)

    with pytest.raises(EnvironmentProblem, match=r"cpu: the worker cannot start: .*no family 'no_such_family'"):
        wait()
    supervisor.close(kill=True)


def _server() -> int:
    return int(vars(server)["_forkserver"]._forkserver_pid or 0)


def _kill_server() -> None:
    """Kill the forkserver if there is one; pid 0 would be this group of processes."""
    if pid := _server():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_over(pid: int) -> bool:
    """True if a process has ended; its parent may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _kill_as_they_start(supervisor: WorkerSupervisor, times: int) -> set[int]:
    """Kill this number of workers, each before it can work."""
    killed: set[int] = set()
    deadline = time.monotonic() + 60
    while len(killed) < times and time.monotonic() < deadline:
        pid = supervisor._process._process.pid
        if pid not in killed and supervisor._process._process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        supervisor.messages()
        time.sleep(0.01)
    return killed


@pytest.mark.usefixtures("short_pauses")
def test_a_worker_that_is_killed_as_it_starts_is_started_again(make: Make) -> None:
    harness = make()
    assert len(_kill_as_they_start(harness.supervisor, 5)) == 5
    assert harness.work(_screen("right")) == {"right": Status.OK}
    _check_once_each(harness, jobs=1)
    harness.supervisor._process._process.kill()  # later deaths have a new count
    assert harness.work(_screen("other")) == {"right": Status.OK, "other": Status.OK}


@pytest.mark.usefixtures("short_pauses")
def test_a_worker_that_is_killed_at_every_start_is_a_one_line_error(make: Make) -> None:
    harness = make()
    with pytest.raises(EnvironmentProblem) as raised:
        _kill_as_they_start(harness.supervisor, 100)
    assert str(raised.value) == "cpu: the worker cannot start: the worker died: signal 9, 6 times in a row"


@pytest.mark.slow  # a whole run meets it in tests/e2e/test_faults.py
def test_a_start_is_repeated_if_the_forkserver_is_killed(make: Make) -> None:
    """The requested fork fails, or no process is left with the worker's exit code."""
    os.kill(forkserver() and _server(), signal.SIGKILL)
    killers = [threading.Timer(delay_s, _kill_server) for delay_s in (0.05, 0.5, 1.5)]
    for killer in killers:
        killer.start()
    harness = make()
    assert harness.work(_screen("right")) == {"right": Status.OK}
    for killer in killers:
        killer.join()


@pytest.mark.slow  # the forkserver that others share is killed, twice
def test_a_worker_outlives_its_forkserver_and_ends_with_its_supervisor(make: Make) -> None:
    harness = make()
    harness.work(_screen("right"))
    pid = harness.supervisor._process._process.pid
    _kill_server()
    harness.messages.clear()
    assert harness.work(_screen("right", "other", m=8)) == {"right": Status.OK, "other": Status.OK}
    assert harness.supervisor._process._process.pid == pid, "the same one"
    harness.messages.clear()
    assert harness.work(_screen("kill", "right", m=9)) == {"kill": Status.DIED, "right": Status.OK}
    assert _is_over(pid)
    pid = harness.supervisor._process._process.pid
    _kill_server()
    harness.supervisor.close(kill=True)
    assert _is_over(pid), "it would keep using the device"


@pytest.mark.slow  # the forkserver that others share is killed
def test_a_process_that_never_starts_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver is killed at every request for a process, before it forks."""
    monkeypatch.setattr("gemmpipe.bench.forkserver.RETRY_PAUSES_S", (0.0, 0.1))
    kind = type(forkserver().Process(target=print))
    start, read, stopped_pids = kind.start, server.read_signed, []

    def stopped(process: Any) -> None:
        forkserver()
        pid = _server()
        os.kill(pid, signal.SIGSTOP)
        stopped_pids.append(pid)
        start(process)

    def killed(answer: int) -> int:
        """The request is sent, its answer is awaited."""
        os.kill(stopped_pids[-1], signal.SIGKILL)
        os.waitid(os.P_PID, stopped_pids[-1], os.WEXITED | os.WNOWAIT)  # else the next request may be of the same one
        return read(answer)

    monkeypatch.setattr(kind, "start", stopped)
    monkeypatch.setattr(server, "read_signed", killed)
    with pytest.raises(EnvironmentProblem, match="no process can be started: "):
        ForkedProcess(print, ())
    assert len(set(stopped_pids)) == 3


def test_closing_twice_and_while_it_works(make: Make) -> None:
    """A worker with a running job, which would take an hour, is killed with and without `kill`."""
    harness = make(timeout_s=3600)
    harness.work(_screen("right"))
    harness.supervisor.submit(_screen("hang"))
    process = harness.supervisor._process._process
    harness.supervisor.close(kill=False)
    assert process.exitcode == -signal.SIGKILL
    harness.supervisor.close(kill=True)
    assert list(harness.supervisor.wait_handles()) == []


def test_a_tuner_that_kills_its_worker_is_tried_twice_and_excluded(make: Make, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(FAULTY))
    from faulty import DeadlyTuner

    harness = make(backends=(DeadlyTuner(),))
    job = AutotuneJob(stage="autotune", problem=_problem(), configurations=(_candidate("right"),))
    assert harness.work(job, _screen("right")) == {"None": Status.DIED, "right": Status.OK}
    assert harness.quarantined == 1
    assert [done.stage for done in harness.complete] == ["autotune", "screen"]


def test_without_a_limit_a_candidate_takes_its_time() -> None:
    harness = Harness(None, 64 * GB)
    assert harness.work(_screen("slow")) == {"slow": Status.OK}


def test_results_of_screening_have_the_time_of_first_launches(make: Make) -> None:
    harness = make()
    harness.work(_screen("good"), _finals("good"))
    screened, finals = (message for message in harness.messages if message.complete)
    assert screened.first_launch_s > 0
    assert finals.first_launch_s == 0
