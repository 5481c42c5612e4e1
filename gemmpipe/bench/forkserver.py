"""Where the processes of a run are forked from: what all of them import is imported there once (2 to 3 s)."""

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
"""Before each further try to start what was killed while it started."""
EXIT_UNKNOWN = 255
"""The exit code of a process whose forkserver was killed: nobody is left who knows its own."""


def forkserver() -> ForkServerContext:
    """The context to start processes in: begins to import there, beside what the caller imports meanwhile."""
    # In joblib's processes the default is a method of its own, which processes started by any other cannot look up.
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("forkserver", force=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gemmpipe.bench.preloaded"])
    for ensure_running in (resource_tracker.ensure_running, server.ensure_running):  # the first lifts the block
        with signals_blocked():
            ensure_running()
    return context


class ForkedProcess:
    """A process that was forked there and lives on, and can be ended, where the forkserver is killed."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Start it. Raises EnvironmentProblem where that fails again and again for some seconds."""
        self._process = _started(target, args)
        self.pid = self._process.pid or 0
        try:
            self._handle: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux; or it has ended, which its sentinel says too
            self._handle = None

    @property
    def sentinel(self) -> int:
        """What becomes readable when it ends."""
        return self._process.sentinel if self._handle is None else self._handle

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive() if self._handle is None else not self._over(0)

    @property
    def exitcode(self) -> int | None:
        """How it ended; LOST where nobody knows."""
        return self._process.exitcode

    def kill(self) -> None:
        """Have it killed at once, whoever else may believe that it has ended."""
        if self._handle is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end, at most so long."""
        began = time.monotonic()
        if self._handle is not None and not self._over(timeout_s):
            return
        self._process.join(None if timeout_s is None else max(0.1, timeout_s - (time.monotonic() - began)))

    def close(self) -> None:
        """Let go of it when it has ended; nothing is asked of it any more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _over(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._handle or 0, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _started(target: Callable[..., object], args: tuple[Any, ...]) -> BaseProcess:
    for pause in (*RETRY_PAUSES_S, None):
        process = forkserver().Process(target=target, args=args, daemon=True)
        try:
            process.start()
        except (OSError, EOFError) as error:  # the forkserver was killed meanwhile; the next one is another
            if pause is None:
                raise EnvironmentProblem(f"no process can be started: {one_line(error)}") from None
            time.sleep(pause)
        else:
            return process
    raise AssertionError("the last try returns or raises")
