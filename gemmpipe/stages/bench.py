"""The bench stage (accurate-bench): checks the shortlist against the reference and times it in interleaved rounds."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.events import counted
from gemmpipe.executors import Built, Finished, finishing
from gemmpipe.jobs import Job
from gemmpipe.jobs.finals import FinalsJob
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.dealing import hand_out
from gemmpipe.stages.needed_builds import compile_further
from gemmpipe.stages.rows import candidate_of, problems_of, trial_frame
from gemmpipe.stages.weather import Weather
from gemmpipe.timer import Timer

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Bench(Stage):
    """Finals: a candidate passes when its error ratio is strictly below `err_ratio`."""

    err_ratio: float
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems", "shortlist")
    gives: ClassVar[tuple[str, ...]] = ("trials",)
    uses_device: ClassVar[bool] = True
    races: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.err_ratio <= 1:
            raise ValueError(f"err_ratio={self.err_ratio:g}, expected above 0 and at most 1")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The finals' trials; screening trials of candidates that did not get here stay in the table."""
        import pandas as pd

        problems = problems_of(context.family, tables["problems"])
        trials = self._finals(problems, tables["shortlist"], context)
        counts = Counter(str(t.status) for t in trials)
        summary = ", ".join(f"{n:,} {status}" for status, n in counts.most_common())
        context.events.emit("line", f"bench: {counted(len(problems), 'problem')}, {summary or 'no finalist'}")
        if "trials" not in tables:
            return {"trials": trial_frame(trials, {})}
        screened, finalists = tables["trials"], {(t.problem, t.candidate.id) for t in trials}
        pairs = zip(screened["problem"].tolist(), screened["candidate"].tolist(), strict=True)
        again = np.array([pair in finalists for pair in pairs], dtype=bool)
        before = screened[again]
        names = dict(zip(before["candidate"], before["kernelName"], strict=True))
        return {"trials": pd.concat([screened[~again], trial_frame(trials, names)], ignore_index=True)}

    def _finals(self, problems: list[Problem], shortlist: "pd.DataFrame", context: Context) -> list[Trial]:
        # Who was screened and has no time failed there; who was not screened comes from a table.
        ready = shortlist[shortlist["us"].notna() | (shortlist["status"] == "")]
        by_problem: dict[str, list[Mapping[Hashable, object]]] = {}
        for row in ready.to_dict("records"):
            by_problem.setdefault(str(row["problem"]), []).append(row)
        tally = _Tally(context)
        jobs = [tally.begin(self._job(p, by_problem.get(p.id, []), context.finals)) for p in problems]
        total = len(jobs)
        context.events.emit("stage", "bench", total=total)
        queue: list[Job] = list(_compiled([job for job in jobs if job is not None], ready, tally, context))
        weather = Weather(context.journal, context.pool.devices)
        with finishing(context.pool, tally.hear):
            while tally.open:
                weather.look()
                hand_out(queue, context)
                for message in context.pool.poll(_WAIT_S):
                    tally.hear(message)
                context.check()
                context.events.emit("progress", done=total - len(tally.open))
        return tally.trials

    def _job(self, problem: Problem, rows: Sequence[Mapping[Hashable, object]], stage: str) -> FinalsJob:
        roles = {str(row["candidate"]): row["role"] for row in rows}
        return FinalsJob(
            stage=stage,
            problem=problem,
            finalists=tuple(candidate_of(str(row["libtype"]), str(row["config"])) for row in rows),
            library=frozenset(c for c, role in roles.items() if role == "library"),
            kept=frozenset(c for c, role in roles.items() if role in ("incumbent", "compared", "unlike")),
            unchecked=frozenset(c for c, role in roles.items() if role == "unlike"),
            timer=self.timer,
            err_ratio=self.err_ratio,
        )


class _Tally:
    """What is finished and what is open; a problem is done when each of its finalists has a trial."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.trials: list[Trial] = []
        self.open: dict[str, set[Candidate]] = {}
        """By problem id, the finalists without a trial."""

    def begin(self, job: FinalsJob) -> FinalsJob | None:
        """What is still to do of a job, or None.

        A finalist that failed in an earlier session is not tried again. Those that were timed are timed again, unless
        all were: their rounds belong together.
        """
        earlier = {t.candidate: t for t in self._context.record.of(job.stage, job.problem.id)}
        record = self._context.record
        if (job.stage, job.problem.id) in record.finished and job.problem.id not in record.cut:
            self.trials += earlier.values()
            return None
        if any(c not in earlier for c in job.candidates):
            earlier = {c: t for c, t in earlier.items() if t.time_us is None}
        known = [c for c in job.candidates if c in earlier]
        self.trials += [earlier[c] for c in known]
        rest = job.without(known)
        if not rest.candidates:
            self._done(job.problem)
            return None
        self.open[job.problem.id] = set(rest.candidates)
        return rest

    def hear(self, message: Built | Finished) -> None:
        """Write what is news of the finals."""
        if isinstance(message, Built) or message.job.stage != self._context.finals:
            return
        job, open_ = message.job, self.open.get(message.job.problem.id, set())
        told = {t.candidate: t for t in message.trials if t.candidate in open_}
        if message.complete:
            told |= {c: job.failed(c, Status.DIED, "no result") for c in job.candidates if c in open_ - told.keys()}
        for candidate, trial in told.items():
            self._context.journal.trial(trial)
            self.trials.append(trial)
            open_.discard(candidate)
        if not open_ and self.open.pop(job.problem.id, None) is not None:
            self._done(job.problem)

    def _done(self, problem: Problem) -> None:
        self._context.journal.write("done", stage=self._context.finals, problem=problem.id)


def _compiled(jobs: Sequence[FinalsJob], ready: "pd.DataFrame", tally: _Tally, context: Context) -> Iterator[FinalsJob]:
    """The jobs, once what they launch is compiled; a finalist that cannot be compiled has its trial."""
    timed = ready[ready["status"] != ""]
    screened = set(zip(timed["problem"].tolist(), timed["candidate"].tolist(), strict=True))
    failures = compile_further(jobs, screened, context)
    for job in jobs:
        failed = failures.get(job.problem.id, {})
        trials = tuple(job.failed(c, Status.COMPILE_ERROR, error) for c, error in failed.items())
        tally.hear(Finished(job=job, trials=trials, complete=False))
        if len(failed) < len(job.candidates):
            yield job.without(failed.keys())
