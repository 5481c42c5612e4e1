"""Ctrl-C once: stop after the work in hand; twice: stop at once; and no process outlives who started it."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gemmpipe.errors import GemmpipeError
from gemmpipe.events import Events

_LOOK_S = 1.0


class Interrupted(GemmpipeError):
    """The user asked to stop; everything finished is written."""

    exit_code = 130


class OutOfTime(Interrupted):
    """The run's own budget of time is spent; everything finished is written, as the user wanted it."""

    exit_code = 0


class Stop:
    """Whether the user asked to stop, or `budget_s` seconds are over."""

    def __init__(self, events: Events, budget_s: float | None) -> None:
        self._events = events
        self._budget_s = budget_s
        self._began = time.monotonic()
        self.asked = False
        self._told = False

    def check(self) -> None:
        """Raises Interrupted when asked to stop, OutOfTime after the budget."""
        if self.asked:
            # Not said in the handler: it may have interrupted a print.
            self._tell("warning", "stopping after the work in hand; once more to stop at once")
            raise Interrupted("interrupted")
        if self._budget_s is not None and time.monotonic() - self._began > self._budget_s:
            self._tell("line", f"budget_s={self._budget_s:g}: over; what is not finished is left out")
            raise OutOfTime("out of time")

    def _tell(self, kind: str, text: str) -> None:
        if not self._told:
            self._told = True
            self._events.emit(kind, text)

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: remember the first time, raise KeyboardInterrupt the second."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def listening(events: Events, budget_s: float | None = None) -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP within the block; outside the main thread there is nothing to handle."""
    stop = Stop(events, budget_s)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: the terminal may go
        try:
            before[number] = signal.signal(number, stop.ask)
        except ValueError:
            break
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Sweep:
    """Who started this process for jobs of a sweep, watched as long as it lives."""

    def __init__(self) -> None:
        self.starter = os.getppid()
        self.at_work = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self.starter:
            time.sleep(_LOOK_S)
        if not self.at_work:
            os._exit(Interrupted.exit_code)
        os.kill(os.getpid(), signal.SIGTERM)


_sweep = functools.cache(_Sweep)


@contextmanager
def ending_with_the_sweep() -> Iterator[None]:
    """In a process that a launcher started for jobs: when the sweep is killed, stop as by SIGTERM, then end.

    joblib's processes would finish the job, for hours, and wait minutes for another one.
    """
    if multiprocessing.current_process().name == "MainProcess":
        yield
        return
    sweep = _sweep()
    sweep.at_work = True
    try:
        yield
    finally:
        sweep.at_work = False
        if os.getppid() != sweep.starter:
            os._exit(Interrupted.exit_code)  # nobody is there to take an exception


def end_with_the_driver() -> None:
    """For a worker or compiler: what hangs in a kernel reads no pipe, and must not keep its device for ever."""
    driver = multiprocessing.parent_process()

    def wait() -> None:
        if driver is not None:
            driver.join()
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
