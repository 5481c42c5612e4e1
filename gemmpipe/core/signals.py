"""Ctrl-C once: stop after the work in hand; twice: stop at once; and no process outlives who started it.

Ctrl-C while no run listens: kept while a module is imported, which would swallow it or stay half made.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gemmpipe.core.errors import GemmpipeError
from gemmpipe.core.events import Events

_IMPORT_POLL_S = 0.02
_IMPORTING = "<frozen importlib._bootstrap"
_EXIT_INTERRUPTED = 130


class _StartupInterrupt:
    """Whether the user asked to stop in this process while no run listened."""

    def __init__(self) -> None:
        self.requested = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: raises KeyboardInterrupt, after the import in hand is done; the second time ends at once.

        torch clears what is raised while it imports numpy, and C++ in the midst of its own import ends the process.
        """
        again = self.requested and number != signal.SIGALRM
        self.requested = True
        if not _is_importing(frame):
            self.cancel_alarm()
            raise KeyboardInterrupt
        if again:
            os.write(2, b"gemmpipe: interrupted\n")
            os._exit(_EXIT_INTERRUPTED)
        signal.signal(signal.SIGALRM, self.on_signal)
        signal.setitimer(signal.ITIMER_REAL, _IMPORT_POLL_S)

    def cancel_alarm(self) -> None:
        """Look no more whether an import is done."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """Raises KeyboardInterrupt where the user asked before and somebody swallowed it, or an import was in hand."""
        if self.requested:
            self.cancel_alarm()
            raise KeyboardInterrupt


startup_interrupt = _StartupInterrupt()
"""Of this process: what its command line has the signals call, and a run asks when it begins to listen itself."""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


_PARENT_POLL_S = 1.0
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
        self.requested = False
        self.has_workers = False
        """Whether jobs are on devices: their results are worth waiting for, and the executor bounds their time."""
        self._reported = False
        self._alarm: tuple[object] | None = None

    def check(self) -> None:
        """Raises Interrupted when asked to stop, OutOfTime after the budget."""
        if self.requested:
            self.cancel_alarm()
            # Not said in the handler: it may have interrupted a print.
            self._report("warning", "stopping after the work in hand; once more to stop at once")
            raise Interrupted("interrupted")
        if self._budget_s is not None and time.monotonic() - self._began > self._budget_s:
            self._report("line", f"budget_s={self._budget_s:g}: over; what is not finished is left out")
            raise OutOfTime("out of time")

    def _report(self, kind: str, text: str) -> None:
        if not self._reported:
            self._reported = True
            self._events.emit(kind, text)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: remember the first time, raise KeyboardInterrupt the second."""
        if self.requested:
            self.cancel_alarm()
            raise KeyboardInterrupt
        self.requested = True
        if not self.has_workers and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            self._alarm = (signal.signal(signal.SIGALRM, self._overdue),)
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

    def _overdue(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: as if the user had asked once more, since `check` was not called meanwhile."""
        self.cancel_alarm()
        if not self.has_workers:
            raise KeyboardInterrupt

    def cancel_alarm(self) -> None:
        """Wait no longer for a call of `check`."""
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            (handler,), self._alarm = self._alarm, None
            signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]


_active_stops: list[Stop] = []
"""The run of this process that listens, if one does."""


def request_stop() -> None:
    """Have the run of this process stop after the work in hand, unless it does already.

    Raises KeyboardInterrupt where none listens: it has not begun, or has ended.
    """
    if not _active_stops:
        raise KeyboardInterrupt
    _active_stops[-1].requested = True


@contextmanager
def handle_signals(events: Events, budget_s: float | None = None) -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP within the block; outside the main thread there is nothing to handle.

    Raises KeyboardInterrupt where one came before and has not ended the process yet.
    """
    stop = Stop(events, budget_s)
    before = {}
    _active_stops.append(stop)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the terminal may go
            try:
                before[number] = signal.signal(number, stop.on_signal)
            except ValueError:
                break
        startup_interrupt.check()
        yield stop
    finally:
        _active_stops.remove(stop)
        stop.cancel_alarm()
        for number, handler in before.items():
            signal.signal(number, handler)


class _SweepWatcher:
    """Who started this process for jobs of a sweep, watched as long as it lives."""

    def __init__(self) -> None:
        self.starter = os.getppid()
        self.job_running = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self.starter:
            time.sleep(_PARENT_POLL_S)
        if not self.job_running:
            os._exit(Interrupted.exit_code)
        os.kill(os.getpid(), signal.SIGTERM)


_sweep_watcher = functools.cache(_SweepWatcher)


@contextmanager
def stop_with_sweep() -> Iterator[None]:
    """In a process that a launcher started for jobs: when the sweep is killed, stop as by SIGTERM, then end.

    joblib's processes would finish the job, for hours, and wait minutes for another one.
    """
    if multiprocessing.current_process().name == "MainProcess":
        yield
        return
    sweep = _sweep_watcher()
    sweep.job_running = True
    try:
        yield
    finally:
        sweep.job_running = False
        if os.getppid() != sweep.starter:
            os._exit(Interrupted.exit_code)  # nobody is there to take an exception


_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What terminals and SLURM send to all processes of a run: the driver alone decides what it means."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started within the block never hear them, nor does anything that those start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # who starts them hears what came meanwhile


def exit_with_driver() -> None:
    """For a worker, a compiler or a searcher: it ends when the driver does, or by a SIGTERM of the driver's own.

    What hangs in a kernel reads no pipe, and must not keep its device for ever. Signals from elsewhere wait for ever,
    also in programs that are started here (ptxas): a healthy candidate would be blamed for them.
    """
    driver = multiprocessing.parent_process()
    if driver is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)  # of this thread, and so of all that start later
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
