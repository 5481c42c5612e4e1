"""One worker of a run on a Ray cluster: what it was given, and what of that has no answer yet."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gemmpipe.data import Candidate
from gemmpipe.executors import Finished, Usage
from gemmpipe.jobs import Job


@dataclass(kw_only=True)
class Place:
    """One worker of the run, whichever node holds its seat at the moment."""

    name: str
    seat: Any = None
    address: str = ""
    """Of the node that holds it; unknown, and no work is sent, until the seat has said where it is."""
    asked: Any = None
    """The exchange that is on its way, or the question where it is: a reference of Ray's."""
    outbox: deque[Job] = field(default_factory=deque)
    in_hand: list[tuple[Job, set[Candidate]]] = field(default_factory=list)
    """Jobs sent, each with its candidates that have no trial yet."""
    backlog: int = 0
    forget: bool = False
    losses: int = 0
    lost_at: float | None = None
    """Since when it waits for a new seat."""
    stand_in: "Place | None" = None
    usage: Usage = field(default_factory=lambda: Usage(name=""))

    def cross_out(self, message: Finished) -> None:
        """Note what a message answers."""
        answered = {trial.candidate for trial in message.trials}
        if message.complete:
            answered |= set(message.job.candidates)
        same = (message.job.stage, message.job.problem.id)
        for job, open_ in self.in_hand:
            if (job.stage, job.problem.id) == same:
                open_ -= answered
        self.in_hand = [(job, open_) for job, open_ in self.in_hand if open_]

    def unfinished(self) -> list[Job]:
        """What is left of the jobs in hand, which are in hand no longer."""
        left = [job.without(set(job.candidates) - open_) for job, open_ in self.in_hand]
        self.in_hand, self.backlog = [], 0
        return left
