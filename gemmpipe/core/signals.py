"""Signal handling: the first Ctrl-C lets running jobs finish, the second aborts; workers end with their driver.

* Before a run handles signals (`handle_signals`), `startup_interrupt` does. It defers KeyboardInterrupt during an
  import, which would swallow the exception or leave a module half initialised.
* Workers block the signals that terminals and SLURM send to all processes.
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

from gemmpipe.core.errors import EXIT_INTERRUPTED, GemmpipeError
from gemmpipe.core.events import Events

_IMPORT_POLL_S = 0.02
_IMPORTING = "<frozen importlib._bootstrap"
_PARENT_POLL_S = 1.0
_GRACE_S = 10.0
"""Time for a run without workers to reach `check` after a signal: its current step may take minutes or never end."""
DRAIN_S = 10.0
"""The longest wait for running jobs after an interrupt."""
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that terminals and SLURM send to all processes of a run; only the driver handles them."""


class _StartupInterrupt:
    """The state of a request to stop in a process before its run handles signals."""

    def __init__(self) -> None:
        self.requested = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: raises KeyboardInterrupt after the current import; a second signal ends the process.

        torch clears exceptions raised while it imports numpy, and one raised during its own C++ import ends the
        process.
        """
        again = self.requested and number != signal.SIGALRM
        self.requested = True
        if not _is_importing(frame):
            self.cancel_alarm()
            raise KeyboardInterrupt
        if again:
            os.write(2, b"gemmpipe: interrupted\n")
            os._exit(EXIT_INTERRUPTED)
        signal.signal(signal.SIGALRM, self.on_signal)
        signal.setitimer(signal.ITIMER_REAL, _IMPORT_POLL_S)

    def cancel_alarm(self) -> None:
        """Stop polling for the end of an import."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a request to stop is pending: deferred by an import, or swallowed."""
        if self.requested:
            self.cancel_alarm()
            raise KeyboardInterrupt


startup_interrupt = _StartupInterrupt()
"""The instance of this process: the command line installs its handler, a run checks it before installing its own."""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


class Interrupted(GemmpipeError):
    """The user asked to stop; all finished work is written."""

    exit_code = EXIT_INTERRUPTED


class OutOfTime(Interrupted):
    """The run's time budget is spent; all finished work is written, and the run counts as successful."""

    exit_code = 0


class Stop:
    """The state of a run's request to stop: by the user, or after `budget_s` seconds."""

    def __init__(self, events: Events, budget_s: float | None) -> None:
        self._events = events
        self._budget_s = budget_s
        self._began = time.monotonic()
        self.requested = False
        self.has_workers = False
        """True while jobs run on devices: a stop waits for their results, and the executor bounds their time."""
        self._reported = False
        self._alarm: tuple[object] | None = None

    def check(self) -> None:
        """Raise Interrupted after a request to stop, OutOfTime after the budget."""
        if self.requested:
            self.cancel_alarm()
            # Not reported in the handler, which may have interrupted a print.
            running = f"running jobs get {DRAIN_S:.0f} s to finish, then results" if self.has_workers else "results"
            self._report("stopping", f"interrupted: {running} are saved; Ctrl-C again stops at once")
            raise Interrupted("interrupted")
        if self._budget_s is not None and time.monotonic() - self._began > self._budget_s:
            self._report("line", f"budget_s={self._budget_s:g}: time budget reached; unfinished problems are skipped")
            raise OutOfTime("out of time")

    def _report(self, kind: str, text: str) -> None:
        if not self._reported:
            self._reported = True
            self._events.emit(kind, text)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: records the first signal, raises KeyboardInterrupt at the second."""
        if self.requested:
            self.cancel_alarm()
            raise KeyboardInterrupt
        self.requested = True
        if not self.has_workers and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            self._alarm = (signal.signal(signal.SIGALRM, self._overdue),)
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S)

    def _overdue(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: acts like a second signal, since `check` was not called in time."""
        self.cancel_alarm()
        if not self.has_workers:
            raise KeyboardInterrupt

    def cancel_alarm(self) -> None:
        """Cancel the alarm that limits the wait for a call of `check`."""
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            (handler,), self._alarm = self._alarm, None
            signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]


_active_stops: list[Stop] = []
"""The stops of the runs in this process that handle signals; the innermost is last."""


def request_stop() -> None:
    """Request that the run of this process stops after its running jobs.

    Raises KeyboardInterrupt if no run handles signals: it has not begun, or has ended.
    """
    if not _active_stops:
        raise KeyboardInterrupt
    _active_stops[-1].requested = True


def stop_requested() -> bool:
    """True once a signal has reached the run of this process, also before the run notices it."""
    return bool(_active_stops) and _active_stops[-1].requested


@contextmanager
def handle_signals(events: Events, budget_s: float | None = None) -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP within the block; outside the main thread no handler is installed.

    Raises KeyboardInterrupt if a signal came before and has not ended the process yet.
    """
    stop = Stop(events, budget_s)
    before = {}
    _active_stops.append(stop)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
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
    """Watches the parent that started this process for the jobs of a sweep."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.job_running = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self.parent:
            time.sleep(_PARENT_POLL_S)
        if not self.job_running:
            os._exit(Interrupted.exit_code)
        os.kill(os.getpid(), signal.SIGTERM)


_sweep_watcher = functools.cache(_SweepWatcher)


@contextmanager
def stop_with_sweep() -> Iterator[None]:
    """In a process that a launcher started for jobs: if the sweep is killed, stop as after SIGTERM, then exit.

    joblib's processes would finish the job, which takes hours, and wait minutes for another one.
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
        if os.getppid() != sweep.parent:
            os._exit(Interrupted.exit_code)  # no process is left to handle an exception


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started within the block, and their children, never get _GROUP_SIGNALS."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # pending signals reach this process now


def exit_with_driver() -> None:
    """In a worker, compile or search process: exit when the driver exits, or on SIGTERM from the driver.

    A process that hangs in a kernel reads no pipe, and would keep its device. Signals from other processes stay
    blocked, also in child processes (ptxas): a valid candidate would be blamed for them.
    """
    driver = multiprocessing.parent_process()
    if driver is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)  # for this thread and all threads started later
    has_sigwaitinfo = hasattr(signal, "sigwaitinfo")
    if not has_sigwaitinfo:  # on macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait_for_driver() -> None:
        driver.join()
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_sigterm() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != driver.pid:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_driver, daemon=True).start()
    if has_sigwaitinfo:
        threading.Thread(target=wait_for_sigterm, daemon=True).start()
