"""The compile pool: processes that compile builds into Triton's disk cache, with a time limit per build."""

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

from gemmpipe.core.data import Build, BuildFacts, Device
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.paths import unwritable_reason
from gemmpipe.executors import QUEUE_DEPTH, BuildResult, T, Usage
from gemmpipe.executors.slots import ProcessSlots

CompileFn = Callable[[Build, Device], BuildFacts]
"""Compiles a build for a device, in a compile process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedResult:
    """The result of a task, with its process and times."""

    process: int
    start: float
    end: float
    value: Any


def _timed(task: Callable[[], Any]) -> _TimedResult:
    begun = time.monotonic()
    value = task()
    return _TimedResult(process=os.getpid(), start=begun, end=time.monotonic(), value=value)


def cache_folder() -> Path:
    """The folder of Triton's disk cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _cache_failure(error: OSError) -> str:
    """An error message if a build failed because of Triton's cache, which would fail all builds, or ""."""
    folder = cache_folder()
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # such an error has no file name
    if not full and not Path(str(error.filename)).is_relative_to(folder):
        return ""
    # Only missing binaries are written: a read-only folder serves those compiled before.
    why = error.strerror if full else unwritable_reason(folder)
    return f"cannot compile into Triton's cache {folder}: {why}; TRITON_CACHE_DIR names another" if why else ""


def compile_into_cache(build: Build, device: Device) -> BuildFacts:
    """Compile into Triton's disk cache."""
    from gemmpipe.launch.build import compile_build

    return compile_build(build, device)


class CompilePool:
    """`slots` processes; `done()` returns results, and `ready_pipe` is readable while there are some."""

    def __init__(
        self,
        device: Device,
        slots: int,
        timeout_s: float,
        python_path: tuple[str, ...],
        compiler: CompileFn = compile_into_cache,
    ) -> None:
        self.slots = slots
        self._device = device
        self._timeout_s = timeout_s
        self._compiler = compiler
        self._slots = ProcessSlots(slots, python_path)
        self._waiting: deque[Build] = deque()
        self._sent = 0
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[BuildResult] = queue.SimpleQueue()
        self._started_at = 0.0
        self._spans: list[tuple[str, _TimedResult]] = []
        self._lost_s = 0.0
        self._fatal_error = ""
        self.pending = 0
        self.ready_pipe: Connection
        self.ready_pipe, self._ready_sender = multiprocessing.Pipe(duplex=False)

    def submit(self, build: Build) -> None:
        """Queue a build."""
        self.pending += 1
        self._started_at = self._started_at or time.monotonic()
        self._waiting.append(build)
        self._feed()

    def cancel_pending(self) -> list[Build]:
        """Drop the queued builds that are not sent to a process, and return them."""
        with self._lock:
            dropped = list(self._waiting)
            self.pending -= len(dropped)
            self._waiting.clear()
        return dropped

    def _feed(self) -> None:
        """Send queued builds to the processes, a few ahead: the others can still be dropped. Thread-safe."""
        while (build := self._next()) is not None:
            task = partial(self._compiler, build, self._device)
            self._slots.schedule(partial(_timed, task), self._timeout_s, partial(self._finished, build))

    def _next(self) -> Build | None:
        with self._lock:
            if not self._waiting or self._sent >= QUEUE_DEPTH * self.slots:
                return None
            self._sent += 1
            return self._waiting.popleft()

    def submit_task(self, task: Callable[[], T]) -> "Future[T]":
        """Queue a task that is not a build."""
        result: Future[T] = Future()
        self._started_at = self._started_at or time.monotonic()
        self._slots.schedule(partial(_timed, task), None, lambda f: self._task_finished(f, result))
        return result

    def _task_finished(self, future: "Future[_TimedResult]", result: "Future[T]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            result.cancel()
        elif error is not None:
            result.set_exception(error)
        else:
            self._spans.append(("listing", future.result()))
            result.set_result(future.result().value)

    def _finished(self, build: Build, future: "Future[_TimedResult]") -> None:
        """Called in pebble's thread: store the result and make `ready_pipe` readable."""
        with self._lock:
            self._sent -= 1
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._spans.append(("compile", future.result()))
            facts = future.result().value
        elif isinstance(error, CompileTimeout):
            self._lost_s += self._timeout_s
            facts = _failed(f"compiling took longer than executor.compile_timeout_s={self._timeout_s:g}")
        elif isinstance(error, ProcessExpired):
            facts = _failed(f"the compiler died: exit code {error.exitcode}")
        elif isinstance(error, EnvironmentProblem):
            self._fatal_error = self._fatal_error or str(error)
            facts = _failed(str(error))
        else:
            self._fatal_error = self._fatal_error or (_cache_failure(error) if isinstance(error, OSError) else "")
            facts = _failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        self._results.put(BuildResult(build=build, facts=facts))
        self._ready_sender.send_bytes(b".")
        self._feed()

    def check(self) -> None:
        """Raise EnvironmentProblem if a build could not be written to the cache, or no process could be started."""
        if self._fatal_error:
            raise EnvironmentProblem(self._fatal_error)

    def done(self) -> list[BuildResult]:
        """Results since the last call."""
        while self.ready_pipe.poll():
            self.ready_pipe.recv_bytes()
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        self.pending -= len(results)
        return results

    def usage(self) -> Usage:
        """The sum over all slots, from the first task on; a slot without a process is idle."""
        if not self._started_at:
            return Usage(name=f"compile slots ({self.slots})")
        now = time.monotonic()
        usage = Usage(name=f"compile slots ({self.slots})", wall_s=(now - self._started_at) * self.slots)
        by_process: dict[int, list[_TimedResult]] = {}
        for purpose, span in list(self._spans):
            usage.add({purpose: span.end - span.start})
            by_process.setdefault(span.process, []).append(span)
        for spans in by_process.values():
            spans.sort(key=lambda s: s.start)
            usage.add({"start": spans[0].start - self._started_at})
            ends = [*(s.start for s in spans[1:]), now]
            usage.idle += [(s.end, end) for s, end in zip(spans, ends, strict=True)]
        usage.idle += [(self._started_at, now)] * (self.slots - len(by_process))
        if self._lost_s or len(by_process) > self.slots:  # a process was killed after its deadline and replaced
            usage.add({"lost": usage.unaccounted_s})
        return usage

    def close(self, *, kill: bool) -> None:
        """Stop the processes."""
        kill = kill or bool(self.pending)
        self.cancel_pending()
        self._slots.close(kill=kill)


def _failed(error: str) -> BuildFacts:
    return BuildFacts(compile_s=0.0, error=error)
