"""A job of a sweep where submitit runs it, on a cluster or beside the sweep: it leaves in time, and can go on.

A sweep whose jobs submitit runs elsewhere: what becomes of each is told, and one that is lost takes none along.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.cli.errors import EXIT_INTERRUPTED, terminal_line
from gemmpipe.cli.overrides import override_key
from gemmpipe.cli.runs import can_resume
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.shell import shell_join
from gemmpipe.core.signals import request_stop

_SUBMITIT_VARIABLE = "SUBMITIT_EXECUTOR"
"""In the environment of submitit's jobs, and of whatever is started there."""


def process_name() -> tuple[str, int]:
    """Its name among those of all machines."""
    return socket.gethostname(), os.getpid()


def is_submitted(sweep: tuple[str, int]) -> bool:
    """Whether this process is submitit's, started for a job of the sweep that runs in the process of that name."""
    main = multiprocessing.current_process().name == "MainProcess"  # others are joblib's
    return _SUBMITIT_VARIABLE in os.environ and main and process_name() != sweep


def run_submitted(run: Callable[[], int]) -> int:
    """Run a job, and return its exit code as the job's result.

    Before the job's time is over, or others take its node, submitit is sent a signal (USR2): the run stops as by
    Ctrl-C, and submitit has the job queued again, which goes on in the run's folder, or raises its own error: then the
    result is 130. Stopped by the cluster without that, the process ends with 130 and no result, since the cluster
    alone knows whether it starts the job again.
    """
    with _catching_preemption() as warning:
        try:
            code = run()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    if code != EXIT_INTERRUPTED:
        return code
    if warning.number:
        warning.requeue()
        return code
    raise SystemExit(EXIT_INTERRUPTED)


class _PreemptionSignal:
    """Submitit's signal, kept until the run has stopped."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self.number = 0
        """Of the signal, once it came."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            request_stop()

    def requeue(self) -> None:
        """Let submitit queue the job again, which ends this process; returns, and says why, where it may not."""
        try:
            self._handler(self.number, None)
        except RuntimeError as refused:  # too often already: hydra.launcher.max_num_timeout
            print(
                f"gemmpipe: {terminal_line(str(refused))} hydra.launcher.max_num_timeout=", file=sys.stderr, flush=True
            )


@contextmanager
def _catching_preemption() -> Iterator[_PreemptionSignal]:
    import submitit

    number = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
    handler = signal.getsignal(number)
    warning = _PreemptionSignal(handler if callable(handler) else signal.default_int_handler)
    signal.signal(number, warning.on_signal)
    # submitit takes no notice of it; while a run is at work it is the run's.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield warning
    finally:
        signal.signal(number, handler)
        signal.signal(signal.SIGTERM, before)


_LAUNCHER = "hydra/launcher"
_SINGLE_TASK_KEYS = ("hydra.launcher.nodes", "hydra.launcher.tasks_per_node")
_STOPPED = ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE")
"""States of a job that somebody or its limit of time ended."""


@contextmanager
def submitted_sweep(overrides: Sequence[str]) -> Iterator[None]:
    """While Hydra runs a sweep of these words: what submitit is asked for is told; nothing where it has no part.

    Raises UserError for words that would start one run several times.
    """
    launcher = next((word.partition("=")[2] for word in overrides if override_key(word) == _LAUNCHER), "")
    if not launcher.startswith("submitit"):
        yield
        return
    odd = next(
        (word for word in overrides if override_key(word) in _SINGLE_TASK_KEYS and word.partition("=")[2] != "1"), None
    )
    if odd is not None:
        raise UserError(f"{odd}: a run is one process on one node; on several nodes: executor=ray")
    try:
        from submitit.core import core
    except ModuleNotFoundError:  # Hydra knows no such launcher, and says so
        yield
        return
    kind: Any = core.Job
    awaited, results = _SubmittedJobs(launcher), kind.results
    kind.results = lambda job: awaited.results(job, results)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        awaited.report_running_jobs()
        raise
    finally:
        kind.results = results
        signal.signal(signal.SIGTERM, before)


class _SubmittedJobs:
    """Jobs that a sweep waits for, one after another."""

    def __init__(self, launcher: str) -> None:
        self._launcher = launcher
        self._open: Any = None
        """The job that is waited for."""

    def results(self, job: Any, results: Any) -> list[Any]:
        """What a job returned, or the exit code that its end means."""
        from hydra.core.utils import JobReturn, JobStatus
        from submitit.core.utils import UncompletedJobError

        if self._open is None:
            _print(f"{self._launcher}: submitted; what the jobs say: {job.paths.folder.parent}/*/*_log.out")
        self._open = job
        try:
            [returned] = results(job)
        except UncompletedJobError as error:
            code = EXIT_INTERRUPTED if str(job.state).startswith(_STOPPED) else EnvironmentProblem.exit_code
            _print(f"job {job.job_id}: {_job_end(job, error)}", sys.stderr)
            return [JobReturn(_return_value=code, status=JobStatus.COMPLETED)]
        _print(f"job {job.job_id}: exit code {returned.return_value}; {job.paths.stdout}")
        return [returned]

    def report_running_jobs(self) -> None:
        """The jobs are the cluster's: they do not end with their sweep."""
        if self._open is not None:
            word, name = self._open._cancel_command, self._open.job_id.partition("_")[0]
            _print(f"gemmpipe: the jobs go on; '{word} {name}' ends them", sys.stderr)


def _job_end(job: Any, error: RuntimeError) -> str:
    """How a job ended that has no result, where more is said, and how to go on with its run."""
    from submitit.core.utils import FailedJobError

    if isinstance(error, FailedJobError):  # holds its traceback between two lines
        lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "-", "You can"))]
        said = f"failed: {lines[-1]}"
    else:
        said = f"ended without a result, {job.state}"
    number = job.submission().args[2]
    sweep = Path(job.paths.folder).parent.parent
    run = next((folder for folder in sweep.glob(f"{number}_*") if can_resume(folder)), None)
    more = f'; "{shell_join(["gemmpipe", f"resume={run}"])}" goes on' if run is not None else ""
    return terminal_line(f"{said} ({job.paths.stderr}){more}")


def _print(line: str, stream: Any = None) -> None:
    with tolerating_closed_pipes():
        print(line, file=stream or sys.stdout, flush=True)
