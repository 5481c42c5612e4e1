"""A job of a sweep where submitit runs it, on a cluster or beside the sweep: it leaves in time, and can go on."""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gemmpipe.cli.reports import INTERRUPTED, one_line
from gemmpipe.interrupt import stop_in_time

_INSIDE = "SUBMITIT_EXECUTOR"
"""In the environment of submitit's jobs, and of whatever is started there."""


def this_process() -> tuple[str, int]:
    """Its name among those of all machines."""
    return socket.gethostname(), os.getpid()


def is_submitted(sweep: tuple[str, int]) -> bool:
    """Whether this process is submitit's, started for a job of the sweep that runs in the process of that name."""
    main = multiprocessing.current_process().name == "MainProcess"  # others are joblib's
    return _INSIDE in os.environ and main and this_process() != sweep


def carry_out(run: Callable[[], int]) -> int:
    """Run a job, and return its exit code as the job's result.

    Before the job's time is over, or others take its node, submitit is sent a signal (USR2): the run stops as by
    Ctrl-C, and submitit has the job queued again, which goes on in the run's folder, or raises its own error: then the
    result is 130. Stopped by the cluster without that, the process ends with 130 and no result, since the cluster
    alone knows whether it starts the job again.
    """
    with _warned() as warning:
        try:
            code = run()
        except KeyboardInterrupt:
            code = INTERRUPTED
    if code != INTERRUPTED:
        return code
    if warning.number:
        warning.pass_on()
        return code
    raise SystemExit(INTERRUPTED)


class _Warning:
    """Submitit's signal, kept until the run has stopped."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self.number = 0
        """Of the signal, once it came."""

    def take(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            stop_in_time()

    def pass_on(self) -> None:
        """Let submitit queue the job again, which ends this process; returns, and says why, where it may not."""
        try:
            self._handler(self.number, None)
        except RuntimeError as refused:  # too often already: hydra.launcher.max_num_timeout
            print(f"gemmpipe: {one_line(str(refused))} hydra.launcher.max_num_timeout=", file=sys.stderr, flush=True)


@contextmanager
def _warned() -> Iterator[_Warning]:
    import submitit

    number = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
    handler = signal.getsignal(number)
    warning = _Warning(handler if callable(handler) else signal.default_int_handler)
    signal.signal(number, warning.take)
    # submitit takes no notice of it; while a run is at work it is the run's.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield warning
    finally:
        signal.signal(number, handler)
        signal.signal(signal.SIGTERM, before)
