"""One worker and its queue: who is blamed when it dies, and what is done again."""

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from gemmpipe import worker
from gemmpipe.data import Candidate, Status, Trial
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events
from gemmpipe.executors import Finished, Usage
from gemmpipe.jobs import Flight, Job, ProbeJob
from gemmpipe.worker import Answer, Post

_AHEAD = 2
_BETWEEN = 10.0  # operands and references of a problem may take so many times a candidate's deadline
_LOSSES = 3  # so many workers that die before they are ready: the environment is at fault


class Desk:
    """Keeps a worker busy and replaces it when it dies.

    The candidate in the air is blamed and tried once more alone; if that ends a worker too it is quarantined: its
    trial says `died` or `timeout` and it is not run again for this problem. A death with nobody in the air blames
    no one: the job is done again, one candidate at a time.
    """

    def __init__(self, post: Post, timeout_s: float, memory_bytes: int, events: Events) -> None:
        self._post = post
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._events = events
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["gemmpipe.worker"])
        self._cells = self._context.RawArray("d", [-1.0, time.monotonic()])
        self._flight = Flight(self._cells)
        self._queue: deque[Job] = deque()
        self._sent: deque[Job] = deque()
        """What the worker has: the job it works on, and the next one so that it need not wait for us."""
        self._suspects: set[tuple[str, str]] = set()
        self._losses: dict[str, int] = {}
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._ready = False
        self._stillborn = 0
        self._usage = Usage(name=post.device.torch_name)
        self._begun = time.monotonic()
        self._start()

    # What the pool asks for

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._queue.append(job)
        self._feed()

    def forget_queued(self) -> None:
        """Drop what is not begun."""
        self._queue.clear()

    @property
    def backlog(self) -> int:
        """Jobs not finished."""
        return len(self._queue) + len(self._sent)

    def ears(self) -> Iterable[Connection | int]:
        """What to wait on: the worker's voice and its end."""
        if self._pipe is not None and self._process is not None:
            return [self._pipe, self._process.sentinel]
        return []

    def messages(self) -> list[Finished]:
        """Take what the worker said; notice its death, its lateness and its appetite."""
        messages: list[Finished] = []
        answer = self._answer()
        while answer is not None:
            messages += self._heard(answer)
            answer = self._answer()
        messages += self._watch()
        while self._queue and not self._queue[0].candidates:
            messages.append(Finished(job=self._queue.popleft(), trials=()))
        self._feed()
        return messages

    def usage(self) -> Usage:
        """Where the worker's time went."""
        self._usage.wall_s = time.monotonic() - self._begun
        return self._usage

    def close(self, *, kill: bool) -> None:
        """End the worker."""
        if self._process is None or self._pipe is None:
            return
        if not kill and not self._sent:
            try:
                self._pipe.send(None)
            except OSError:
                kill = True
        self._process.join(timeout=0 if kill else 5)
        self._stop()

    # The worker

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        self._ready = False
        self._flight.begin(-1)
        self._process = self._context.Process(target=worker.main, args=(self._post, theirs, self._cells), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours

    def _stop(self) -> None:
        if self._process is not None:
            if self._process.is_alive():
                self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _feed(self) -> None:
        while self._queue and self._pipe is not None and self._ready and len(self._sent) < _AHEAD:
            if not self._sent:
                self._flight.begin(-1)
            job = self._queue.popleft()
            self._sent.append(job)
            # Should it have died since we last looked, the next look finds out and its successor gets the job.
            with contextlib.suppress(OSError):
                self._pipe.send(job)

    def _answer(self) -> Answer | None:
        """What the worker said next, if anything; a broken pipe says nothing."""
        try:
            return self._pipe.recv() if self._pipe is not None and self._pipe.poll() else None
        except (EOFError, OSError):
            return None

    def _heard(self, answer: Answer) -> list[Finished]:
        self._usage.add(answer.spent_s)
        self._usage.idle.append(answer.waited)
        if not self._ready:
            self._ready = True
            return []
        if answer.lost:
            return self._lost(Status.DIED, answer.lost, answer.trials)
        job = self._sent.popleft()
        if isinstance(job, ProbeJob):
            # A probe that lived clears the suspect; one that failed in its own process has its trial.
            for trial in answer.trials:
                self._exclude(job, trial.candidate)
            return [Finished(job=job, trials=tuple(answer.trials), complete=False)]
        return [Finished(job=job, trials=tuple(answer.trials))]

    # When it goes wrong

    def _watch(self) -> list[Finished]:
        if self._process is None:
            return []
        if not self._process.is_alive():
            return self._lost(Status.DIED, self._cause_of_death())
        waited = time.monotonic() - self._flight.since
        limit = self._timeout_s if self._flight.position >= 0 else self._timeout_s * _BETWEEN
        if (self._sent or not self._ready) and waited > limit:
            return self._lost(Status.TIMEOUT, f"no result after executor.timeout_s={self._timeout_s:g}")
        if _resident_bytes(self._process.pid) > self._memory_bytes:
            return self._lost(Status.DIED, "out of host memory: stopped by executor.memory_pct")
        return []

    def _cause_of_death(self) -> str:
        assert self._process is not None
        self._process.join(timeout=5)
        code = self._process.exitcode
        return f"the worker died: {'signal ' + str(-code) if code is not None and code < 0 else f'exit code {code}'}"

    def _lost(self, status: Status, why: str, trials: Iterable[Trial] = ()) -> list[Finished]:
        """The worker is gone: replace it, and decide about the job in hand."""
        before = self._last_words()
        blamed = self._flight.position
        self._stop()
        job = self._sent.popleft() if self._sent else None
        self._queue.extendleft(reversed(self._sent))
        self._sent.clear()
        self._restart(why)
        if job is None:
            return before
        return before + self._after_loss(job, blamed, status, why, trials)

    def _last_words(self) -> list[Finished]:
        """Answers of jobs that it finished before it went."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()
        messages: list[Finished] = []
        while (answer := self._answer()) is not None:
            if not answer.lost and self._ready:
                messages += self._heard(answer)
        return messages

    def _after_loss(self, job: Job, blamed: int, status: Status, why: str, trials: Iterable[Trial]) -> list[Finished]:
        done = {t.candidate for t in trials}
        for candidate in done if isinstance(job, ProbeJob) else ():
            self._exclude(job, candidate)
        messages = [Finished(job=job, trials=tuple(trials), complete=False)] if done else []
        rest = job.without(done)
        left = rest.candidates
        if 0 <= blamed < len(job.candidates) and job.candidates[blamed] in done:
            if not isinstance(job, ProbeJob):
                self._queue.appendleft(rest)
            return messages
        suspect = job.candidates[blamed] if 0 <= blamed < len(job.candidates) else None
        if isinstance(job, ProbeJob):
            return messages + self._quarantine(job, job.candidate, status, why)
        if suspect is None and len(left) != 1:
            return messages + self._again(rest, status, why)
        return messages + self._suspect(rest, suspect or left[0], status, why)

    def _restart(self, why: str) -> None:
        self._stillborn = 0 if self._ready else self._stillborn + 1
        if self._stillborn >= _LOSSES:
            raise EnvironmentProblem(f"{self._post.device.torch_name}: the worker cannot start: {why}")
        self._start()

    def _suspect(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[Finished]:
        """Try the blamed one alone, then the job again; a second loss under the same name convicts it."""
        key = (job.problem.id, candidate.id)
        if key in self._suspects:
            self._queue.appendleft(job)
            return self._quarantine(job, candidate, status, why)
        self._suspects.add(key)
        self._events.emit("detail", f"{why}; trying {candidate.backend} {candidate.id} alone")
        self._queue.appendleft(job)
        self._queue.appendleft(ProbeJob(stage=job.stage, problem=job.problem, candidate=candidate))
        return []

    def _quarantine(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[Finished]:
        self._events.emit("warning", f"quarantined {candidate.backend} {candidate.id} for {job.problem.id}: {why}")
        self._exclude(job, candidate)
        return [Finished(job=job, trials=(job.failed(candidate, status, why),), complete=False)]

    def _exclude(self, job: Job, candidate: Candidate) -> None:
        """Take a candidate out of what is queued for its problem."""
        self._queue = deque(
            j.without({candidate}) if (j.problem, j.stage) == (job.problem, job.stage) else j for j in self._queue
        )

    def _again(self, job: Job, status: Status, why: str) -> list[Finished]:
        """Nobody was in the air: the whole job once more, then one candidate at a time."""
        losses = self._losses[job.problem.id] = self._losses.get(job.problem.id, 0) + 1
        everyone = set(job.candidates)
        jobs = [job] if losses == 1 else [job.without(everyone - {c}) for c in job.candidates]
        self._queue.extendleft(reversed(jobs))
        if losses > 1:
            self._events.emit("detail", f"{why} ({status}) with no candidate in the air; trying each alone")
        return []


def _resident_bytes(pid: int | None) -> int:
    """Memory that a process holds (Linux; 0 elsewhere)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096
