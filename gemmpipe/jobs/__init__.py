"""What a worker is asked to do; where the failure of a candidate that runs is caught and becomes a status."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, MutableSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from gemmpipe.conditions import Neighbours
from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.family import Launch
from gemmpipe.stopwatch import Stopwatch
from gemmpipe.timer import Clock
from gemmpipe.workbench import Setup, Workbench

T = TypeVar("T")

Bind = Callable[[int], Launch]
"""Makes a candidate's launch on the operand set of a number."""

SETTING_UP = -1
"""The position in flight while a job makes operands."""
TOGETHER = -2
"""The position in flight while several candidates run."""

LONG_US = 20_000.0  # a first launch this long is its own sample: what it had to load is small beside it


class Poisoned(Exception):
    """The device's context is lost: this process must end; the trials of the job so far stand."""

    def __init__(self, trials: list[Trial]) -> None:
        super().__init__("the device context is lost")
        self.trials = trials


class Flight:
    """Which candidate is in the air, in memory that outlives the worker: [position in the job, since when]."""

    def __init__(self, cells: MutableSequence[float]) -> None:
        self._cells = cells

    def begin(self, position: int) -> None:
        """Candidate `position` of the job is about to run, or SETTING_UP or TOGETHER begins."""
        self._cells[1] = time.monotonic()
        self._cells[0] = position

    @property
    def position(self) -> int:
        """The candidate in the air, or SETTING_UP or TOGETHER."""
        return int(self._cells[0])

    @property
    def since(self) -> float:
        """When it began, on the monotonic clock."""
        return self._cells[1]


@dataclass
class Tools:
    """What a job works with in its worker."""

    bench: Workbench
    clock: Clock
    flight: Flight
    neighbours: Neighbours
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Seconds by what they went into: operands, load, first_launch, screening, checks, finals."""

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds by purpose since they were cleared."""
        return self.watch.spent_s

    def spending(self, on: str) -> AbstractContextManager[None]:
        """Account the time of a block."""
        return self.watch.spending(on)

    def alive(self) -> bool:
        """Whether the device still answers after an error."""
        try:
            self.clock.synchronize()
        except RuntimeError:
            return False
        return True


class Job(ABC):
    """Work on some candidates of one problem."""

    stage: str
    problem: Problem

    @property
    @abstractmethod
    def candidates(self) -> tuple[Candidate, ...]:
        """Who takes part, in the order of `Flight.position`."""

    @abstractmethod
    def without(self, done: Collection[Candidate]) -> "Job":
        """The same work for the others."""

    @abstractmethod
    def run(self, tools: Tools) -> list[Trial]:
        """Do it. Raises Poisoned when the device is lost, with the trials so far."""

    def failed(self, candidate: Candidate, status: Status, error: str) -> Trial:
        """The trial of a candidate that ended its worker."""
        return Trial(stage=self.stage, problem=self.problem.id, candidate=candidate, status=status, error=error)

    def attempt(self, tools: Tools, trials: list[Trial], position: int, work: Callable[[Candidate], T]) -> T | None:
        """What `work` returns, or None when the candidate failed: then its trial is in `trials`."""
        tools.flight.begin(position)
        candidate = self.candidates[position]
        try:
            return work(candidate)
        except Exception as error:  # noqa: BLE001 - whatever a kernel or library raises is the candidate's failure
            trials.append(self.failed(candidate, Status.LAUNCH_ERROR, tools.bench.in_words(candidate, error)))
            if isinstance(error, RuntimeError) and not tools.alive():
                raise Poisoned(trials) from None
            return None


@dataclass(frozen=True, kw_only=True)
class ProbeJob(Job):
    """One launch of one candidate alone: did it end the worker, or was it another's fault?"""

    stage: str
    problem: Problem
    candidate: Candidate

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (self.candidate,)

    def without(self, done: Collection[Candidate]) -> "ProbeJob":
        return self

    def run(self, tools: Tools) -> list[Trial]:
        trials: list[Trial] = []
        tools.flight.begin(SETTING_UP)
        setup = tools.bench.set_up(self.problem)
        self.attempt(tools, trials, 0, partial(launch_once, tools, setup, 0))
        return trials


def launch_once(tools: Tools, setup: Setup, index: int, candidate: Candidate) -> tuple[Bind, Launch, float]:
    """Bind, launch and wait; what binds to other sets, the launch, and the microseconds the host saw."""
    with tools.spending("load"):
        bind = setup.binder(candidate)
        launch = bind(index)
    start = time.perf_counter_ns()
    launch()
    tools.clock.synchronize()
    count(tools, setup, candidate, 1)
    return bind, launch, (time.perf_counter_ns() - start) / 1e3


def count(tools: Tools, setup: Setup, candidate: Candidate, launches: int) -> None:
    """Remember that a candidate had so many more launches on its problem in this worker."""
    key = (setup.problem.id, candidate.id)
    tools.bench.launched[key] = tools.bench.launched.get(key, 0) + launches


def rounded(samples_us: Iterable[float]) -> tuple[float, ...]:
    """Samples as the journal holds them, so that a run decided again from it decides the same."""
    return tuple(round(s, 4) for s in samples_us)
