"""Executors: where jobs and builds run, and what the driver hears of them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self, TypeVar

from gemmpipe.backends import Backend
from gemmpipe.bench.jobs import Job
from gemmpipe.core.data import Build, BuildFacts, Device, Trial
from gemmpipe.core.device import DeviceChoice
from gemmpipe.core.events import Events, TimeAccount
from gemmpipe.core.renamed import accept_old_methods
from gemmpipe.core.signals import Interrupted

T = TypeVar("T")

_DRAIN_S = 10.0  # who asked to stop does not wait longer for the work in hand


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A build is compiled, or failed to (`facts.error`)."""

    build: Build
    facts: BuildFacts


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job is done: every one of its candidates has its trial here or in an earlier message."""

    job: Job
    trials: tuple[Trial, ...]
    complete: bool = True


@dataclass(kw_only=True)
class Usage:
    """Where one resource's time went, seconds by purpose; idle time is measured too, so that nothing hides in it."""

    name: str
    wall_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    ready_at: float | None = None
    """When it could begin, on the monotonic clock of this machine."""
    idle: list[tuple[float, float]] = field(default_factory=list)
    """When it waited for work, on the monotonic clock."""

    def add(self, spent_s: dict[str, float]) -> None:
        """Account seconds."""
        for purpose, seconds in spent_s.items():
            self.busy_s[purpose] = self.busy_s.get(purpose, 0.0) + seconds

    def merge(self, other: "Usage") -> None:
        """Account the time of another resource of the same kind."""
        self.wall_s += other.wall_s
        self.add(other.busy_s)
        self.idle += other.idle

    def idle_within(self, start: float, end: float) -> float:
        """Seconds idle between two moments."""
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.idle)

    @property
    def idle_s(self) -> float:
        """Seconds that it waited for work."""
        return sum(end - start for start, end in self.idle)

    @property
    def unaccounted_s(self) -> float:
        """What is missing to the wall time, or counted twice (then it is below 0)."""
        return self.wall_s - sum(self.busy_s.values()) - self.idle_s


class Pool(ABC):
    """Workers on devices and a compile pool; a running executor."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        old_methods = {"aside": "submit_task", "forget_builds": "cancel_builds", "forget_queued": "cancel_pending"}
        accept_old_methods(cls, old_methods)

    devices: tuple[Device, ...]
    builds_done: list[float]
    """When each build was finished, on the monotonic clock."""
    time_account: TimeAccount = TimeAccount()
    """The driver's: a pool that waits for others says so there."""

    @abstractmethod
    def submit(self, job: Job, worker: int) -> None:
        """Queue a job on a worker."""

    @abstractmethod
    def backlog(self, worker: int) -> int:
        """Jobs given to a worker and not finished."""

    @abstractmethod
    def cancel_pending(self, worker: int) -> None:
        """Drop the jobs that a worker has not begun."""

    @abstractmethod
    def compile(self, build: Build) -> None:
        """Queue a build."""

    @abstractmethod
    def cancel_builds(self) -> None:
        """Drop the builds that no process has been given."""

    def submit_task(self, task: Callable[[], T]) -> "Future[T] | None":
        """Do work of the driver's that can be pickled in another process; None: there is none to spare."""
        return None

    @abstractmethod
    def poll(self, timeout_s: float, handles: Sequence[Connection | int] = ()) -> Sequence[BuildResult | JobResult]:
        """What happened since the last call; waits for something, or for one of these `ears`, at most so long."""

    @abstractmethod
    def usage(self) -> list[Usage]:
        """Where the time of every worker and of the compile slots went."""

    @abstractmethod
    def close(self, *, kill: bool = False) -> None:
        """Stop everything; `kill` does not wait for the job in hand."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)


@contextmanager
def drain_on_interrupt(pool: Pool, receive: Callable[[BuildResult | JobResult], object]) -> Iterator[None]:
    """When the block is interrupted, hear what workers finish of the work in hand; what is queued is dropped."""
    try:
        yield
    except Interrupted:
        workers = range(len(pool.devices))
        for worker in workers:
            pool.cancel_pending(worker)
        deadline = time.monotonic() + _DRAIN_S
        while any(pool.backlog(w) for w in workers) and time.monotonic() < deadline:
            for message in pool.poll(0.5):
                receive(message)
        raise


class Executor(ABC):
    """A way to run jobs, as the configuration names it."""

    def find(self, choice: DeviceChoice) -> tuple[Device, ...]:
        """The devices that the user's choice means where this runs; the first stands for all."""
        return choice.find()

    @abstractmethod
    def start(
        self,
        devices: tuple[Device, ...],
        family: str,
        backends: tuple[Backend, ...],
        python_path: tuple[str, ...],
        events: Events,
        check: Callable[[], None],
    ) -> Pool:
        """Take the devices and be ready for jobs; `check` raises Interrupted while it waits for one."""
