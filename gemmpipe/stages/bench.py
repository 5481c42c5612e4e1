"""The bench stage (accurate-bench): checks the shortlist against the reference and times it in interleaved rounds."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Problem, Trial
from gemmpipe.executors import Finished
from gemmpipe.jobs.finals import FinalsJob
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.rows import candidate_of, problems_of, trial_frame
from gemmpipe.timer import Timer

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5
_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Bench(Stage):
    """Finals: a candidate passes when its error ratio is strictly below `err_ratio`."""

    err_ratio: float
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems", "shortlist")
    gives: ClassVar[tuple[str, ...]] = ("trials",)
    uses_device: ClassVar[bool] = True

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The finals' trials; screening trials of candidates that did not get here stay in the table."""
        import pandas as pd

        problems = problems_of(context.family, tables["problems"])
        trials = self._finals(problems, tables["shortlist"], context)
        names = (
            dict(zip(tables["trials"]["candidate"], tables["trials"]["kernelName"], strict=True))
            if ("trials" in tables)
            else {}
        )
        finals = trial_frame(trials, names)
        counts = Counter(str(t.status) for t in trials)
        summary = ", ".join(f"{n:,} {status}" for status, n in counts.most_common())
        context.events.emit("line", f"bench: {len(problems)} problems, {summary}")
        if "trials" not in tables:
            return {"trials": finals}
        screened = tables["trials"]
        key = ["problem", "candidate"]
        left = screened.merge(finals[key], on=key, how="left", indicator=True)["_merge"] == "left_only"
        return {"trials": pd.concat([screened[left.to_numpy()], finals], ignore_index=True)}

    def _finals(self, problems: list[Problem], shortlist: "pd.DataFrame", context: Context) -> list[Trial]:
        by_problem = dict(tuple(shortlist.groupby("problem", sort=False)))
        jobs = [self._job(p, by_problem[p.id]) for p in problems if p.id in by_problem]
        trials: list[Trial] = []
        waiting: list[FinalsJob] = []
        for job in jobs:
            if ("bench", job.problem.id) in context.record.finished:
                trials += context.record.of("bench", job.problem.id)
            else:
                waiting.append(job)
        context.events.emit("stage", "bench", total=len(jobs))
        done = len(jobs) - len(waiting)
        left = len(waiting)
        queue = iter(waiting)
        while left:
            self._hand_out(queue, context)
            for message in context.pool.poll(_WAIT_S):
                if isinstance(message, Finished):
                    trials += message.trials
                    left -= self._note(message, context)
            context.check()
            context.events.emit("progress", done=done + len(waiting) - left)
        return trials

    def _hand_out(self, queue: "object", context: Context) -> None:
        """Give the next finals to whoever has room; all candidates of a problem are timed on one device."""
        for worker in range(len(context.pool.devices)):
            while context.pool.backlog(worker) < _AHEAD:
                job = next(queue, None)  # type: ignore[call-overload]
                if job is None:
                    return
                context.journal.launch("bench", job.problem.id, list(job.candidates))
                context.pool.submit(job, worker)

    def _note(self, message: Finished, context: Context) -> bool:
        """Write what came; whether the problem is done."""
        for trial in message.trials:
            context.journal.trial(trial)
        if message.complete:
            context.journal.write("done", stage="bench", problem=message.job.problem.id)
        return message.complete

    def _job(self, problem: Problem, rows: "pd.DataFrame") -> FinalsJob:
        timed = rows[rows["us"].notna()]
        records = timed[["libtype", "config", "candidate", "role"]].itertuples(index=False)
        finalists, library, kept = [], set(), set()
        for libtype, config, candidate_id, role in records:
            finalists.append(candidate_of(libtype, config))
            if role == "library":
                library.add(candidate_id)
            if role == "incumbent":
                kept.add(candidate_id)
        return FinalsJob(
            stage="bench",
            problem=problem,
            finalists=tuple(finalists),
            library=frozenset(library),
            kept=frozenset(kept),
            timer=self.timer,
            err_ratio=self.err_ratio,
        )
