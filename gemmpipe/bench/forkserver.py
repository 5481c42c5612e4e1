"""The forkserver of a run's processes: their common modules are imported there once (2 to 3 s)."""

import contextlib
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable
from multiprocessing import forkserver as server
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from gemmpipe.core.errors import EnvironmentProblem, one_line
from gemmpipe.core.signals import signals_blocked

RETRY_PAUSES_S = (0.1, 0.4, 1.0, 2.0, 4.0)
"""Pauses before each further try to start a process that was killed during its start."""
EXIT_UNKNOWN = 255
"""The exit code reported for a process after its forkserver was killed: the real one is lost."""


def forkserver() -> ForkServerContext:
    """The context for starting processes; the forkserver begins its imports in parallel to the caller's."""
    # In joblib's processes the default is joblib's own method, which processes started by another cannot look up.
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("forkserver", force=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gemmpipe.bench.preloaded"])
    for ensure_running in (resource_tracker.ensure_running, server.ensure_running):  # the first unblocks signals
        with signals_blocked():
            ensure_running()
    return context


class ForkedProcess:
    """A process forked by the forkserver that can be watched and killed after the forkserver is killed."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Start the process. Raises EnvironmentProblem if that fails repeatedly for some seconds."""
        self._process = _started(target, args)
        self.pid = self._process.pid or 0
        try:
            self._handle: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux; or it has ended, which its sentinel shows as well
            self._handle = None

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""
        return self._process.sentinel if self._handle is None else self._handle

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.is_alive() if self._handle is None else not self._ended(0)

    @property
    def exitcode(self) -> int | None:
        """The exit code, None while it runs; EXIT_UNKNOWN if the forkserver was killed."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process at once, by its pidfd if possible: multiprocessing may believe that it has ended."""
        if self._handle is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the process, up to `timeout_s`."""
        began = time.monotonic()
        if self._handle is not None and not self._ended(timeout_s):
            return
        self._process.join(None if timeout_s is None else max(0.1, timeout_s - (time.monotonic() - began)))

    def close(self) -> None:
        """Close the pidfd of an ended process, which must not be used any more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._handle or 0, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _started(target: Callable[..., object], args: tuple[Any, ...]) -> BaseProcess:
    for pause in (*RETRY_PAUSES_S, None):
        process = forkserver().Process(target=target, args=args, daemon=True)
        try:
            process.start()
        except (OSError, EOFError) as error:  # the forkserver was killed; the next try starts a new one
            if pause is None:
                raise EnvironmentProblem(f"no process can be started: {one_line(error)}") from None
            time.sleep(pause)
        else:
            return process
    raise AssertionError("the last try returns or raises")
