"""One worker and its queue: who is blamed when it dies, and what is done again."""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from gemmpipe.data import Candidate, Status, Trial
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events
from gemmpipe.executors import Finished, Usage
from gemmpipe.executors.hand import Hand
from gemmpipe.executors.ledger import Ledger
from gemmpipe.jobs import SETTING_UP, Job, ProbeJob
from gemmpipe.worker import Answer, Post

_AHEAD = 2
_BETWEEN = 10.0  # operands and references of a problem may take so many times a candidate's deadline
_LEAST_START_S = 60.0  # importing torch on a busy machine is slow, whatever a candidate's deadline is
_WEIGH_S = 0.1  # between two looks at a worker's memory
_LOSSES = 3  # so many in a row before anything is launched: the environment or the problem is at fault


class Desk:
    """Keeps a worker busy and replaces it when it dies.

    The candidate in the air is blamed and tried once more alone. One that dies alone is quarantined: its trial says
    `died` or `timeout` and it is not run again for this problem. One that lives alone goes on with the others; blamed
    again, it does its whole job alone. A death with nobody in the air blames no one: the job is done again, then one
    candidate at a time. What ended a worker on one problem goes alone first on the next, and not at all in the end.
    """

    def __init__(self, post: Post, timeout_s: float, memory_bytes: int, events: Events, ledger: Ledger) -> None:
        self._post = post
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._events = events
        self._queue: deque[Job] = deque()
        self._sent: deque[Job] = deque()
        """What the worker has: the job it works on, and the next one so that it need not wait for us."""
        self._suspects: set[tuple[str, str]] = set()
        self._broken: set[str] = set()
        """Problems whose jobs ended a worker with several candidates running."""
        self._setup_losses: dict[str, int] = {}
        """By problem: losses in a row while it was set up."""
        self._ready = False
        self._stillborn = 0
        self._unheard: list[Finished] = []
        self._usage = Usage(name=post.device.torch_name)
        self._begun = self._accounted = time.monotonic()
        self._weighed = self._begun
        self._hand = Hand(post)

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

    def ears(self) -> Sequence[Connection | int]:
        """What to wait on: the worker's voice and its end."""
        return self._hand.ears()

    def messages(self) -> list[Finished]:
        """Take what the worker said; notice its death, its lateness and its appetite."""
        messages: list[Finished] = []
        while (answer := self._hand.answer()) is not None:
            messages += self._heard(answer)
        messages += self._watch()
        self._feed()
        while self._queue and not self._queue[0].candidates:
            messages.append(Finished(job=self._queue.popleft(), trials=()))
            self._feed()
        unheard, self._unheard = self._unheard, []
        return unheard + messages

    def usage(self) -> Usage:
        """Where the worker's time went."""
        now = time.monotonic()
        usage = replace(self._usage, wall_s=now - self._begun, busy_s=dict(self._usage.busy_s))
        rest = (self._accounted, now)
        if self._ready and not self._sent:
            return replace(usage, idle=[*usage.idle, rest])
        usage.add({"unfinished" if self._ready else "start": rest[1] - rest[0]})
        return usage

    def close(self, *, kill: bool) -> None:
        """End the worker."""
        if not kill and not self._sent:
            with contextlib.suppress(OSError):
                self._hand.send(None)
                self._hand.stop(patience_s=5)
        self._hand.stop()

    # The worker

    def _feed(self) -> None:
        """Send what is next. Nothing follows a probe: what it finds decides what the next job is."""
        while self._ready and len(self._sent) < _AHEAD and self._queue and self._queue[0].candidates:
            if self._sent and isinstance(self._sent[-1], ProbeJob):
                return
            if self._set_apart(self._queue[0]):
                continue
            if not self._sent:
                self._hand.flight.begin(SETTING_UP)
            job = self._queue.popleft()
            self._sent.append(job)
            # Should it have died since we last looked, the next look finds out and its successor gets the job.
            with contextlib.suppress(OSError):
                self._hand.send(job)

    def _set_apart(self, job: Job) -> bool:
        """What other problems taught about the candidates of the next job: leave out, or try alone first."""
        if isinstance(job, ProbeJob):
            return False
        verdicts = {c: why for c in job.candidates if (why := self._ledger.verdict(c))}
        if verdicts:
            trials = tuple(job.failed(c, Status.DIED, why) for c, why in verdicts.items())
            self._unheard.append(Finished(job=job, trials=trials, complete=False))
            self._queue[0] = job.without(verdicts.keys())
            return True
        problem = job.problem.id
        fresh = [c for c in job.candidates if (problem, c.id) not in self._suspects]
        alone = [c for c in fresh if self._ledger.suspects(c, problem)]
        self._suspects |= {(problem, c.id) for c in alone}
        self._queue.extendleft(ProbeJob(stage=job.stage, problem=job.problem, candidate=c) for c in alone)
        return bool(alone)

    def _heard(self, answer: Answer) -> list[Finished]:
        if answer.lost:
            return self._lost(Status.DIED, answer.lost, answer)
        self._account(answer)
        if not self._ready:
            self._ready = True
            self._stillborn = 0
            self._usage.ready_at = self._usage.ready_at or time.monotonic()
            return []
        job = self._sent.popleft()
        self._setup_losses.pop(job.problem.id, None)
        self._ledger.hear(answer.trials)
        if not isinstance(job, ProbeJob):
            return [Finished(job=job, trials=tuple(answer.trials))]
        # A probe that lived clears the suspect; one that failed in its own process has its trial.
        for trial in answer.trials:
            self._exclude(job, trial.candidate)
        return [Finished(job=job, trials=tuple(answer.trials), complete=False)]

    def _account(self, answer: Answer) -> None:
        if self._ready:
            self._usage.add(answer.spent_s)
            self._usage.idle.append(answer.waited)
        else:
            self._usage.add({"start": answer.ended - self._accounted})
        self._accounted = answer.ended or time.monotonic()

    def _lose_time(self) -> None:
        """What a worker that is gone did since its last answer."""
        now = time.monotonic()
        self._usage.add({"lost": now - self._accounted})
        self._accounted = now

    # When it goes wrong

    def _watch(self) -> list[Finished]:
        if not self._hand.alive:
            return self._lost(Status.DIED, self._hand.cause_of_death())
        waited = time.monotonic() - self._hand.flight.since
        limit = self._timeout_s if self._hand.flight.position >= 0 else self._timeout_s * _BETWEEN
        if not self._ready and waited > max(limit, _LEAST_START_S):
            return self._lost(Status.TIMEOUT, f"the worker did not start within {max(limit, _LEAST_START_S):g} s")
        if self._sent and waited > limit:
            return self._lost(Status.TIMEOUT, f"no result after executor.timeout_s={self._timeout_s:g}")
        now = time.monotonic()
        if now - self._weighed > _WEIGH_S:
            self._weighed = now
            if self._hand.resident_bytes() > self._memory_bytes:
                return self._lost(Status.DIED, "out of host memory: stopped by executor.memory_pct")
        return []

    def _lost(self, status: Status, why: str, answer: Answer | None = None) -> list[Finished]:
        """The worker is gone: replace it, and decide about the job in hand."""
        self._hand.kill()
        messages: list[Finished] = []
        while (last := self._hand.answer()) is not None:  # its last words
            if last.lost:
                status, why, answer = Status.DIED, last.lost, last
            else:
                messages += self._heard(last)
        if answer is not None and answer.ended:
            self._account(answer)
        self._lose_time()
        blamed = self._hand.flight.position
        job = self._sent.popleft() if self._sent else None
        self._queue.extendleft(reversed(self._sent))
        self._sent.clear()
        self._restart(why)
        trials = answer.trials if answer is not None else ()
        return messages if job is None else messages + self._after_loss(job, blamed, status, why, trials)

    def _restart(self, why: str) -> None:
        self._hand.stop()
        self._stillborn = 0 if self._ready else self._stillborn + 1
        if self._stillborn >= _LOSSES:
            raise EnvironmentProblem(f"{self._post.device.torch_name}: the worker cannot start: {why}")
        self._ready = False
        self._hand.start()

    def _after_loss(self, job: Job, blamed: int, status: Status, why: str, trials: Iterable[Trial]) -> list[Finished]:
        done = {t.candidate for t in trials}
        messages = [Finished(job=job, trials=tuple(trials), complete=False)] if done else []
        suspect = job.candidates[blamed] if 0 <= blamed < len(job.candidates) else None
        rest = job.without(done)
        if suspect in done:
            self._ledger.enter(suspect, job.problem.id, why)
        if isinstance(job, ProbeJob):
            if done:
                self._exclude(job, job.candidate)
                return messages
            return self._quarantine(job, job.candidate, status, why) if suspect else self._again(job, status, why)
        if suspect in done:
            self._queue.appendleft(rest)
            return messages
        if suspect is None and blamed == SETTING_UP:
            return messages + self._again(rest, status, why)
        if suspect is None and len(rest.candidates) != 1:
            return messages + self._one_at_a_time(rest, status, why)
        return messages + self._suspect(rest, suspect or rest.candidates[0], status, why)

    def _suspect(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[Finished]:
        """Try the blamed one alone, then the job again; who lived alone and is blamed again does the job alone."""
        key = (job.problem.id, candidate.id)
        known, others = key in self._suspects, set(job.candidates) - {candidate}
        self._suspects.add(key)
        if known and not others:
            self._queue.appendleft(job)
            return self._quarantine(job, candidate, status, why)
        self._events.emit("detail", f"{why}; trying {candidate.backend} {candidate.id} alone")
        if known:
            self._queue.extendleft([job.without({candidate}), job.without(others)])
        else:
            self._queue.extendleft([job, ProbeJob(stage=job.stage, problem=job.problem, candidate=candidate)])
        return []

    def _quarantine(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[Finished]:
        self._events.emit("warning", f"quarantined {candidate.backend} {candidate.id} for {job.problem.id}: {why}")
        self._exclude(job, candidate)
        self._ledger.enter(candidate, job.problem.id, why)
        return [Finished(job=job, trials=(job.failed(candidate, status, why),), complete=False)]

    def _exclude(self, job: Job, candidate: Candidate) -> None:
        """Take a candidate out of what is queued for its problem."""
        self._queue = deque(
            j.without({candidate}) if (j.problem, j.stage) == (job.problem, job.stage) else j for j in self._queue
        )

    def _again(self, job: Job, status: Status, why: str) -> list[Finished]:
        """Lost before any candidate ran: once more, unless the problem itself cannot be set up."""
        losses = self._setup_losses[job.problem.id] = self._setup_losses.get(job.problem.id, 0) + 1
        if losses < _LOSSES:
            self._queue.appendleft(job)
            return []
        self._events.emit("warning", f"{job.problem.id} cannot be set up: {why}")
        trials = tuple(job.failed(c, status, f"the problem cannot be set up: {why}") for c in job.candidates)
        probe = isinstance(job, ProbeJob)
        for candidate in job.candidates if probe else ():
            self._exclude(job, candidate)
        return [Finished(job=job, trials=trials, complete=not probe)]

    def _one_at_a_time(self, job: Job, status: Status, why: str) -> list[Finished]:
        """Lost while several ran: the whole job once more, unless that takes a deadline; then each alone."""
        everyone = set(job.candidates)
        again = status is Status.DIED and job.problem.id not in self._broken
        self._broken.add(job.problem.id)
        jobs = [job] if again else [job.without(everyone - {c}) for c in job.candidates]
        self._queue.extendleft(reversed(jobs))
        if not again:
            self._events.emit("detail", f"{why} ({status}) with no candidate in the air; trying each alone")
        return []
