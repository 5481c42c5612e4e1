"""Sweeps through submitit: a job stops in time and can be resumed; the sweep reports each job's outcome.

`run_submitted` runs in a job's process, on a cluster or on the sweep's machine. `submitted_sweep` runs in the process
of the sweep; a lost job does not end the others.
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
from gemmpipe.cli.errors import terminal_line
from gemmpipe.cli.overrides import override_key
from gemmpipe.core.errors import EXIT_INTERRUPTED, EnvironmentProblem, UserError
from gemmpipe.core.shell import shell_join
from gemmpipe.core.signals import request_stop
from gemmpipe.report.run_folder import can_resume

_SUBMITIT_VARIABLE = "SUBMITIT_EXECUTOR"
"""Set in the environment of submitit's jobs and their child processes."""
_LAUNCHER = "hydra/launcher"
_SINGLE_TASK_KEYS = ("hydra.launcher.nodes", "hydra.launcher.tasks_per_node")
_STOPPED = ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE")
"""States of a job that a user or its time limit ended."""


def process_name() -> tuple[str, int]:
    """(host, process id): identifies this process across machines."""
    return socket.gethostname(), os.getpid()


def is_submitted(sweep: tuple[str, int]) -> bool:
    """True if submitit started this process for a job of a sweep; `sweep` is the process of the sweep."""
    main = multiprocessing.current_process().name == "MainProcess"  # others are joblib's
    return _SUBMITIT_VARIABLE in os.environ and main and process_name() != sweep


def run_submitted(run: Callable[[], int]) -> int:
    """Run a job, and return its exit code as the job's result.

    Before its time limit or a preemption the job gets a signal (USR2): the run stops as by Ctrl-C, and submitit queues
    the job again, which resumes the run; if submitit refuses, the result is 130. Stopped by the cluster without that
    signal, the process ends with 130 and no result, since only the cluster decides whether the job starts again.
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
    """Records submitit's signal until the run has stopped."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self.number = 0
        """The signal's number once received, else 0."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            request_stop()

    def requeue(self) -> None:
        """Let submitit queue the job again, which ends this process; prints why and returns if submitit refuses."""
        try:
            self._handler(self.number, None)
        except RuntimeError as refused:  # requeued too often: hydra.launcher.max_num_timeout
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
    # submitit ignores SIGTERM; during a run the run handles it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield warning
    finally:
        signal.signal(number, handler)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def submitted_sweep(overrides: Sequence[str]) -> Iterator[None]:
    """Report each submitit job while Hydra runs a sweep; does nothing for other launchers.

    Raises UserError for overrides that would start one run several times.
    """
    launcher = next((each.partition("=")[2] for each in overrides if override_key(each) == _LAUNCHER), "")
    if not launcher.startswith("submitit"):
        yield
        return
    several = next(
        (each for each in overrides if override_key(each) in _SINGLE_TASK_KEYS and each.partition("=")[2] != "1"), None
    )
    if several is not None:
        raise UserError(f"{several}: a run is one process on one node; on several nodes: executor=ray")
    try:
        from submitit.core import core
    except ModuleNotFoundError:  # Hydra raises its own error for the launcher
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
        """The job that the sweep waits for."""

    def results(self, job: Any, results: Any) -> list[Any]:
        """A job's result, or the exit code for a job that ended without one."""
        from hydra.core.utils import JobReturn, JobStatus
        from submitit.core.utils import UncompletedJobError

        if self._open is None:
            _print(f"{self._launcher}: submitted; output of the jobs: {job.paths.folder.parent}/*/*_log.out")
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
        """Report that jobs keep running on the cluster after their sweep has ended."""
        if self._open is not None:
            command, name = self._open._cancel_command, self._open.job_id.partition("_")[0]
            _print(f"gemmpipe: the jobs keep running; '{command} {name}' cancels them", sys.stderr)


def _job_end(job: Any, error: RuntimeError) -> str:
    """The outcome of a job without a result, its log, and how to resume its run."""
    from submitit.core.utils import FailedJobError

    if isinstance(error, FailedJobError):  # its text has the traceback between two lines
        lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "-", "You can"))]
        outcome = f"failed: {lines[-1]}"
    else:
        outcome = f"ended without a result, {job.state}"
    number = job.submission().args[2]
    sweep = Path(job.paths.folder).parent.parent
    run = next((folder for folder in sweep.glob(f"{number}_*") if can_resume(folder)), None)
    more = f"; resume with: {shell_join(['gemmpipe', f'resume={run}'])}" if run is not None else ""
    return terminal_line(f"{outcome} ({job.paths.stderr}){more}")


def _print(line: str, stream: Any = None) -> None:
    with tolerating_closed_pipes():
        print(line, file=stream or sys.stdout, flush=True)
