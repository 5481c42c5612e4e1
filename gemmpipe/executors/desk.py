"""One worker: what it is given, what it says, where its time goes, and when it is replaced."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from gemmpipe.data import Status
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events
from gemmpipe.executors import Finished, Usage
from gemmpipe.executors.docket import LOSSES, Docket
from gemmpipe.executors.hand import Hand
from gemmpipe.executors.ledger import Ledger
from gemmpipe.forkserver import PAUSES_S
from gemmpipe.jobs import SETTING_UP, Job, ProbeJob
from gemmpipe.worker import Answer, Post

_AHEAD = 2
_BETWEEN = 10.0  # operands and references of a problem may take so many times a candidate's deadline
_LEAST_START_S = 60.0  # importing torch on a busy machine is slow, whatever a candidate's deadline is
_WEIGH_S = 0.1  # between two looks at a worker's memory


class Desk:
    """Keeps a worker busy, and replaces it when it dies, is late or takes too much memory."""

    def __init__(self, post: Post, timeout_s: float | None, memory_bytes: int, events: Events, ledger: Ledger) -> None:
        self._post = post
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._memory_bytes = memory_bytes
        self._docket = Docket(events, ledger)
        self._sent: deque[Job] = deque()
        """What the worker has: the job it works on, and the next one so that it need not wait for us."""
        self._ready = False
        self._stillborn = 0
        self._due: float | None = None
        """When the next worker is started, where one was killed as it started."""
        self._usage = Usage(name=post.device.torch_name)
        self._begun = self._accounted = time.monotonic()
        self._weighed = self._begun
        self._hand = Hand(post)

    # What the pool asks for

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._docket.jobs.append(job)
        self._feed()

    def forget_queued(self) -> None:
        """Drop what is not begun."""
        self._docket.jobs.clear()

    @property
    def backlog(self) -> int:
        """Jobs not finished."""
        return len(self._docket.jobs) + len(self._sent)

    def ears(self) -> Sequence[Connection | int]:
        """What to wait on: the worker's voice and its end."""
        return self._hand.ears()

    def messages(self) -> list[Finished]:
        """Take what the worker said; notice its death, its lateness and its appetite."""
        messages: list[Finished] = []
        while (answer := self._hand.answer()) is not None:
            messages += self._heard(answer)
        messages += self._watch() if self._due is None else self._start_when_due(self._due)
        self._feed()
        while self._docket.jobs and not self._docket.jobs[0].candidates:
            messages.append(Finished(job=self._docket.jobs.popleft(), trials=()))
            self._feed()
        unheard, self._docket.unheard = self._docket.unheard, []
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
        while self._ready and len(self._sent) < _AHEAD and self._docket.jobs and self._docket.jobs[0].candidates:
            if self._sent and isinstance(self._sent[-1], ProbeJob):
                return
            if self._docket.set_apart():
                continue
            if not self._sent:
                self._hand.flight.begin(SETTING_UP)
            job = self._docket.jobs.popleft()
            self._sent.append(job)
            # Should it have died since we last looked, the next look finds out and its successor gets the job.
            with contextlib.suppress(OSError):
                self._hand.send(job)

    def _heard(self, answer: Answer) -> list[Finished]:
        if answer.lost:
            return self._lost(Status.DIED, answer.lost, answer)
        self._account(answer)
        if not self._ready:
            self._ready = True
            self._stillborn = 0
            self._usage.ready_at = self._usage.ready_at or time.monotonic()
            return []
        return self._docket.finished(self._sent.popleft(), answer.trials)

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
        # Starting a process ends some time, also where a candidate may take for ever.
        start = max(limit, _LEAST_START_S) if math.isfinite(limit) else _BETWEEN * _LEAST_START_S
        if not self._ready and waited > start:
            return self._lost(Status.TIMEOUT, f"the worker did not start within {start:g} s")
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
        self._docket.jobs.extendleft(reversed(self._sent))
        self._sent.clear()
        self._restart(why, status, told=answer is not None)
        trials = answer.trials if answer is not None else ()
        return messages if job is None else messages + self._docket.after_loss(job, blamed, status, why, trials)

    def _restart(self, why: str, status: Status, *, told: bool) -> None:
        """A new worker, at once or after a pause; `told`: the last one itself said why it cannot start.

        What was killed as it started may live the next time, what says why will say it again.
        """
        self._hand.stop()
        self._stillborn = 0 if self._ready else self._stillborn + 1
        silent = status is Status.DIED and not told
        if self._stillborn > (len(PAUSES_S) if silent else LOSSES - 1):
            times = f", {self._stillborn} times in a row" if silent else ""
            raise EnvironmentProblem(f"{self._post.device.torch_name}: the worker cannot start: {why}{times}")
        self._ready = False
        if silent and self._stillborn > 1:
            self._due = time.monotonic() + PAUSES_S[self._stillborn - 1]
        else:
            self._hand.start()

    def _start_when_due(self, due: float) -> list[Finished]:
        if time.monotonic() >= due:
            self._due = None
            self._hand.start()
        return []
