"""All devices of this machine: one killable worker process each, a lock a device, a shared compile pool."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

from gemmpipe.backends import Backend
from gemmpipe.data import Build, Device
from gemmpipe.device import usable_cores
from gemmpipe.errors import MOST_PROCESSES, at_least, at_most
from gemmpipe.events import Events
from gemmpipe.executors import Built, Executor, Finished, Pool, T, Usage
from gemmpipe.executors.compiling import Compile, Compilers, into_cache
from gemmpipe.executors.desk import Desk
from gemmpipe.executors.holding import lock_path, locked_device, refuse_unlike
from gemmpipe.executors.ledger import Ledger
from gemmpipe.jobs import Job
from gemmpipe.stopwatch import IDLE
from gemmpipe.worker import Equip, Post, ready_tools

_SWEEP_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Executor):
    """Runs on this machine's devices."""

    workers: int | None
    """At most so many devices; None: all."""
    compile_workers: int | None
    """Compile processes; None: the cores left beside the workers."""
    timeout_s: float | None
    """One candidate's launch may take so long; None: no limit."""
    compile_timeout_s: float
    memory_pct: float
    """A worker that holds more of the machine's memory is stopped."""

    def __post_init__(self) -> None:
        at_least(1, workers=self.workers, compile_workers=self.compile_workers, memory_pct=self.memory_pct)
        at_most(MOST_PROCESSES, workers=self.workers, compile_workers=self.compile_workers)
        at_least(0.1, timeout_s=self.timeout_s, compile_timeout_s=self.compile_timeout_s)

    @property
    def equip(self) -> Equip:
        """What a worker process sets itself up with; can be pickled."""
        return ready_tools

    @property
    def compiler(self) -> Compile:
        """What a compile process does with a build; can be pickled."""
        return into_cache

    def start(
        self,
        devices: tuple[Device, ...],
        family: str,
        backends: tuple[Backend, ...],
        python_path: tuple[str, ...],
        events: Events,
        check: Callable[[], None],
    ) -> "LocalPool":
        devices = devices[: self.workers] if self.workers else devices
        refuse_unlike(devices)
        same = Post(device=devices[0], family=family, backends=backends, python_path=python_path, equip=self.equip)
        posts = [replace(same, device=device) for device in devices]
        with ExitStack() as stack:
            # In one order everywhere, so that two runs never wait for each other.
            for device in sorted(devices, key=lock_path):
                stack.enter_context(locked_device(device, events, check))
            return LocalPool(self, posts, events, stack.pop_all())


class LocalPool(Pool):
    """Desks (a worker and its queue) and compilers."""

    def __init__(self, executor: Local, posts: Sequence[Post], events: Events, locks: ExitStack) -> None:
        self.devices = tuple(post.device for post in posts)
        self.builds_done: list[float] = []
        self._locks = locks
        slots = executor.compile_workers or max(1, usable_cores() - len(posts))
        self._compilers = Compilers(
            self.devices[0], slots, executor.compile_timeout_s, posts[0].python_path, executor.compiler
        )
        memory = executor.memory_pct / 100 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._given: set[Desk] = set()
        """Desks that may have an answer at once to what they were given."""
        self._swept = time.monotonic()
        ledger = Ledger()
        self._desks = [Desk(post, executor.timeout_s, int(memory), events, ledger) for post in posts]

    def submit(self, job: Job, worker: int) -> None:
        self._given.add(self._desks[worker])
        self._desks[worker].submit(job)

    def backlog(self, worker: int) -> int:
        return self._desks[worker].backlog

    def forget_queued(self, worker: int) -> None:
        self._desks[worker].forget_queued()

    def compile(self, build: Build) -> None:
        self._compilers.submit(build)

    def forget_builds(self) -> None:
        self._compilers.forget_queued()

    def aside(self, task: Callable[[], T]) -> "Future[T] | None":
        # On a CPU the cores belong to what is timed.
        return None if self.devices[0].kind == "cpu" else self._compilers.aside(task)

    def poll(self, timeout_s: float, ears: Sequence[Connection | int] = ()) -> Sequence[Built | Finished]:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            own = {ear: desk for desk in self._desks for ear in desk.ears()}
            with self.watch.spending(IDLE):
                heard = wait([self._compilers.bell, *own, *ears], timeout=0.0 if self._given else min(left, _SWEEP_S))
            messages = self._messages(heard, {own[ear] for ear in heard if ear in own})
            if messages or not left or not set(ears).isdisjoint(heard):
                return messages

    def _messages(self, heard: Collection[object], speaking: set[Desk]) -> list[Built | Finished]:
        """What compilers and desks have to say; silent ones are only asked twice a second, for deadlines and memory."""
        self._compilers.check()
        messages: list[Built | Finished] = [*self._compilers.done()] if self._compilers.bell in heard else []
        self.builds_done += [time.monotonic()] * len(messages)
        sweep = time.monotonic() - self._swept >= _SWEEP_S
        for desk in self._desks:
            if sweep or desk in speaking or desk in self._given:
                messages += desk.messages()
        self._swept = time.monotonic() if sweep else self._swept
        self._given.clear()
        return messages

    def usage(self) -> list[Usage]:
        return [self._compilers.usage(), *(desk.usage() for desk in self._desks)]

    def close(self, *, kill: bool = False) -> None:
        for desk in self._desks:
            desk.close(kill=kill)
        self._compilers.close(kill=kill)
        self._locks.close()
