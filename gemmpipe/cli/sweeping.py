"""A sweep whose jobs submitit runs elsewhere: what becomes of each is told, and one that is lost takes none along."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemmpipe.cli.reports import INTERRUPTED, one_line
from gemmpipe.cli.streams import readers_may_leave
from gemmpipe.cli.unbegun import can_go_on
from gemmpipe.cli.words import key_of
from gemmpipe.errors import EnvironmentProblem, UserError
from gemmpipe.shell import joined

_LAUNCHER = "hydra/launcher"
_ONE = ("hydra.launcher.nodes", "hydra.launcher.tasks_per_node")
_STOPPED = ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE")
"""States of a job that somebody or its limit of time ended."""


@contextmanager
def jobs_elsewhere(words: Sequence[str]) -> Iterator[None]:
    """While Hydra runs a sweep of these words: what submitit is asked for is told; nothing where it has no part.

    Raises UserError for words that would start one run several times.
    """
    launcher = next((word.partition("=")[2] for word in words if key_of(word) == _LAUNCHER), "")
    if not launcher.startswith("submitit"):
        yield
        return
    odd = next((word for word in words if key_of(word) in _ONE and word.partition("=")[2] != "1"), None)
    if odd is not None:
        raise UserError(f"{odd}: a run is one process on one node; on several nodes: executor=ray")
    try:
        from submitit.core import core
    except ModuleNotFoundError:  # Hydra knows no such launcher, and says so
        yield
        return
    kind: Any = core.Job
    awaited, results = _Awaited(launcher), kind.results
    kind.results = lambda job: awaited.results(job, results)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        awaited.tell_who_goes_on()
        raise
    finally:
        kind.results = results
        signal.signal(signal.SIGTERM, before)


class _Awaited:
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
            _say(f"{self._launcher}: submitted; what the jobs say: {job.paths.folder.parent}/*/*_log.out")
        self._open = job
        try:
            [returned] = results(job)
        except UncompletedJobError as error:
            code = INTERRUPTED if str(job.state).startswith(_STOPPED) else EnvironmentProblem.exit_code
            _say(f"job {job.job_id}: {_end_of(job, error)}", sys.stderr)
            return [JobReturn(_return_value=code, status=JobStatus.COMPLETED)]
        _say(f"job {job.job_id}: exit code {returned.return_value}; {job.paths.stdout}")
        return [returned]

    def tell_who_goes_on(self) -> None:
        """The jobs are the cluster's: they do not end with their sweep."""
        if self._open is not None:
            word, name = self._open._cancel_command, self._open.job_id.partition("_")[0]
            _say(f"gemmpipe: the jobs go on; '{word} {name}' ends them", sys.stderr)


def _end_of(job: Any, error: RuntimeError) -> str:
    """How a job ended that has no result, where more is said, and how to go on with its run."""
    from submitit.core.utils import FailedJobError

    if isinstance(error, FailedJobError):  # holds its traceback between two lines
        lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "-", "You can"))]
        said = f"failed: {lines[-1]}"
    else:
        said = f"ended without a result, {job.state}"
    number = job.submission().args[2]
    sweep = Path(job.paths.folder).parent.parent
    run = next((folder for folder in sweep.glob(f"{number}_*") if can_go_on(folder)), None)
    more = f'; "{joined(["gemmpipe", f"resume={run}"])}" goes on' if run is not None else ""
    return one_line(f"{said} ({job.paths.stderr}){more}")


def _say(line: str, stream: Any = None) -> None:
    with readers_may_leave():
        print(line, file=stream or sys.stdout, flush=True)
