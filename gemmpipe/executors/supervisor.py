"""One worker: what it is given, what it says, where its time goes, and when it is replaced.

The process that works at a desk: started, spoken to, listened to, and ended.

Which candidates ended workers on which problems: what one desk learnt, no other has to learn again.

What waits for a worker, and who among it is blamed when one dies: tried alone, quarantined, or done again.
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
from gemmpipe.bench.jobs import SETTING_UP, InFlight, Job, ProbeJob
from gemmpipe.bench.worker import WorkerConfig, WorkerReply
from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Events
from gemmpipe.executors import JobResult, Usage

_END_S = 30.0  # a killed process is gone long before, unless it hangs in a driver


class WorkerProcess:
    """One worker process after another; `start` begins a new one when the last is stopped."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._context = forkserver()
        self._cells = self._context.RawArray("d", [SETTING_UP, time.monotonic()])
        self.in_flight = InFlight(self._cells)
        """In memory that outlives every one of them."""
        self.start()

    def start(self) -> None:
        """Begin a new process. Raises EnvironmentProblem where none can be started."""
        pipe, theirs = self._context.Pipe()
        self.in_flight.begin(SETTING_UP)
        with theirs:
            self._process = ForkedProcess(worker.main, (self._config, theirs, self._cells))
        self._pipe = pipe

    def send(self, job: Job | None) -> None:
        """Give it a job, or None to end it. Raises OSError when it is gone."""
        self._pipe.send(job)

    def receive(self) -> WorkerReply | None:
        """What it said next, if anything; a broken pipe says nothing."""
        try:
            return self._pipe.recv() if not self._pipe.closed and self._pipe.poll() else None
        except (EOFError, OSError):
            return None

    def wait_handles(self) -> Sequence[Connection | int]:
        """What to wait on: its voice and its end."""
        return () if self._pipe.closed else (self._pipe, self._process.sentinel)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.alive

    def exit_reason(self) -> str:
        """How it ended, in words."""
        self._process.join(timeout_s=5)
        code = self._process.exitcode
        if code == EXIT_UNKNOWN:
            return "the worker died: the process that knows how was killed"
        return f"the worker died: {'signal ' + str(-code) if code is not None and code < 0 else f'exit code {code}'}"

    def resident_bytes(self) -> int:
        """Memory that it holds (Linux; 0 elsewhere)."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End it at once; what it has said can still be heard. Raises EnvironmentProblem when it cannot be ended."""
        self._process.kill()
        self._process.join(timeout_s=_END_S)
        if self._process.alive:
            raise EnvironmentProblem(f"{self._config.device.torch_name}: the worker cannot be killed: the driver hangs")

    def stop(self, *, patience_s: float = 0.0) -> None:
        """Wait so long for its end, then kill it; nothing is heard afterwards."""
        if not self._pipe.closed:
            self._process.join(timeout_s=patience_s)
            self.kill()
            self._pipe.close()
            self._process.close()


_MAX_CRASHES = 3  # on so many problems it ended its worker, and on none it lived: it is not run on others


@dataclass(kw_only=True)
class CrashHistory:
    """Shared by the desks of a run."""

    _ended: dict[str, dict[str, str]] = field(default_factory=dict)
    """By candidate id: problem id -> how its worker ended."""
    _lived: set[str] = field(default_factory=set)

    def record(self, candidate: Candidate, problem: str, why: str) -> None:
        """The candidate ended its worker on this problem, alone."""
        self._ended.setdefault(candidate.id, {})[problem] = why

    def record_survivors(self, trials: Iterable[Trial]) -> None:
        """Remember who lives."""
        self._lived.update(t.candidate.id for t in trials if t.status in (Status.OK, Status.PRUNED))

    def is_suspect(self, candidate: Candidate, problem: str) -> bool:
        """Whether it ended a worker on another problem: here it goes alone first."""
        return any(other != problem for other in self._ended.get(candidate.id, ()))

    def exclusion_reason(self, candidate: Candidate) -> str:
        """Why the candidate is not run any more, or nothing."""
        ended = self._ended.get(candidate.id, {})
        if len(ended) < _MAX_CRASHES or candidate.id in self._lived:
            return ""
        return f"not run: it ended its worker on {len(ended)} other problems and lived on none: {[*ended.values()][-1]}"


