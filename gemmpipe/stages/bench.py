"""The bench stage: checks the shortlist against the reference and times it in interleaved rounds (the finals)."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import Job
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Device, Problem, Status, Trial
from gemmpipe.core.errors import check_at_least
from gemmpipe.core.events import counted, verb
from gemmpipe.executors import BuildResult, JobResult, drain_on_interrupt
from gemmpipe.stages import POLL_S, Context, Stage
from gemmpipe.stages.dispatch import DeviceMonitor, dispatch_jobs
from gemmpipe.stages.finals_cost import ExpectedFinal, FinalsCost, expected_s, expected_times_us
from gemmpipe.stages.finals_work import COMPARED, BudgetFit, FinalsWork, unsure_factor, usual_finals_s
from gemmpipe.stages.first_launches import FirstLaunchPace, first_launches
from gemmpipe.stages.needed_builds import FinalsBuilds
from gemmpipe.stages.rows import candidate_of, trial_frame

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS_TIMED = ("incumbent", *COMPARED)  # roles in the shortlist


@dataclass(frozen=True, kw_only=True)
class Bench(Stage):
    """The finals; a candidate passes when its error ratio is strictly below `err_ratio`.

    Rows timed on a CPU while other processes use more than `max_foreign_pct` of its cores are those of a shared device.
    """

    err_ratio: float
    max_foreign_pct: float | None
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems", "shortlist")
    gives: ClassVar[tuple[str, ...]] = ("trials",)
    uses_device: ClassVar[bool] = True
    per_problem: ClassVar[bool] = True
    begins_cpu_budget: ClassVar[bool] = True

    @property
    def separate_launches(self) -> bool:
        """True if other kernels run between timed launches: part of the rows' policy."""
        return self.timer.separate

    @property
    def both_clocks(self) -> bool:
        """True if products at the power limit are timed at full and at sustained clocks: part of their rows' policy."""
        return self.timer.sustained_ms > 0

    def __post_init__(self) -> None:
        if not 0 < self.err_ratio <= 1:
            raise ValueError(f"err_ratio={self.err_ratio:g}, expected above 0 and at most 1")

        check_at_least(0, max_foreign_pct=self.max_foreign_pct)

    def usual_s(self, device: Device) -> float:
        """20.3 s for 72 products with 30 rounds in two memory orders of x's scales (H200, 2026-11-23).

        On a CPU checks take longer than rounds.
        """
        return usual_finals_s(()) if device.kind == "cpu" else 0.08 + 0.0067 * self.timer.rounds

    def finals_s(self, context: Context, *, compared: bool = False) -> Callable[[Mapping[str, float], int], float]:
        """The expected seconds of the finals on a GPU, as `Context.finals_s` has them; of a comparison: `compared`."""
        usual_s, devices = self.usual_s(context.device), context.device_count
        if compared:
            costs = [self.cost(problem, context, all_rounds=True) for problem in context.problems]
            return lambda _, entries: sum(c.setup_s + entries * c.entry_s(None) for c in costs) / devices

        @cache
        def finals(finalists: int) -> list[ExpectedFinal]:
            costs = {p.id: self.cost(p, context) for p in context.problems}
            return [ExpectedFinal(screened=name, finalists=finalists, cost=cost) for name, cost in costs.items()]

        return lambda fastest_us, finalists: expected_s(finals(finalists), fastest_us, usual_s) / devices

    def cost(self, problem: Problem, context: Context, *, all_rounds: bool = False) -> FinalsCost:
        """What the finals of a problem cost; with `all_rounds` some finalists run all of them."""
        spec = context.family.spec(problem)
        return FinalsCost(
            family=context.family, spec=spec, timer=self.timer, device=context.device, all_rounds=all_rounds
        )

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the trials of the finals; screening trials of other candidates stay in the table."""
        import numpy as np
        import pandas as pd

        trials = self._finals(tables, context)
        counts = Counter(str(t.status) for t in trials)
        summary = ", ".join(f"{n:,} {status}" for status, n in counts.most_common())
        context.events.emit("line", f"bench: {counted(len(context.problems), 'problem')}, {summary or 'no finalist'}")
        if "trials" not in tables:
            return {"trials": trial_frame(trials, {})}
        screened, finalists = tables["trials"], {(t.problem, t.candidate.id) for t in trials}
        pairs = zip(screened["problem"].tolist(), screened["candidate"].tolist(), strict=True)
        repeated = np.array([pair in finalists for pair in pairs], dtype=bool)
        before = screened[repeated]
        names = dict(zip(before["candidate"], before["kernelName"], strict=True))
        return {"trials": pd.concat([screened[~repeated], trial_frame(trials, names)], ignore_index=True)}

    def _finals(self, tables: "dict[str, pd.DataFrame]", context: Context) -> list[Trial]:
        shortlist, budget = tables["shortlist"], context.cpu_budget
        # A screened candidate without a time has failed; one that was not screened (no status) comes from a table.
        ready = shortlist[shortlist["us"].notna() | (shortlist["status"] == "")]
        by_problem: dict[str, list[Mapping[Hashable, object]]] = {}
        for row in ready.to_dict("records"):
            by_problem.setdefault(str(row["problem"]), []).append(row)
        progress = _FinalsProgress(context)
        jobs = [progress.start(self._job(p, by_problem.get(p.id, []), context.finals)) for p in context.problems]
        total = len(jobs)
        work, pace = self._work(tables, by_problem, progress.pending, context)
        fit = BudgetFit(budget, work, tables, context) if budget is not None else None
        _emit_stage(work, total, context)
        if budget is not None:
            budget.begin_finals()
        libraries = {job.problem.id: job.library for job in jobs if job is not None}
        builds = _finals_builds([job for job in jobs if job is not None], ready, context)
        queue: list[Job] = []
        _queue_ready(queue, builds, progress, context)
        monitor = DeviceMonitor(context.journal, context.pool.devices)
        with drain_on_interrupt(context.pool, progress.receive):
            while progress.pending:
                monitor.sample()
                if fit is not None:
                    fit.shorten_next(queue, progress.pending, libraries)
                dispatch_jobs(queue, context)
                builds.send(enough_ready=bool(queue))
                for message in context.pool.poll(POLL_S):
                    builds.receive(message)
                    progress.receive(message)
                _queue_ready(queue, builds, progress, context)
                if fit is not None:
                    fit.leave_late(queue, progress.pending)
                context.check()
                _emit_progress(work, pace, fit, progress.pending, total, context)
        if fit is not None and (line := fit.line()):
            context.events.emit("line", line)
        return progress.trials

    def _work(
        self,
        tables: "dict[str, pd.DataFrame]",
        rows: Mapping[str, Sequence[Mapping[Hashable, object]]],
        pending: Mapping[str, Collection[Candidate]],
        context: Context,
    ) -> tuple[FinalsWork, FirstLaunchPace]:
        """The expected time of the open finalists, and its pace; `rows`: the shortlist by problem id."""
        problems = [p for p in context.problems if p.id in pending]
        costs = {
            p.id: self.cost(p, context, all_rounds=any(row["role"] in _ALWAYS_TIMED for row in rows[p.id]))
            for p in problems
        }
        compared = {(p.id, row["candidate"]) for p in problems for row in rows[p.id] if row["role"] in COMPARED}
        entries = {
            p: [c for c in sorted(pending[p.id], key=lambda c: c.id) if (p.id, c.id) in compared] for p in problems
        }
        times_us = expected_times_us(tables, context.problems)
        launches = first_launches(entries, context)
        first_s = {key: launch.seconds for key, launch in launches.items()}
        work = FinalsWork(rows, pending, costs, times_us, first_s)
        return work, FirstLaunchPace(launches, work, pending, len(context.pool.devices), time.monotonic())

    def _job(self, problem: Problem, rows: Sequence[Mapping[Hashable, object]], stage: str) -> FinalsJob:
        roles = {str(row["candidate"]): row["role"] for row in rows}
        return FinalsJob(
            stage=stage,
            problem=problem,
            finalists=tuple(candidate_of(str(row["libtype"]), str(row["config"])) for row in rows),
            library=frozenset(c for c, role in roles.items() if role == "library"),
            always_timed=frozenset(c for c, role in roles.items() if role in _ALWAYS_TIMED),
            unchecked=frozenset(c for c, role in roles.items() if role == "unlike"),
            timer=self.timer,
            err_ratio=self.err_ratio,
            max_foreign_pct=self.max_foreign_pct,
        )


def _emit_stage(work: FinalsWork, problems: int, context: Context) -> None:
    """Notify the listeners that the finals begin, with their expected time."""
    expected_s = work.total_s / len(context.pool.devices)
    context.events.emit(
        "stage", "bench", total=problems, unit="problems", rest_s=context.later_s, expected_s=expected_s
    )


def _emit_progress(
    work: FinalsWork,
    pace: FirstLaunchPace,
    fit: BudgetFit | None,
    pending: Mapping[str, set[Candidate]],
    total: int,
    context: Context,
) -> None:
    end = fit.run_end(pending) if fit is not None else None
    stage_s, range_s = pace.measure(pending, time.monotonic())
    context.events.emit(
        "progress",
        _text_now(pending, context),
        done=total - len(pending),
        total=total,
        share=work.share(pending),
        stage_s=stage_s,
        stage_factor=unsure_factor(len(pending)) if context.device.kind == "cpu" else 1.0,
        left_s=end.left_s if end is not None else None,
        left_range_s=end.range_s if end is not None else range_s,
        most_s=fit.most_s(pending) if fit is not None else None,
    )


def _text_now(pending: Collection[str], context: Context) -> str:
    """The problem that is timed now, and the number of problems that a budget for a CPU has left."""
    now = next((p for p in context.problems if p.id in pending), None)
    budget, parts = context.cpu_budget, [] if now is None else [context.family.size_text(now)]
    if budget is not None and budget.left and not budget.ends_run:
        left = len(budget.left)
        parts.append(f"{counted(left, 'problem')} {verb(left, 'does', 'do')} not fit into cpu_budget_s")
    return ", ".join(parts)


class _FinalsProgress:
    """Finished and open finalists; a problem is done when each of its finalists has a trial."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.trials: list[Trial] = []
        self.pending: dict[str, set[Candidate]] = {}
        """By problem id, the finalists without a trial."""

    def start(self, job: FinalsJob) -> FinalsJob | None:
        """Returns the part of a job that is still to do, or None.

        A finalist that failed in an earlier session is not tried again. If only some were timed, these are timed again,
        since the samples of all finalists are paired by round.
        """
        earlier = {t.candidate: t for t in self._context.record.of(job.stage, job.problem.id)}
        record = self._context.record
        if (job.stage, job.problem.id) in record.finished and job.problem.id not in record.cut_short:
            self.trials += earlier.values()
            return None
        if any(c not in earlier for c in job.candidates):
            earlier = {c: t for c, t in earlier.items() if t.time_us is None}
        known = [c for c in job.candidates if c in earlier]
        self.trials += [earlier[c] for c in known]
        rest = job.without(known)
        if not rest.candidates:
            self._write_done(job.problem)
            return None
        self.pending[job.problem.id] = set(rest.candidates)
        return rest

    def receive(self, message: BuildResult | JobResult) -> None:
        """Takes new trials of the finals and writes them to the journal."""
        if isinstance(message, BuildResult) or message.job.stage != self._context.finals:
            return
        job, open_ = message.job, self.pending.get(message.job.problem.id, set())
        received = {t.candidate: t for t in message.trials if t.candidate in open_}
        if message.complete:
            received |= {
                c: job.failed_trial(c, Status.DIED, "no result") for c in job.candidates if c in open_ - received.keys()
            }
        for candidate, trial in received.items():
            self._context.journal.trial(trial)
            self.trials.append(trial)
            open_.discard(candidate)
        if not open_ and self.pending.pop(job.problem.id, None) is not None:
            self._write_done(job.problem)

    def _write_done(self, problem: Problem) -> None:
        self._context.journal.write("done", stage=self._context.finals, problem=problem.id)


def _finals_builds(jobs: Sequence[FinalsJob], ready: "pd.DataFrame", context: Context) -> FinalsBuilds:
    # An engine's finals have candidates of neighbouring Ms, and another form than its screening.
    timed = ready if context.engine_target is not None else ready[ready["status"] != ""]
    return FinalsBuilds(jobs, set(zip(timed["problem"].tolist(), timed["candidate"].tolist(), strict=True)), context)


def _queue_ready(queue: list[Job], builds: FinalsBuilds, progress: _FinalsProgress, context: Context) -> None:
    """Queues the jobs with all builds; a finalist that cannot be compiled gets a failed trial."""
    ready = builds.take_ready()
    for job, failed in ready:
        trials = tuple(job.failed_trial(c, Status.COMPILE_ERROR, error) for c, error in failed.items())
        progress.receive(JobResult(job=job, trials=trials, complete=False))
        if len(failed) < len(job.candidates):
            queue.append(job.without(failed.keys()))
    if ready:  # problems of one shape follow each other, as they share weights
        order = {problem.id: place for place, problem in enumerate(context.problems)}
        queue.sort(key=lambda job: order[job.problem.id])
