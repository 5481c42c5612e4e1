"""The compile pool: processes that fill Triton's disk cache, each build with a deadline."""

import errno
import multiprocessing
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as CompileTimeout
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pebble import ProcessExpired

from gemmpipe.data import Build, BuildFacts, Device
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.executors import Built, T, Usage
from gemmpipe.executors.slots import Slots
from gemmpipe.paths import unwritable

_AHEAD = 2  # builds that a process has, so that it need not wait for the next


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stint:
    """What a process did, when, and what came of it."""

    process: int
    begun: float
    ended: float
    value: Any


def _timed(task: Callable[[], Any]) -> _Stint:
    begun = time.monotonic()
    value = task()
    return _Stint(process=os.getpid(), begun=begun, ended=time.monotonic(), value=value)


Compile = Callable[[Build, Device], BuildFacts]
"""What a compile process does with a build for a device."""


def cache_folder() -> Path:
    """Triton's disk cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _lost_cache(error: OSError) -> str:
    """What ails Triton's cache where a build failed of it, or nothing: no other build would fare better."""
    folder = cache_folder()
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # a write does not say of which file it was
    if not full and not Path(str(error.filename)).is_relative_to(folder):
        return ""
    # Only what lacks is written: in a read-only folder all that was compiled before is found.
    why = error.strerror if full else unwritable(folder)
    return f"cannot compile into Triton's cache {folder}: {why}; TRITON_CACHE_DIR names another" if why else ""


def into_cache(build: Build, device: Device) -> BuildFacts:
    """Compile into Triton's disk cache."""
    from gemmpipe.launching.builds import compile_build

    return compile_build(build, device)


class Compilers:
    """`slots` processes; results arrive in `done()`, and `bell` becomes readable when one does."""

    def __init__(
        self,
        device: Device,
        slots: int,
        timeout_s: float,
        python_path: tuple[str, ...],
        compiler: Compile = into_cache,
    ) -> None:
        self.slots = slots
        self._device = device
        self._timeout_s = timeout_s
        self._compiler = compiler
        self._slots = Slots(slots, python_path)
        self._waiting: deque[Build] = deque()
        self._given = 0
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[Built] = queue.SimpleQueue()
        self._begun = 0.0
        self._stints: list[tuple[str, _Stint]] = []
        self._lost_s = 0.0
        self._trouble = ""
        self.pending = 0
        self.bell: Connection
        self.bell, self._ring = multiprocessing.Pipe(duplex=False)

    def submit(self, build: Build) -> None:
        """Queue a build."""
        self.pending += 1
        self._begun = self._begun or time.monotonic()
        self._waiting.append(build)
        self._give()

    def forget_queued(self) -> None:
        """Drop the builds that no process has been given."""
        with self._lock:
            self.pending -= len(self._waiting)
            self._waiting.clear()

    def _give(self) -> None:
        """Keep the processes busy; what is not given yet can be dropped. Called in pebble's thread too."""
        while (build := self._next()) is not None:
            task = partial(self._compiler, build, self._device)
            self._slots.schedule(partial(_timed, task), self._timeout_s, partial(self._finished, build))

    def _next(self) -> Build | None:
        with self._lock:
            if not self._waiting or self._given >= _AHEAD * self.slots:
                return None
            self._given += 1
            return self._waiting.popleft()

    def aside(self, task: Callable[[], T]) -> "Future[T]":
        """Queue something else."""
        result: Future[T] = Future()
        self._begun = self._begun or time.monotonic()
        self._slots.schedule(partial(_timed, task), None, lambda f: self._set_aside(f, result))
        return result

    def _set_aside(self, future: "Future[_Stint]", result: "Future[T]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            result.cancel()
        elif error is not None:
            result.set_exception(error)
        else:
            self._stints.append(("listing", future.result()))
            result.set_result(future.result().value)

    def _finished(self, build: Build, future: "Future[_Stint]") -> None:
        """Called in pebble's thread: hand the result over and ring."""
        with self._lock:
            self._given -= 1
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._stints.append(("compile", future.result()))
            facts = future.result().value
        elif isinstance(error, CompileTimeout):
            self._lost_s += self._timeout_s
            facts = _failed(f"compiling took longer than executor.compile_timeout_s={self._timeout_s:g}")
        elif isinstance(error, ProcessExpired):
            facts = _failed(f"the compiler died: exit code {error.exitcode}")
        elif isinstance(error, EnvironmentProblem):
            self._trouble = self._trouble or str(error)
            facts = _failed(str(error))
        else:
            self._trouble = self._trouble or (_lost_cache(error) if isinstance(error, OSError) else "")
            facts = _failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        self._results.put(Built(build=build, facts=facts))
        self._ring.send_bytes(b".")
        self._give()

    def check(self) -> None:
        """Raises EnvironmentProblem once a build could not be put into the cache, or no process could be started."""
        if self._trouble:
            raise EnvironmentProblem(self._trouble)

    def done(self) -> list[Built]:
        """Results since the last call."""
        while self.bell.poll():
            self.bell.recv_bytes()
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        self.pending -= len(results)
        return results

    def usage(self) -> Usage:
        """Seconds of all slots together, from the first work on; a slot without a process is idle."""
        if not self._begun:
            return Usage(name=f"compile slots ({self.slots})")
        now = time.monotonic()
        usage = Usage(name=f"compile slots ({self.slots})", wall_s=(now - self._begun) * self.slots)
        by_process: dict[int, list[_Stint]] = {}
        for purpose, stint in list(self._stints):
            usage.add({purpose: stint.ended - stint.begun})
            by_process.setdefault(stint.process, []).append(stint)
        for stints in by_process.values():
            stints.sort(key=lambda s: s.begun)
            usage.add({"start": stints[0].begun - self._begun})
            ends = [*(s.begun for s in stints[1:]), now]
            usage.idle += [(s.ended, end) for s, end in zip(stints, ends, strict=True)]
        usage.idle += [(self._begun, now)] * (self.slots - len(by_process))
        if self._lost_s or len(by_process) > self.slots:  # what began anew was killed: the rest was its deadline
            usage.add({"lost": usage.unaccounted_s})
        return usage

    def close(self, *, kill: bool) -> None:
        """Stop the processes."""
        kill = kill or bool(self.pending)
        self.forget_queued()
        self._slots.close(kill=kill)


def _failed(error: str) -> BuildFacts:
    return BuildFacts(compile_s=0.0, shared_bytes=None, registers=None, spills=None, error=error)
