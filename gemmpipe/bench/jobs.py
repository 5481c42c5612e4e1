"""The jobs of a worker: their base class, which turns a candidate's exception into a status, probes, and autotuning."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, MutableSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from gemmpipe.backends.autotune import LABEL, Autotuned
from gemmpipe.bench.setup import ProblemSetup, WorkerBench
from gemmpipe.bench.timer import Clock
from gemmpipe.core.cpu_load import ForeignProcessorTime
from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.core.events import TimeAccount
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.family import Launch

T = TypeVar("T")

Bind = Callable[[int], Launch]
"""Makes a candidate's launch on the operand set with this index."""

SETTING_UP = -1
"""The position in flight while a job makes operands."""
RUNNING_SEVERAL = -2
"""The position in flight while several candidates run."""

LONG_LAUNCH_US = 20_000.0  # a first launch this long is a sample itself: its loading time is comparatively small


FIRST_LAUNCH = "first_launch"
"""The purpose under which a worker accounts for the first launches of the candidates of a screening job."""


class DeviceContextLost(Exception):
    """The device's context is lost, and this process must end; the trials of the job so far are valid."""

    def __init__(self, trials: list[Trial]) -> None:
        super().__init__("the device context is lost")
        self.trials = trials


class InFlight:
    """The candidate in flight, in shared memory that outlives the worker: [position in the job, start time]."""

    def __init__(self, cells: MutableSequence[float]) -> None:
        self._cells = cells

    def begin(self, position: int) -> None:
        """Record that candidate `position` of the job is about to run, or SETTING_UP or RUNNING_SEVERAL begins."""
        self._cells[1] = time.monotonic()
        self._cells[0] = position

    @property
    def position(self) -> int:
        """The position of the candidate in flight, or SETTING_UP or RUNNING_SEVERAL."""
        return int(self._cells[0])

    @property
    def since(self) -> float:
        """When it began, on the monotonic clock."""
        return self._cells[1]


@dataclass
class WorkerContext:
    """The resources of a job in its worker."""

    bench: WorkerBench
    clock: Clock
    in_flight: InFlight
    foreign_processes: ForeignProcesses | ForeignProcessorTime
    time_account: TimeAccount = field(default_factory=TimeAccount)
    """Seconds by purpose: operands, load, first_launch, screening, checks, finals, autotune."""

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds by purpose since the dict was cleared."""
        return self.time_account.spent_s

    def timed(self, on: str) -> AbstractContextManager[None]:
        """Add the time of the block to the purpose `on`."""
        return self.time_account.timed(on)

    def device_alive(self) -> bool:
        """False if the device's context is lost after an error."""
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
        """The candidates of the job; `InFlight.position` is an index into them."""

    @abstractmethod
    def without(self, done: Collection[Candidate]) -> "Job":
        """The same job for the other candidates."""

    @abstractmethod
    def run(self, context: WorkerContext) -> list[Trial]:
        """Run the job. Raises DeviceContextLost with the trials so far."""

    def failed_trial(self, candidate: Candidate, status: Status, error: str) -> Trial:
        """A trial without samples, for a candidate that failed."""
        return Trial(stage=self.stage, problem=self.problem.id, candidate=candidate, status=status, error=error)

    def attempt(
        self, context: WorkerContext, trials: list[Trial], position: int, work: Callable[[Candidate], T]
    ) -> T | None:
        """The result of `work`, or None if it raises: a trial with the error is then appended to `trials`."""
        context.in_flight.begin(position)
        candidate = self.candidates[position]
        try:
            return work(candidate)
        except Exception as error:  # noqa: BLE001 - whatever a kernel or library raises is the candidate's failure
            trials.append(
                self.failed_trial(candidate, Status.LAUNCH_ERROR, context.bench.describe_error(candidate, error))
            )
            if isinstance(error, RuntimeError) and not context.device_alive():
                raise DeviceContextLost(trials) from None
            return None


@dataclass(frozen=True, kw_only=True)
class ProbeJob(Job):
    """One launch of one candidate alone, after a crash with several candidates; no trial if it succeeds."""

    stage: str
    problem: Problem
    candidate: Candidate

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (self.candidate,)

    def without(self, done: Collection[Candidate]) -> "ProbeJob":
        return self

    def run(self, context: WorkerContext) -> list[Trial]:
        trials: list[Trial] = []
        context.in_flight.begin(SETTING_UP)
        setup = context.bench.set_up(self.problem)
        self.attempt(context, trials, 0, partial(launch_once, context, setup, 0))
        return trials


def launch_once(
    context: WorkerContext, setup: ProblemSetup, index: int, candidate: Candidate
) -> tuple[Bind, Launch, float]:
    """Bind, launch and synchronize: (function that binds to other sets, launch, microseconds on the host's clock)."""
    with context.timed("load"):
        bind = setup.binder(candidate)
        launch = bind(index)
    start = time.perf_counter_ns()
    launch()
    context.clock.synchronize()
    count_launches(context, setup, candidate, 1)
    return bind, launch, (time.perf_counter_ns() - start) / 1e3


def count_launches(context: WorkerContext, setup: ProblemSetup, candidate: Candidate, launches: int) -> None:
    """Add to the number of a candidate's launches on its problem in this worker."""
    key = (setup.problem.id, candidate.id)
    context.bench.launch_counts[key] = context.bench.launch_counts.get(key, 0) + launches


def round_samples(samples_us: Iterable[float]) -> tuple[float, ...]:
    """Samples rounded as in the journal, so that selecting again from the journal gives the same result."""
    return tuple(round(s, 4) for s in samples_us)


@dataclass(frozen=True, kw_only=True)
class AutotuneJob(Job):
    """Triton's own tuner chooses a configuration of one problem.

    The trial has the chosen candidate and the tuner's time; it is checked and timed in the finals. The job counts as
    one candidate in flight, restarted for each configuration: one that hangs ends the job, and the tuning as a whole
    may take longer than a candidate's time limit.
    """

    stage: str
    problem: Problem
    configurations: tuple[Candidate, ...]
    """The configurations, in the tuner's order."""
    pending: tuple[Candidate, ...] = (Candidate.of(LABEL, {}),)
    """The one candidate in flight until the choice; empty after its exclusion."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.pending

    def without(self, done: Collection[Candidate]) -> "AutotuneJob":
        return replace(self, pending=tuple(c for c in self.pending if c not in done))

    def run(self, context: WorkerContext) -> list[Trial]:
        trials: list[Trial] = []
        with context.timed("operands"):
            context.in_flight.begin(SETTING_UP)
            setup = context.bench.set_up(self.problem)
            setup.inputs(0), setup.weights(0), setup.out(0)
            context.clock.synchronize()
        with context.timed("autotune"):
            chosen = self.attempt(context, trials, 0, partial(self._choose, context, setup))
        return trials if chosen is None else [chosen]

    def _choose(self, context: WorkerContext, setup: ProblemSetup, candidate: Candidate) -> Trial:
        implementation = context.bench.implementation(candidate)
        assert isinstance(implementation, Autotuned), "an AutotuneJob is for the backend of its label"
        choice = implementation.choose(
            setup.spec,
            [c.knobs for c in self.configurations],
            context.bench.device,
            setup.inputs(0),
            setup.prepared(candidate, 0),
            setup.out(0),
            before_each=lambda: context.in_flight.begin(0),
        )
        context.clock.synchronize()
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=Candidate.of(LABEL, self.configurations[choice.index].knobs),
            status=Status.OK,
            samples_us=() if choice.time_us is None else round_samples([choice.time_us]),
            tuning=choice.tuning,
        )
