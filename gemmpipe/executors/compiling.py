"""The compile pool: processes that fill Triton's disk cache, each build with a deadline."""

import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as CompileTimeout
from multiprocessing.connection import Connection

from pebble import ProcessExpired, ProcessPool

from gemmpipe.data import Build, BuildFacts, Device
from gemmpipe.executors import Built, T, Usage
from gemmpipe.executors.hand import forkserver
from gemmpipe.interrupt import end_with_the_driver

_NICE = 5  # the worker that feeds the GPU goes first


def _initialise(python_path: tuple[str, ...]) -> None:
    sys.path[:0] = [p for p in python_path if p not in sys.path]
    end_with_the_driver()
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(build: Build, device: Device) -> BuildFacts:
    from gemmpipe.builds import compile_build

    return compile_build(build, device)


class Compilers:
    """`slots` processes; results arrive in `done()`, and `bell` becomes readable when one does."""

    def __init__(self, device: Device, slots: int, timeout_s: float, python_path: tuple[str, ...]) -> None:
        self.slots = slots
        self._device = device
        self._timeout_s = timeout_s
        self._python_path = python_path
        self._pool: ProcessPool | None = None
        self._results: queue.SimpleQueue[Built] = queue.SimpleQueue()
        self._usage = Usage(name=f"compile slots ({slots})")
        self._first = 0.0
        self.pending = 0
        self.bell: Connection
        self.bell, self._ring = multiprocessing.Pipe(duplex=False)

    def submit(self, build: Build) -> None:
        """Queue a build."""
        self._first = self._first or time.monotonic()
        self.pending += 1
        future = self._processes().schedule(_compile, args=[build, self._device], timeout=self._timeout_s)
        future.add_done_callback(lambda f: self._finished(build, f))

    def aside(self, task: Callable[[], T]) -> "Future[T]":
        """Queue something else."""
        future: Future[T] = self._processes().schedule(task)
        return future

    def _processes(self) -> ProcessPool:
        """They start with the first work."""
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self.slots, context=forkserver(), initializer=_initialise, initargs=[self._python_path]
            )
        return self._pool

    def _finished(self, build: Build, future: "Future[BuildFacts]") -> None:
        """Called in pebble's thread: hand the result over and ring."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            facts = future.result()
        elif isinstance(error, CompileTimeout):
            facts = _failed(f"compiling took longer than executor.compile_timeout_s={self._timeout_s:g}")
        elif isinstance(error, ProcessExpired):
            facts = _failed(f"the compiler died: exit code {error.exitcode}")
        else:
            facts = _failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        self._results.put(Built(build=build, facts=facts))
        self._ring.send_bytes(b".")

    def done(self) -> list[Built]:
        """Results since the last call."""
        while self.bell.poll():
            self.bell.recv_bytes()
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        self.pending -= len(results)
        self._usage.add({"compile": sum(b.facts.compile_s for b in results)})
        if results:
            self._usage.wall_s = (time.monotonic() - self._first) * self.slots
        return results

    def usage(self) -> Usage:
        """Seconds of all slots together, from the first build to the last."""
        return self._usage

    def close(self, *, kill: bool) -> None:
        """Stop the processes."""
        if self._pool is not None:
            end = self._pool.stop if kill or self.pending else self._pool.close
            end()  # type: ignore[no-untyped-call]
            self._pool.join()


def _failed(error: str) -> BuildFacts:
    return BuildFacts(compile_s=0.0, shared_bytes=None, registers=None, spills=None, error=error)
