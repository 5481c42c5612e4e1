"""What waits for a worker, and who among it is blamed when one dies: tried alone, quarantined, or done again."""

from collections import deque
from collections.abc import Sequence

from gemmpipe.data import Candidate, Status, Trial
from gemmpipe.events import Events
from gemmpipe.executors import Finished
from gemmpipe.executors.ledger import Ledger
from gemmpipe.jobs import SETTING_UP, Job, ProbeJob

LOSSES = 3
"""So many in a row before anything is launched: the environment or the problem is at fault."""


class Docket:
    """The jobs that a worker has not been given, in order.

    The candidate in the air is blamed and tried once more alone. One that dies alone is quarantined: its trial says
    `died` or `timeout` and it is not run again for this problem. One that lives alone goes on with the others; blamed
    again, it does its whole job alone. A death with nobody in the air blames no one: the job is done again, then one
    candidate at a time. What ended a worker on one problem goes alone first on the next, and not at all in the end.
    """

    def __init__(self, events: Events, ledger: Ledger) -> None:
        self._events = events
        self._ledger = ledger
        self.jobs: deque[Job] = deque()
        self.unheard: list[Finished] = []
        """Verdicts that needed no worker, not told yet."""
        self._suspects: set[tuple[str, str]] = set()
        self._broken: set[str] = set()
        """Problems whose jobs ended a worker with several candidates running."""
        self._setup_losses: dict[str, int] = {}
        """By problem: losses in a row while it was set up."""

    def set_apart(self) -> bool:
        """What other problems taught about the candidates of the next job: leave out, or try alone first."""
        job = self.jobs[0]
        if isinstance(job, ProbeJob):
            return False
        verdicts = {c: why for c in job.candidates if (why := self._ledger.verdict(c))}
        if verdicts:
            trials = tuple(job.failed(c, Status.DIED, why) for c, why in verdicts.items())
            self.unheard.append(Finished(job=job, trials=trials, complete=False))
            self.jobs[0] = job.without(verdicts.keys())
            return True
        problem = job.problem.id
        fresh = [c for c in job.candidates if (problem, c.id) not in self._suspects]
        alone = [c for c in fresh if self._ledger.suspects(c, problem)]
        self._suspects |= {(problem, c.id) for c in alone}
        self.jobs.extendleft(ProbeJob(stage=job.stage, problem=job.problem, candidate=c) for c in alone)
        return bool(alone)

    def finished(self, job: Job, trials: Sequence[Trial]) -> list[Finished]:
        """What a job that came to its end says."""
        self._setup_losses.pop(job.problem.id, None)
        self._ledger.hear(trials)
        if not isinstance(job, ProbeJob):
            return [Finished(job=job, trials=tuple(trials))]
        # A probe that lived clears the suspect; one that failed in its own process has its trial.
        for trial in trials:
            self._exclude(job, trial.candidate)
        return [Finished(job=job, trials=tuple(trials), complete=False)]

    def after_loss(self, job: Job, blamed: int, status: Status, why: str, trials: Sequence[Trial]) -> list[Finished]:
        """What is to be done about a job whose worker is gone; `blamed` is the place of its candidate in the air."""
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
            self.jobs.appendleft(rest)
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
            self.jobs.appendleft(job)
            return self._quarantine(job, candidate, status, why)
        self._events.emit("detail", f"{why}; trying {candidate.backend} {candidate.id} alone")
        if known:
            self.jobs.extendleft([job.without({candidate}), job.without(others)])
        else:
            self.jobs.extendleft([job, ProbeJob(stage=job.stage, problem=job.problem, candidate=candidate)])
        return []

    def _quarantine(self, job: Job, candidate: Candidate, status: Status, why: str) -> list[Finished]:
        self._events.emit("warning", f"quarantined {candidate.backend} {candidate.id} for {job.problem.id}: {why}")
        self._exclude(job, candidate)
        self._ledger.enter(candidate, job.problem.id, why)
        return [Finished(job=job, trials=(job.failed(candidate, status, why),), complete=False)]

    def _exclude(self, job: Job, candidate: Candidate) -> None:
        """Take a candidate out of what is queued for its problem."""
        self.jobs = deque(
            j.without({candidate}) if (j.problem, j.stage) == (job.problem, job.stage) else j for j in self.jobs
        )

    def _again(self, job: Job, status: Status, why: str) -> list[Finished]:
        """Lost before any candidate ran: once more, unless the problem itself cannot be set up."""
        losses = self._setup_losses[job.problem.id] = self._setup_losses.get(job.problem.id, 0) + 1
        if losses < LOSSES:
            self.jobs.appendleft(job)
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
        self.jobs.extendleft(reversed(jobs))
        if not again:
            self._events.emit("detail", f"{why} ({status}) with no candidate in the air; trying each alone")
        return []
