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
from gemmpipe.starting import start

_LOOK_S = 1.0
_PATIENCE_S = 10.0
"""How long a run without workers may go on after a signal: what it is at may never end, or take minutes."""


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
        self.has_workers = False
        """Whether jobs are on devices: their results are worth waiting for, and the executor bounds their time."""
        self._told = False
        self._alarm: tuple[object] | None = None

    def check(self) -> None:
        """Raises Interrupted when asked to stop, OutOfTime after the budget."""
        if self.asked:
            self.settle()
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
            self.settle()
            raise KeyboardInterrupt
        self.asked = True
        if not self.has_workers and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            self._alarm = (signal.signal(signal.SIGALRM, self._overdue),)
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

    def _overdue(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: as if the user had asked once more, since `check` was not called meanwhile."""
        self.settle()
        if not self.has_workers:
            raise KeyboardInterrupt

    def settle(self) -> None:
        """Wait no longer for a call of `check`."""
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            (handler,), self._alarm = self._alarm, None
            signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]


_at_work: list[Stop] = []
"""The run of this process that listens, if one does."""


def stop_in_time() -> None:
    """Have the run of this process stop after the work in hand, unless it does already.

    Raises KeyboardInterrupt where none listens: it has not begun, or has ended.
    """
    if not _at_work:
        raise KeyboardInterrupt
    _at_work[-1].asked = True


@contextmanager
def listening(events: Events, budget_s: float | None = None) -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP within the block; outside the main thread there is nothing to handle.

    Raises KeyboardInterrupt where one came before and has not ended the process yet.
    """
    stop = Stop(events, budget_s)
    before = {}
    _at_work.append(stop)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the terminal may go
            try:
                before[number] = signal.signal(number, stop.ask)
            except ValueError:
                break
        start.check()
        yield stop
    finally:
        _at_work.remove(stop)
        stop.settle()
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


_OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What terminals and SLURM send to all processes of a run: the driver alone decides what it means."""


@contextmanager
def left_to_the_driver() -> Iterator[None]:
    """Processes that are started within the block never hear them, nor does anything that those start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # who starts them hears what came meanwhile


def end_with_the_driver() -> None:
    """For a worker, a compiler or a searcher: it ends when the driver does, or by a SIGTERM of the driver's own.

    What hangs in a kernel reads no pipe, and must not keep its device for ever. Signals from elsewhere wait for ever,
    also in programs that are started here (ptxas): a healthy candidate would be blamed for them.
    """
    driver = multiprocessing.parent_process()
    if driver is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)  # of this thread, and so of all that start later
    may_ask = hasattr(signal, "sigwaitinfo")
    if not may_ask:  # on macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait() -> None:
        driver.join()
        os.kill(os.getpid(), signal.SIGKILL)

    def obey() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != driver.pid:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    if may_ask:
        threading.Thread(target=obey, daemon=True).start()
