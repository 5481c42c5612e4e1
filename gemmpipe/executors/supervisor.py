"""Supervision of one worker process: job queue, crash blame, deadlines, memory limit, restarts and time account.

* `WorkerProcess`: starts and stops the process and exchanges messages with it.
* `CrashHistory`: candidates that crashed workers, shared by all supervisors of a run.
* `RetryQueue`: the pending jobs, and the decision after a crash: retry alone, quarantine, or repeat.
* `WorkerSupervisor`: keeps the process busy and replaces it.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from gemmpipe.bench import worker
from gemmpipe.bench.forkserver import EXIT_UNKNOWN, RETRY_PAUSES_S, ForkedProcess, forkserver
from gemmpipe.bench.jobs import FIRST_LAUNCH, SETTING_UP, InFlight, Job, ProbeJob
from gemmpipe.bench.worker import WorkerConfig, WorkerReply
from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Events
from gemmpipe.executors import QUEUE_DEPTH, JobResult, Usage

_END_S = 30.0  # a killed process ends long before that, unless it hangs in a driver
_MAX_CRASHES = 3  # a candidate that crashed its worker on this number of problems and succeeded on none is excluded
MAX_LOSSES = 3
"""Consecutive losses before any launch, after which the environment or the problem is considered at fault."""
_SETUP_FACTOR = 10.0  # time limit for the setup of a problem (operands, reference), in candidate time limits
_MIN_START_S = 60.0  # lowest time limit of a start: importing torch on a busy machine is slow
_LONG_S = 20.0  # a candidate that runs longer is named: some libraries compile for minutes when they are first called
_MEMORY_CHECK_S = 0.1  # interval between checks of a worker's memory


def memory_limit_bytes(memory_pct: float) -> int:
    """A percentage of this machine's memory."""
    return int(memory_pct / 100 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class WorkerProcess:
    """A sequence of worker processes; `start` begins a new one when the last is stopped."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._context = forkserver()
        self._cells = self._context.RawArray("d", [SETTING_UP, time.monotonic()])
        self.in_flight = InFlight(self._cells)
        """In shared memory that outlives each of the processes."""
        self.start()

    def start(self) -> None:
        """Begin a new process. Raises EnvironmentProblem if it cannot be started."""
        pipe, worker_end = self._context.Pipe()
        self.in_flight.begin(SETTING_UP)
        with worker_end:
            self._process = ForkedProcess(worker.main, (self._config, worker_end, self._cells))
        self._pipe = pipe

    def send(self, job: Job | None) -> None:
        """Send a job, or None to end the process. Raises OSError if it has ended."""
        self._pipe.send(job)

    def receive(self) -> WorkerReply | None:
        """The next reply, or None without one; None for a broken pipe."""
        try:
            return self._pipe.recv() if not self._pipe.closed and self._pipe.poll() else None
        except (EOFError, OSError):
            return None

    def wait_handles(self) -> Sequence[Connection | int]:
        """Handles that are ready when the process replies or ends."""
        return () if self._pipe.closed else (self._pipe, self._process.sentinel)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.alive

    def exit_reason(self) -> str:
        """A description of how the process ended."""
        self._process.join(timeout_s=5)
        code = self._process.exitcode
        if code == EXIT_UNKNOWN:
            return "the worker died: exit code unknown, its forkserver was killed"
        return f"the worker died: {'signal ' + str(-code) if code is not None and code < 0 else f'exit code {code}'}"

    def resident_bytes(self) -> int:
        """Resident memory of the process (Linux; 0 elsewhere)."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """Kill the process; its replies can still be received. Raises EnvironmentProblem if it does not end."""
        self._process.kill()
        self._process.join(timeout_s=_END_S)
        if self._process.alive:
            raise EnvironmentProblem(f"{self._config.device.torch_name}: the worker cannot be killed: the driver hangs")

    def stop(self, *, grace_s: float = 0.0) -> None:
        """Wait up to `grace_s` for the end of the process, then kill it, and close the pipe."""
        if not self._pipe.closed:
            self._process.join(timeout_s=grace_s)
            self.kill()
            self._pipe.close()
            self._process.close()


@dataclass(kw_only=True)
class CrashHistory:
    """Crashes and successes of candidates, shared by the supervisors of a run."""

    _crashed: dict[str, dict[str, str]] = field(default_factory=dict)
    """By candidate id: problem id -> how its worker ended."""
    _succeeded: set[str] = field(default_factory=set)

    def record(self, candidate: Candidate, problem: str, why: str) -> None:
        """Record that the candidate, alone, ended its worker on this problem."""
        self._crashed.setdefault(candidate.id, {})[problem] = why

    def record_survivors(self, trials: Iterable[Trial]) -> None:
        """Record the candidates with valid times."""
        self._succeeded.update(t.candidate.id for t in trials if t.status in (Status.OK, Status.PRUNED))

    def is_suspect(self, candidate: Candidate, problem: str) -> bool:
        """True if it ended a worker on another problem: it is then tried alone first."""
        return any(other != problem for other in self._crashed.get(candidate.id, ()))

    def exclusion_reason(self, candidate: Candidate) -> str:
        """The reason why the candidate is no longer run, or ""."""
        crashes = self._crashed.get(candidate.id, {})
        if len(crashes) < _MAX_CRASHES or candidate.id in self._succeeded:
            return ""
        last = [*crashes.values()][-1]
        return f"not run: it crashed its worker on {len(crashes)} other problems and succeeded on none: {last}"


class RetryQueue:
    """The jobs that are not sent to the worker, in order, and the decisions after a crash.

    The candidate in flight is blamed and tried again alone. If it crashes alone, it is quarantined: its trial has the
    status `died` or `timeout`, and it is not run again for this problem. If it succeeds alone, it continues with the
    others; blamed again, it runs its whole job alone. A crash with no candidate in flight blames none: the job is
    repeated, then run one candidate at a time. A candidate that crashed a worker on one problem is tried alone first
    on others, and is excluded after crashes on several problems.
    """

    def __init__(self, events: Events, crashes: CrashHistory) -> None:
        self._events = events
        self._crashes = crashes
        self.jobs: deque[Job] = deque()
        self.early_results: list[JobResult] = []
        """Results without a run, not returned yet."""
        self._suspects: set[tuple[str, str]] = set()
        self._broken: set[str] = set()
        """Ids of problems with a crash while several candidates ran."""
        self._setup_losses: dict[str, int] = {}
        """Consecutive losses during setup, by problem id."""

    def isolate_suspects(self) -> bool:
        """Apply crashes on other problems to the next job: exclude its candidates, or insert probes of them.

        True if the queue has changed.
        """
        job = self.jobs[0]
        if isinstance(job, ProbeJob):
            return False
        excluded = {c: why for c in job.candidates if (why := self._crashes.exclusion_reason(c))}
        if excluded:
            trials = tuple(job.failed_trial(c, Status.DIED, why) for c, why in excluded.items())
            self.early_results.append(JobResult(job=job, trials=trials, complete=False))
            self.jobs[0] = job.without(excluded.keys())
            return True
        problem = job.problem.id
        fresh = [c for c in job.candidates if (problem, c.id) not in self._suspects]
        alone = [c for c in fresh if self._crashes.is_suspect(c, problem)]
        self._suspects |= {(problem, c.id) for c in alone}
        self.jobs.extendleft(ProbeJob(stage=job.stage, problem=job.problem, candidate=c) for c in alone)
        return bool(alone)

    def finished(self, job: Job, trials: Sequence[Trial]) -> list[JobResult]:
        """The messages about a job that ended normally."""
        self._setup_losses.pop(job.problem.id, None)
        self._crashes.record_survivors(trials)
        if not isinstance(job, ProbeJob):
            return [JobResult(job=job, trials=tuple(trials))]
        # A probe without a trial clears the suspect; a probe that failed without a crash has a trial.
        for trial in trials:
            self._exclude(job, trial.candidate)
        return [JobResult(job=job, trials=tuple(trials), complete=False)]

    def after_loss(self, job: Job, blamed: int, status: Status, why: str, trials: Sequence[Trial]) -> list[JobResult]:
        """Requeue or fail a job after the loss of its worker; `blamed` is the index of the candidate in flight."""
        done = {t.candidate for t in trials}
        messages = [JobResult(job=job, trials=tuple(trials), complete=False)] if done else []
        suspect = job.candidates[blamed] if 0 <= blamed < len(job.candidates) else None
        rest = job.without(done)
        if suspect in done:
            self._crashes.record(suspect, job.problem.id, why)
        if isinstance(job, ProbeJob):
            if done:
                self._exclude(job, job.candidate)
                return messages
            return self._quarantine(job, job.candidate, status, why) if suspect else self._retry_setup(job, status, why)
        if suspect in done:
            self.jobs.appendleft(rest)
            return messages
        if suspect is None and blamed == SETTING_UP:
            return messages + self._retry_setup(rest, status, why)
        if suspect is None and len(rest.candidates) != 1:
            return messages + self._one_at_a_time(rest, status, why)
        return messages + self._retry_alone(rest, suspect or rest.candidates[0], status, why)

    def _retry_alone(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[JobResult]:
        """Try the blamed candidate alone, then the job again; blamed a second time, it runs the job alone."""
        key = (job.problem.id, candidate.id)
        known, others = key in self._suspects, set(job.candidates) - {candidate}
        self._suspects.add(key)
        if known and not others:
            self.jobs.appendleft(job)
            return self._quarantine(job, candidate, status, why)
        self._events.emit("detail", f"{why}; trying {candidate.backend} {candidate.id} alone")
        if known:
            self.jobs.extendleft([job.without({candidate}), job.without(others)])
        else:
            self.jobs.extendleft([job, ProbeJob(stage=job.stage, problem=job.problem, candidate=candidate)])
        return []

    def _quarantine(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[JobResult]:
        self._events.emit("warning", f"quarantined {candidate.backend} {candidate.id} for {job.problem.id}: {why}")
        self._exclude(job, candidate)
        self._crashes.record(candidate, job.problem.id, why)
        return [JobResult(job=job, trials=(job.failed_trial(candidate, status, why),), complete=False)]

    def _exclude(self, job: Job, candidate: Candidate) -> None:
        """Remove a candidate from the queued jobs of its problem and stage."""
        self.jobs = deque(
            j.without({candidate}) if (j.problem, j.stage) == (job.problem, job.stage) else j for j in self.jobs
        )

    def _retry_setup(self, job: Job, status: Status, why: str) -> list[JobResult]:
        """Repeat a job lost before any candidate ran; after MAX_LOSSES, fail its candidates."""
        losses = self._setup_losses[job.problem.id] = self._setup_losses.get(job.problem.id, 0) + 1
        if losses < MAX_LOSSES:
            self.jobs.appendleft(job)
            return []
        self._events.emit("warning", f"{job.problem.id} cannot be set up: {why}")
        trials = tuple(job.failed_trial(c, status, f"the problem cannot be set up: {why}") for c in job.candidates)
        probe = isinstance(job, ProbeJob)
        for candidate in job.candidates if probe else ():
            self._exclude(job, candidate)
        return [JobResult(job=job, trials=trials, complete=not probe)]

    def _one_at_a_time(self, job: Job, status: Status, why: str) -> list[JobResult]:
        """After a loss while several ran: repeat the whole job once, except after a timeout; then each alone."""
        candidates = set(job.candidates)
        again = status is Status.DIED and job.problem.id not in self._broken
        self._broken.add(job.problem.id)
        jobs = [job] if again else [job.without(candidates - {c}) for c in job.candidates]
        self.jobs.extendleft(reversed(jobs))
        if not again:
            self._events.emit("detail", f"{why} ({status}) with no candidate in flight; trying each alone")
        return []


class WorkerSupervisor:
    """Keeps a worker busy, and replaces it after a crash, a timeout or excessive memory use."""

    def __init__(
        self, config: WorkerConfig, timeout_s: float | None, memory_bytes: int, events: Events, crashes: CrashHistory
    ) -> None:
        self._config = config
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._memory_bytes = memory_bytes
        self._queue = RetryQueue(events, crashes)
        self._sent: deque[Job] = deque()
        """Jobs at the worker: the running one, and the next ones."""
        self._ready = False
        self._failed_starts = 0
        self._restart_at: float | None = None
        """When the next worker starts, after one was killed as it started."""
        self._usage = Usage(name=config.device.torch_name)
        self._started_at = self._accounted = time.monotonic()
        self._memory_checked = self._started_at
        self._process = WorkerProcess(config)
        self._events = events
        self._named_since = 0.0
        """When the last candidate began that was named for running long."""

    # The interface for the pool

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._queue.jobs.append(job)
        self._feed()

    def cancel_pending(self) -> None:
        """Drop the jobs that are not sent."""
        self._queue.jobs.clear()

    @property
    def backlog(self) -> int:
        """Number of unfinished jobs."""
        return len(self._queue.jobs) + len(self._sent)

    def wait_handles(self) -> Sequence[Connection | int]:
        """Handles that are ready when the worker replies or ends."""
        return self._process.wait_handles()

    def messages(self) -> list[JobResult]:
        """Results since the last call; also checks the worker's life, deadline and memory."""
        messages: list[JobResult] = []
        while (reply := self._process.receive()) is not None:
            messages += self._take_reply(reply)
        messages += self._check_health() if self._restart_at is None else self._start_when_due(self._restart_at)
        self._feed()
        while self._queue.jobs and not self._queue.jobs[0].candidates:
            messages.append(JobResult(job=self._queue.jobs.popleft(), trials=()))
            self._feed()
        early, self._queue.early_results = self._queue.early_results, []
        return early + messages

    def usage(self) -> Usage:
        """The time of the worker up to now."""
        now = time.monotonic()
        usage = replace(self._usage, wall_s=now - self._started_at, busy_s=dict(self._usage.busy_s))
        rest = (self._accounted, now)
        if self._ready and not self._sent:
            return replace(usage, idle=[*usage.idle, rest])
        usage.add({"unfinished" if self._ready else "start": rest[1] - rest[0]})
        return usage

    def close(self, *, kill: bool) -> None:
        """End the worker; it is killed if it has a job, or with `kill`."""
        if not kill and not self._sent:
            with contextlib.suppress(OSError):
                self._process.send(None)
                self._process.stop(grace_s=5)
        self._process.stop()

    # The worker

    def _feed(self) -> None:
        """Send the next jobs. None follows a probe, since its result determines the next job."""
        while self._ready and len(self._sent) < QUEUE_DEPTH and self._queue.jobs and self._queue.jobs[0].candidates:
            if self._sent and isinstance(self._sent[-1], ProbeJob):
                return
            if self._queue.isolate_suspects():
                continue
            if not self._sent:
                self._process.in_flight.begin(SETTING_UP)
            job = self._queue.jobs.popleft()
            self._sent.append(job)
            # If it has died since the last check, the next check notices, and its replacement gets the job.
            with contextlib.suppress(OSError):
                self._process.send(job)

    def _take_reply(self, reply: WorkerReply) -> list[JobResult]:
        if reply.failure:
            return self._replace_worker(Status.DIED, reply.failure, reply)
        self._account(reply)
        if not self._ready:
            self._ready = True
            self._failed_starts = 0
            self._usage.ready_at = self._usage.ready_at or time.monotonic()
            return []
        first_launch_s = reply.spent_s.get(FIRST_LAUNCH, 0.0)
        results = self._queue.finished(self._sent.popleft(), reply.trials)
        return [replace(result, first_launch_s=first_launch_s) for result in results]

    def _account(self, reply: WorkerReply) -> None:
        if self._ready:
            self._usage.add(reply.spent_s)
            self._usage.idle.append(reply.idle_interval)
        else:
            self._usage.add({"start": reply.ended - self._accounted})
        self._accounted = reply.ended or time.monotonic()

    def _lose_time(self) -> None:
        """Account the time since the last reply of a lost worker."""
        now = time.monotonic()
        self._usage.add({"lost": now - self._accounted})
        self._accounted = now

    # Failures

    def _check_health(self) -> list[JobResult]:
        if not self._process.alive:
            return self._replace_worker(Status.DIED, self._process.exit_reason())
        position, since = self._process.in_flight.position, self._process.in_flight.since
        waited = time.monotonic() - since
        limit = self._timeout_s if position >= 0 else self._timeout_s * _SETUP_FACTOR
        # A start has a time limit even if candidates have none.
        start = max(limit, _MIN_START_S) if math.isfinite(limit) else _SETUP_FACTOR * _MIN_START_S
        if not self._ready and waited > start:
            return self._replace_worker(Status.TIMEOUT, f"the worker did not start within {start:g} s")
        if self._sent and waited > limit:
            return self._replace_worker(Status.TIMEOUT, f"no result after executor.timeout_s={self._timeout_s:g}")
        if waited >= _LONG_S:
            self._name_long_candidate(position, since)
        now = time.monotonic()
        if now - self._memory_checked > _MEMORY_CHECK_S:
            self._memory_checked = now
            if self._process.resident_bytes() > self._memory_bytes:
                return self._replace_worker(Status.DIED, "out of host memory: stopped by executor.memory_pct")
        return []

    def _name_long_candidate(self, position: int, since: float) -> None:
        """Say once which candidate takes so long, as the progress of the run stands still meanwhile."""
        if since == self._named_since or not self._sent:
            return
        self._named_since, job = since, self._sent[0]
        if 0 <= position < len(job.candidates):
            limit = "" if math.isinf(self._timeout_s) else f" (limit: executor.timeout_s={self._timeout_s:g})"
            label = f"{job.candidates[position].backend} for {job.problem.id}"
            why = "some libraries compile when they are first called"
            self._events.emit("line", f"{label}: no result after {_LONG_S:g} s{limit}; {why}")

    def _replace_worker(self, status: Status, why: str, reply: WorkerReply | None = None) -> list[JobResult]:
        """Replace a lost worker, and decide about its running job."""
        self._process.kill()
        messages: list[JobResult] = []
        while (last := self._process.receive()) is not None:  # replies sent before its end
            if last.failure:
                status, why, reply = Status.DIED, last.failure, last
            else:
                messages += self._take_reply(last)
        if reply is not None and reply.ended:
            self._account(reply)
        self._lose_time()
        blamed = self._process.in_flight.position
        job = self._sent.popleft() if self._sent else None
        self._queue.jobs.extendleft(reversed(self._sent))
        self._sent.clear()
        self._restart(why, status, explained=reply is not None)
        trials = reply.trials if reply is not None else ()
        return messages if job is None else messages + self._queue.after_loss(job, blamed, status, why, trials)

    def _restart(self, why: str, status: Status, *, explained: bool) -> None:
        """Start a new worker, at once or after a pause; `explained`: the last one reported why it cannot start.

        A worker that was killed as it started may start the next time; one that reported an error will report it again.
        """
        self._process.stop()
        self._failed_starts = 0 if self._ready else self._failed_starts + 1
        silent = status is Status.DIED and not explained
        if self._failed_starts > (len(RETRY_PAUSES_S) if silent else MAX_LOSSES - 1):
            times = f", {self._failed_starts} times in a row" if silent else ""
            raise EnvironmentProblem(f"{self._config.device.torch_name}: the worker cannot start: {why}{times}")
        self._ready = False
        if silent and self._failed_starts > 1:
            self._restart_at = time.monotonic() + RETRY_PAUSES_S[self._failed_starts - 1]
        else:
            self._process.start()

    def _start_when_due(self, due: float) -> list[JobResult]:
        if time.monotonic() >= due:
            self._restart_at = None
            self._process.start()
        return []