MAX_LOSSES = 3
"""So many in a row before anything is launched: the environment or the problem is at fault."""


class RetryQueue:
    """The jobs that a worker has not been given, in order.

    The candidate in the air is blamed and tried once more alone. One that dies alone is quarantined: its trial says
    `died` or `timeout` and it is not run again for this problem. One that lives alone goes on with the others; blamed
    again, it does its whole job alone. A death with nobody in the air blames no one: the job is done again, then one
    candidate at a time. What ended a worker on one problem goes alone first on the next, and not at all in the end.
    """

    def __init__(self, events: Events, crashes: CrashHistory) -> None:
        self._events = events
        self._crashes = crashes
        self.jobs: deque[Job] = deque()
        self.early_results: list[JobResult] = []
        """Verdicts that needed no worker, not told yet."""
        self._suspects: set[tuple[str, str]] = set()
        self._broken: set[str] = set()
        """Problems whose jobs ended a worker with several candidates running."""
        self._setup_losses: dict[str, int] = {}
        """By problem: losses in a row while it was set up."""

    def isolate_suspects(self) -> bool:
        """What other problems taught about the candidates of the next job: leave out, or try alone first."""
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
        """What a job that came to its end says."""
        self._setup_losses.pop(job.problem.id, None)
        self._crashes.record_survivors(trials)
        if not isinstance(job, ProbeJob):
            return [JobResult(job=job, trials=tuple(trials))]
        # A probe that lived clears the suspect; one that failed in its own process has its trial.
        for trial in trials:
            self._exclude(job, trial.candidate)
        return [JobResult(job=job, trials=tuple(trials), complete=False)]

    def after_loss(self, job: Job, blamed: int, status: Status, why: str, trials: Sequence[Trial]) -> list[JobResult]:
        """What is to be done about a job whose worker is gone; `blamed` is the place of its candidate in the air."""
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
        """Try the blamed one alone, then the job again; who lived alone and is blamed again does the job alone."""
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
        """Take a candidate out of what is queued for its problem."""
        self.jobs = deque(
            j.without({candidate}) if (j.problem, j.stage) == (job.problem, job.stage) else j for j in self.jobs
        )

    def _retry_setup(self, job: Job, status: Status, why: str) -> list[JobResult]:
        """Lost before any candidate ran: once more, unless the problem itself cannot be set up."""
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
        """Lost while several ran: the whole job once more, unless that takes a deadline; then each alone."""
        everyone = set(job.candidates)
        again = status is Status.DIED and job.problem.id not in self._broken
        self._broken.add(job.problem.id)
        jobs = [job] if again else [job.without(everyone - {c}) for c in job.candidates]
        self.jobs.extendleft(reversed(jobs))
        if not again:
            self._events.emit("detail", f"{why} ({status}) with no candidate in the air; trying each alone")
        return []


_QUEUE_DEPTH = 2
_SETUP_FACTOR = 10.0  # operands and references of a problem may take so many times a candidate's deadline
_MIN_START_S = 60.0  # importing torch on a busy machine is slow, whatever a candidate's deadline is
_MEMORY_CHECK_S = 0.1  # between two looks at a worker's memory


