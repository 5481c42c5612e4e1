"""A process pool that is replaced when its processes are killed from outside; no task is lost."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessPool

from gemmpipe.bench.forkserver import EXIT_UNKNOWN, RETRY_PAUSES_S, forkserver
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.signals import exit_with_driver

_NICE = 5  # lower priority than the worker that feeds the GPU
_KILLED_EXTERNALLY = (EXIT_UNKNOWN, -signal.SIGKILL)
"""Exit codes after a SIGKILL to the process or to the forkserver; a compiler that crashes has others."""


def _initialise(python_path: tuple[str, ...]) -> None:
    sys.path[:0] = [p for p in python_path if p not in sys.path]
    exit_with_driver()
    os.nice(_NICE)


@dataclass(kw_only=True, eq=False)
class _Task:
    """A task without a result."""

    call: Callable[[], Any]
    timeout_s: float | None
    done: Callable[["Future[Any]"], object]
    tries: int = 0
    future: "Future[Any] | None" = None
    """The future in the current pool; futures of earlier pools are ignored."""


class ProcessSlots:
    """`count` processes, started with the first task. Thread-safe."""

    def __init__(self, count: int, python_path: tuple[str, ...]) -> None:
        self.count = count
        self._python_path = python_path
        self._pool: ProcessPool | None = None
        self._open: set[_Task] = set()
        self._breaks = 0
        """Consecutive pools that broke before one of their tasks ended."""
        self._restarting = False
        self._closed = False
        self._lock = threading.RLock()

    def schedule(
        self, call: Callable[[], Any], timeout_s: float | None, done: Callable[["Future[Any]"], object]
    ) -> None:
        """Run `call`, which must be picklable, in a process; `done` gets its future, in a thread of the pool.

        A call is repeated if its process was killed from outside; its future has an EnvironmentProblem if processes
        cannot be started at all.
        """
        task = _Task(call=call, timeout_s=timeout_s, done=done)
        with self._lock:
            self._open.add(task)
            self._schedule(task)

    def _schedule(self, task: _Task) -> None:
        if self._restarting:
            return  # scheduled at the end of the restart
        try:
            if self._pool is None:
                self._pool = ProcessPool(
                    max_workers=self.count,
                    context=forkserver(),
                    initializer=_initialise,
                    initargs=[self._python_path],
                )
            task.future = self._pool.schedule(task.call, timeout=task.timeout_s)
        except (BrokenProcessPool, RuntimeError, OSError, EOFError):
            self._restart()
            return
        task.future.add_done_callback(lambda future: self._ended(task, future))

    def _ended(self, task: _Task, future: "Future[Any]") -> None:
        error = None if future.cancelled() else future.exception()
        broken = isinstance(error, BrokenProcessPool)
        killed = isinstance(error, ProcessExpired) and error.exitcode in _KILLED_EXTERNALLY
        with self._lock:
            if task.future is not future:
                return
            if broken and not self._closed:
                self._restart()
                return
            if killed and task.tries < len(RETRY_PAUSES_S) and not self._closed:
                task.tries += 1
                self._schedule(task)
                return
            self._breaks = 0
            self._open.discard(task)
        task.done(future)

    def _restart(self) -> None:
        """Move all open tasks to a new pool after a pause, in another thread."""
        if not self._restarting:
            self._restarting = True
            threading.Thread(target=self._replace_pool, daemon=True).start()

    def _replace_pool(self) -> None:
        self._breaks += 1
        lost = self._breaks > len(RETRY_PAUSES_S)
        time.sleep(0 if lost else RETRY_PAUSES_S[self._breaks - 1])
        with self._lock:
            self._retire()
            self._restarting = False
            tasks = [*self._open] if not self._closed else []
            for task in tasks:
                task.future = None
                if lost:
                    self._open.discard(task)
                else:
                    self._schedule(task)
        for task in tasks if lost else ():
            failed: Future[Any] = Future()
            failed.set_exception(EnvironmentProblem("compile processes are killed repeatedly as they start"))
            task.done(failed)

    def _retire(self) -> None:
        """Stop a broken pool, and join it in another thread: this may wait for a process that does not exist."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()  # type: ignore[no-untyped-call]
            threading.Thread(target=pool.join, daemon=True).start()

    def close(self, *, kill: bool) -> None:
        """Stop the processes; without `kill` after their running tasks."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            end = pool.stop if kill or self._restarting else pool.close
            end()  # type: ignore[no-untyped-call]
            pool.join()
