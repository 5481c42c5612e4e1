"""Executors run jobs on devices and compile builds; this module has their interfaces and the messages to the driver."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self, TypeVar

from gemmpipe.backends import Backend
from gemmpipe.bench.jobs import Job
from gemmpipe.core.data import Build, BuildFacts, Candidate, Device, Trial
from gemmpipe.core.device import DeviceChoice, usable_cores
from gemmpipe.core.events import Events, TimeAccount
from gemmpipe.core.renamed import accept_old_methods
from gemmpipe.core.signals import DRAIN_S, Interrupted

T = TypeVar("T")

QUEUE_DEPTH = 2
"""Jobs or builds sent to a process ahead of time, so that it need not wait for the next one."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The result of a build; `facts.error` is set if it failed."""

    build: Build
    facts: BuildFacts


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Trials of a job. If `complete`, all its candidates have a trial in this message or an earlier one."""

    job: Job
    trials: tuple[Trial, ...]
    complete: bool = True
    first_launch_s: float = 0.0
    """Seconds of the first launches of its candidates: a library may compile in one."""


@dataclass(kw_only=True)
class Usage:
    """Time of one resource, in seconds by purpose; idle time is measured, not computed as the rest."""

    name: str
    wall_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    ready_at: float | None = None
    """When it was ready for work, on the monotonic clock of this machine."""
    idle: list[tuple[float, float]] = field(default_factory=list)
    """Intervals (start, end) of waiting for work, on the monotonic clock."""

    def add(self, spent_s: dict[str, float]) -> None:
        """Add seconds by purpose."""
        for purpose, seconds in spent_s.items():
            self.busy_s[purpose] = self.busy_s.get(purpose, 0.0) + seconds

    def merge(self, other: "Usage") -> None:
        """Add the time of another resource of the same kind."""
        self.wall_s += other.wall_s
        self.add(other.busy_s)
        self.idle += other.idle

    def idle_within(self, start: float, end: float) -> float:
        """Idle seconds between two times on the monotonic clock."""
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.idle)

    @property
    def idle_s(self) -> float:
        """Idle seconds."""
        return sum(end - start for start, end in self.idle)

    @property
    def unaccounted_s(self) -> float:
        """Wall time minus busy and idle time; negative if time is counted twice."""
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
    """The driver's account, to which a pool adds its waiting time."""
    waited_s: float = 0.0
    """Seconds that it waited at its start for devices that other runs held."""

    @abstractmethod
    def submit(self, job: Job, worker: int) -> None:
        """Queue a job on a worker."""

    @abstractmethod
    def backlog(self, worker: int) -> int:
        """Number of a worker's unfinished jobs, queued ones included."""

    @abstractmethod
    def cancel_pending(self, worker: int) -> None:
        """Drop the queued jobs of a worker that are not sent to it."""

    @abstractmethod
    def compile(self, build: Build) -> None:
        """Queue a build."""

    @abstractmethod
    def cancel_builds(self) -> Sequence[Build]:
        """Drop the queued builds that are not sent to a process, and return them."""

    @property
    def compile_slots(self) -> int:
        """Number of builds that are compiled at a time."""
        return usable_cores()

    @property
    def open_builds(self) -> int:
        """Number of unfinished builds, queued ones included; 0 if the pool cannot count them."""
        return 0

    def submit_task(self, task: Callable[[], T]) -> "Future[T] | None":
        """Run a picklable task of the driver in another process; None: no process is available for that."""
        return None

    @abstractmethod
    def poll(self, timeout_s: float, handles: Sequence[Connection | int] = ()) -> Sequence[BuildResult | JobResult]:
        """Results since the last call; waits up to `timeout_s` for one, or until one of `handles` is readable."""

    @abstractmethod
    def usage(self) -> list[Usage]:
        """The time of every worker and of the compile slots."""

    @abstractmethod
    def close(self, *, kill: bool = False) -> None:
        """Stop all processes; with `kill` without waiting for running jobs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)


@dataclass(kw_only=True, eq=False)
class BuildsAhead:
    """Builds that a later stage needs, in the order of need: compiled while the pool has few others."""

    errors: dict[str, str] = field(default_factory=dict)
    """By build id, the compiler's error of each that is finished, empty if there is none."""
    known: dict[tuple[str, Candidate], tuple[Build, ...]] = field(default_factory=dict)
    """By problem id and candidate, what they need."""
    _queued: dict[str, Build] = field(default_factory=dict)
    _sent: set[str] = field(default_factory=set)

    def add(self, builds: Iterable[Build]) -> None:
        """Queue those that are new."""
        new = (b for b in builds if b.id not in self.errors and b.id not in self._sent)
        self._queued |= {b.id: b for b in new if b.id not in self._queued}

    def replace(self, builds: Iterable[Build]) -> None:
        """Queue these in this order instead of all that are queued; those at the pool stay there."""
        self._queued.clear()
        self.add(builds)

    def send(self, pool: Pool, share: float) -> None:
        """Send builds until the pool's unfinished ones, others included, take this share of its processes."""
        if not self._queued:
            return
        room = max(1, int(share * pool.compile_slots)) - max(pool.open_builds, len(self._sent))
        for build in list(self._queued.values())[: max(0, room)]:
            del self._queued[build.id]
            self._sent.add(build.id)
            pool.compile(build)

    def receive(self, message: BuildResult) -> bool:
        """Take a result; False if it is that of another build."""
        if message.build.id not in self._sent:
            return False
        self._sent.remove(message.build.id)
        self.errors[message.build.id] = message.facts.error
        return True

    def take_back(self, dropped: Iterable[Build]) -> None:
        """Queue those again that the pool has dropped."""
        own = [b for b in dropped if b.id in self._sent]
        self._sent -= {b.id for b in own}
        self.add(own)


@contextmanager
def drain_on_interrupt(pool: Pool, receive: Callable[[BuildResult | JobResult], object]) -> Iterator[None]:
    """If the block is interrupted, drop queued jobs and receive the results of running ones, for up to 10 s."""
    try:
        yield
    except Interrupted:
        workers = range(len(pool.devices))
        for worker in workers:
            pool.cancel_pending(worker)
        deadline = time.monotonic() + DRAIN_S
        while any(pool.backlog(w) for w in workers) and time.monotonic() < deadline:
            for message in pool.poll(0.5):
                receive(message)
        raise


class Executor(ABC):
    """Configuration of how and where jobs run; starts a pool."""

    def find(self, choice: DeviceChoice) -> tuple[Device, ...]:
        """The devices of the user's choice where jobs run; all have the properties of the first."""
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
        """Acquire the devices and start the workers; `check`, which may raise Interrupted, is called while waiting."""