class WorkerSupervisor:
    """Keeps a worker busy, and replaces it when it dies, is late or takes too much memory."""

    def __init__(
        self, config: WorkerConfig, timeout_s: float | None, memory_bytes: int, events: Events, crashes: CrashHistory
    ) -> None:
        self._config = config
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._memory_bytes = memory_bytes
        self._queue = RetryQueue(events, crashes)
        self._sent: deque[Job] = deque()
        """What the worker has: the job it works on, and the next one so that it need not wait for us."""
        self._ready = False
        self._failed_starts = 0
        self._restart_at: float | None = None
        """When the next worker is started, where one was killed as it started."""
        self._usage = Usage(name=config.device.torch_name)
        self._started_at = self._accounted = time.monotonic()
        self._memory_checked = self._started_at
        self._process = WorkerProcess(config)

    # What the pool asks for

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._queue.jobs.append(job)
        self._feed()

    def cancel_pending(self) -> None:
        """Drop what is not begun."""
        self._queue.jobs.clear()

    @property
    def backlog(self) -> int:
        """Jobs not finished."""
        return len(self._queue.jobs) + len(self._sent)

    def wait_handles(self) -> Sequence[Connection | int]:
        """What to wait on: the worker's voice and its end."""
        return self._process.wait_handles()

    def messages(self) -> list[JobResult]:
        """Take what the worker said; notice its death, its lateness and its appetite."""
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
        """Where the worker's time went."""
        now = time.monotonic()
        usage = replace(self._usage, wall_s=now - self._started_at, busy_s=dict(self._usage.busy_s))
        rest = (self._accounted, now)
        if self._ready and not self._sent:
            return replace(usage, idle=[*usage.idle, rest])
        usage.add({"unfinished" if self._ready else "start": rest[1] - rest[0]})
        return usage

    def close(self, *, kill: bool) -> None:
        """End the worker."""
        if not kill and not self._sent:
            with contextlib.suppress(OSError):
                self._process.send(None)
                self._process.stop(patience_s=5)
        self._process.stop()

    # The worker

    def _feed(self) -> None:
        """Send what is next. Nothing follows a probe: what it finds decides what the next job is."""
        while self._ready and len(self._sent) < _QUEUE_DEPTH and self._queue.jobs and self._queue.jobs[0].candidates:
            if self._sent and isinstance(self._sent[-1], ProbeJob):
                return
            if self._queue.isolate_suspects():
                continue
            if not self._sent:
                self._process.in_flight.begin(SETTING_UP)
            job = self._queue.jobs.popleft()
            self._sent.append(job)
            # Should it have died since we last looked, the next look finds out and its successor gets the job.
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
        return self._queue.finished(self._sent.popleft(), reply.trials)

    def _account(self, reply: WorkerReply) -> None:
        if self._ready:
            self._usage.add(reply.spent_s)
            self._usage.idle.append(reply.idle_interval)
        else:
            self._usage.add({"start": reply.ended - self._accounted})
        self._accounted = reply.ended or time.monotonic()

    def _lose_time(self) -> None:
        """What a worker that is gone did since its last answer."""
        now = time.monotonic()
        self._usage.add({"lost": now - self._accounted})
        self._accounted = now

    # When it goes wrong

    def _check_health(self) -> list[JobResult]:
        if not self._process.alive:
            return self._replace_worker(Status.DIED, self._process.exit_reason())
        waited = time.monotonic() - self._process.in_flight.since
        limit = self._timeout_s if self._process.in_flight.position >= 0 else self._timeout_s * _SETUP_FACTOR
        # Starting a process ends some time, also where a candidate may take for ever.
        start = max(limit, _MIN_START_S) if math.isfinite(limit) else _SETUP_FACTOR * _MIN_START_S
        if not self._ready and waited > start:
            return self._replace_worker(Status.TIMEOUT, f"the worker did not start within {start:g} s")
        if self._sent and waited > limit:
            return self._replace_worker(Status.TIMEOUT, f"no result after executor.timeout_s={self._timeout_s:g}")
        now = time.monotonic()
        if now - self._memory_checked > _MEMORY_CHECK_S:
            self._memory_checked = now
            if self._process.resident_bytes() > self._memory_bytes:
                return self._replace_worker(Status.DIED, "out of host memory: stopped by executor.memory_pct")
        return []

    def _replace_worker(self, status: Status, why: str, reply: WorkerReply | None = None) -> list[JobResult]:
        """The worker is gone: replace it, and decide about the job in hand."""
        self._process.kill()
        messages: list[JobResult] = []
        while (last := self._process.receive()) is not None:  # its last words
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
        """A new worker, at once or after a pause; `told`: the last one itself said why it cannot start.

        What was killed as it started may live the next time, what says why will say it again.
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
