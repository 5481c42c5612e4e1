"""The called stage of verify: each row of a table as a program calls it, through gemmpipe.runtime's function."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe import table
from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.events import counted
from gemmpipe.executors import Built, Finished, finishing
from gemmpipe.jobs import Job
from gemmpipe.jobs.calling import BOUND, CALLED, CallJob
from gemmpipe.operand_types import ORDERS
from gemmpipe.paired import paired_ratio
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.dealing import hand_out
from gemmpipe.stages.rows import candidate_of, problems_of
from gemmpipe.timer import Timer

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5
_TIMED = (str(Status.OK), str(Status.DROPPED))


@dataclass(frozen=True, kw_only=True)
class Called(Stage):
    """Calls are timed in a graph of cold operands (on a CPU plainly), in turns with the launch that the row names.

    The run time looks up in the table under test alone, in each layout of x's scales that a row is for.
    """

    err_ratio: float
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems", "selections", "trials")
    gives: ClassVar[tuple[str, ...]] = ("called",)
    uses_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.err_ratio <= 1:
            raise ValueError(f"err_ratio={self.err_ratio:g}, expected above 0 and at most 1")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """`called`: a row a problem, candidate and layout, or the reason why there is none (`table.CALLED`)."""
        import pandas as pd

        jobs = list(self._jobs(tables, context))
        trials = _run(jobs, context)
        rows = [row for job in jobs for row in _rows(job, trials.get((job.problem.id, job.candidate), []))]
        frame = pd.DataFrame(rows, columns=list(table.CALLED))
        said = f"{CALLED}: {counted(len(jobs), 'row')}"
        context.events.emit("line", said if rows or not jobs else f"{said}, no function in gemmpipe.runtime")
        return {"called": frame}

    def _jobs(self, tables: "dict[str, pd.DataFrame]", context: Context) -> Iterator[CallJob]:
        """One for each row whose winner was timed in the finals."""
        if context.table is None:
            return
        problems = {problem.id: problem for problem in problems_of(context.family, tables["problems"])}
        finals = tables["trials"][tables["trials"]["status"].isin(_TIMED)]
        timed = {(str(p), str(c)): (lib, config) for p, c, lib, config in finals[_NAMED].itertuples(index=False)}
        wanted = tables["selections"][["problem", "candidate"]].drop_duplicates()
        for name, candidate in wanted.itertuples(index=False):
            if (str(name), str(candidate)) in timed:
                yield self._job(problems[str(name)], candidate_of(*timed[str(name), str(candidate)]), context.table)

    def _job(self, problem: Problem, candidate: Candidate, path: Path) -> CallJob:
        return CallJob(
            stage=CALLED,
            problem=problem,
            candidate=candidate,
            table=path.resolve(),
            changed_ns=path.stat().st_mtime_ns,
            timer=self.timer,
            err_ratio=self.err_ratio,
            asks=(candidate,),
        )


_NAMED = ["problem", "candidate", "libtype", "config"]


def _run(jobs: list[CallJob], context: Context) -> dict[tuple[str, Candidate], list[Trial]]:
    """The trials of each problem and candidate; what an earlier session of the run has is not timed again."""
    found: dict[tuple[str, Candidate], list[Trial]] = {}
    for job in jobs:
        stages = [CALLED, *(f"{word} {order}" for word in (CALLED, BOUND) for order in ORDERS)]
        earlier = [t for s in stages for t in context.record.of(s, job.problem.id) if t.candidate == job.candidate]
        if (CALLED, job.problem.id) in context.record.finished and earlier:
            found[job.problem.id, job.candidate] = earlier
    queue: list[Job] = [job for job in jobs if (job.problem.id, job.candidate) not in found]
    open_ = {(job.problem.id, job.candidates) for job in queue}
    total = len(open_)

    def hear(message: Built | Finished) -> None:
        if isinstance(message, Built) or message.job.stage != CALLED or not isinstance(message.job, CallJob):
            return
        for trial in message.trials:
            context.journal.trial(trial)
            found.setdefault((trial.problem, trial.candidate), []).append(trial)
        if message.complete:
            open_.discard((message.job.problem.id, (message.job.candidate,)))
            context.journal.write("done", stage=CALLED, problem=message.job.problem.id)

    context.events.emit("stage", CALLED, total=total)
    with finishing(context.pool, hear):
        while open_:
            hand_out(queue, context)
            for message in context.pool.poll(_WAIT_S):
                hear(message)
            context.check()
            context.events.emit("progress", done=total - len(open_))
    return found


def _rows(job: CallJob, trials: list[Trial]) -> Iterator[Mapping[str, object]]:
    place = {"problem": job.problem.id, "candidate": job.candidate.id}
    stages = {trial.stage: trial for trial in trials}
    for order in ORDERS:
        called, bound = stages.get(f"{CALLED} {order}"), stages.get(f"{BOUND} {order}")
        if called is not None and bound is not None:
            ratio = paired_ratio(called.samples_us, bound.samples_us)
            times = {"called_us": called.time_us, "bound_us": bound.time_us}
            said = {"called_ratio": ratio.median, "called_low": ratio.low, "called_high": ratio.high}
            yield {**place, "layout": order, **times, **said, "called_error": ""}
    if (failed := stages.get(CALLED)) is not None:
        yield {**place, "called_error": failed.error or str(failed.status)}
