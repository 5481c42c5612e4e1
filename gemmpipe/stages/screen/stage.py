"""The screen stage: lists candidates, compiles them, times them with few launches and keeps the best for bench."""

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Bucket, Candidate, Problem, Trial
from gemmpipe.core.errors import check_at_least
from gemmpipe.core.events import counted, verb
from gemmpipe.executors import drain_on_interrupt
from gemmpipe.search import TrialRequest
from gemmpipe.stages import POLL_S, Context, Stage
from gemmpipe.stages.cpu_budget import CpuBudget, RunEnd
from gemmpipe.stages.finals_work import usual_finals_s
from gemmpipe.stages.history import TrialCache
from gemmpipe.stages.needed_builds import compile_ahead
from gemmpipe.stages.rows import config_text, excluded_frame, trial_frame
from gemmpipe.stages.screen.candidates import SpaceReport
from gemmpipe.stages.screen.not_timed import not_timed_lines
from gemmpipe.stages.screen.scheduler import Scheduler
from gemmpipe.stages.screen.search_pool import SearchPool, SessionStarted
from gemmpipe.stages.screen.search_processes import search_pool_for
from gemmpipe.stages.screen.shortlist import (
    bucket_leaders,
    bucket_shortlists,
    cross_evaluate,
    register_candidate,
    shape_group_states,
    shortlist,
)
from gemmpipe.stages.screen.state import Bounds, ProblemState
from gemmpipe.stages.screen.work import ScreenWork, WorkEstimate, relative_work
from gemmpipe.templates.params import check_kernel_types

if TYPE_CHECKING:
    import pandas as pd

_PASS_FACTOR = 1.5  # by which a pass may be shorter or longer, as its screening lets expect
_PASS_SHARE = 0.7  # of the time that is left when a pass begins, which it usually takes: all of it, or little finals


@dataclass(frozen=True, kw_only=True)
class Screen(Stage):
    """Times candidates; keeps the fastest `keep`, the best of each backend, incumbents and each bucket's leaders."""

    keep: int
    margin_pct: float
    bucket_keep: int
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems",)
    gives: ClassVar[tuple[str, ...]] = ("shortlist", "trials")
    uses_device: ClassVar[bool] = True
    per_problem: ClassVar[bool] = True
    begins_cpu_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least(1, keep=self.keep)
        check_at_least(0, margin_pct=self.margin_pct, bucket_keep=self.bucket_keep)

    def check(self, context: Context) -> None:
        """Raises UserError for an axis or a value of the space that the family's kernels cannot have."""
        check_kernel_types(context.space, [own.label for own in context.family.implementations])
        for implementation in context.implementations:
            implementation.check(context.space)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the shortlist and the trials of the problems."""
        search_pool = search_pool_for(context, launches=self.timer.iters, keep=self.keep)
        bounds = context.cpu_budget.bounds if context.cpu_budget is not None else None
        bounds = bounds or Bounds(context.family.baseline, _unchecked_labels(context))
        if context.cpu_budget is not None:
            context.cpu_budget.bounds = bounds  # the next pass has more rows
        workers = len(context.pool.devices)
        finalists = partial(self._shortlist, context=context)
        work = WorkEstimate(
            context.problems, context.family, context.search, context.device, self.keep, workers, finalists
        )
        # Its finalists are known but for those that problems of other M add: what these need compiles meanwhile.
        ahead = partial(self._compile_ahead, context=context)
        scheduler = Scheduler(context, search_pool, self.timer, bounds, work, _deadline(context), ahead)
        rest_s = context.finals_s({}, self.keep) if context.finals_s is not None else 0.0
        context.events.emit("stage", "screen", unit="trials", rest_s=rest_s, expected_s=work.expected_s)
        budget_s = context.cpu_budget.end_s if context.cpu_budget is not None else None
        context.events.emit("progress", "listing configurations", most_s=budget_s)  # seconds, before any trial
        started_at = time.monotonic()
        with drain_on_interrupt(context.pool, scheduler.receive):
            states = self._start_searches(search_pool, scheduler, work, context)
            self._run_to_completion(scheduler, context, searching=True)
            budget = context.cpu_budget
            if not scheduler.past_deadline and (budget is None or budget.remaining_s > 0):
                for state, requests in list(cross_evaluate(states, context)):
                    scheduler.add_requests(state, requests)
            self._run_to_completion(scheduler, context)
            for state, requests in self._bucket_requests(states, context):
                scheduler.add_requests(state, requests)
            self._run_to_completion(scheduler, context)
        dropped = context.pool.cancel_builds()  # of searches that a budget ended: no request waits for them
        context.builds_ahead.take_back(dropped or ())  # a pool of a user's executor may return None
        _mark_cut_short(states, context)
        _account_idle(context, started_at)
        return self._tables(states, context)

    def _run_to_completion(self, scheduler: Scheduler, context: Context, *, searching: bool = False) -> None:
        while scheduler.step(POLL_S):
            self._report_progress(scheduler, context, searching=searching)

    def _report_progress(self, scheduler: Scheduler, context: Context, *, searching: bool) -> None:
        context.check()
        work, now = scheduler.work(searching=searching), scheduler.running_now
        if work is None:
            return
        problems = f"{scheduler.finished_count} of {counted(len(context.problems), 'problem')} done"
        text = f"{context.family.size_text(now.problem)}, {problems}" if now is not None else problems
        budget = context.cpu_budget
        end = run_end(work, scheduler, budget) if budget is not None else None
        if context.finals_s is not None:
            context.events.emit("rest", rest_s=context.finals_s(scheduler.fastest_us(), self.keep))
        elif context.device.kind == "cpu":
            # There finals take as long as the launches of large products; at first, as usual.
            usual_s = usual_finals_s(()) * len(context.problems)
            pace = budget.finals_pace if budget is not None else 1.0
            context.events.emit("rest", rest_s=pace * scheduler.finals_s() - usual_s)
        context.events.emit(
            "progress",
            text,
            done=work.done,
            total=work.expected,
            share=work.share,
            stage_s=work.left_s,
            stage_factor=work.left_factor,
            left_s=end.left_s if end is not None else None,
            left_range_s=end.range_s if end is not None else None,
            most_s=budget.end_s if budget is not None else None,
        )

    def _start_searches(
        self, search_pool: SearchPool, scheduler: Scheduler, work: WorkEstimate, context: Context
    ) -> list[ProblemState]:
        """The problems' states; each goes to the scheduler as soon as it is listed."""
        report = SpaceReport()
        states: list[ProblemState] = []
        for problems in _parts(context, work, states):
            expected = len(states) + len(problems)
            search_pool.submit(problems)
            while len(states) < expected:
                for started in search_pool.started():
                    report.add(started.summary.report)
                    states.append(_problem_state(started, context))
                    scheduler.add(states[-1])
                # On a CPU, listing would take cores from the kernels that are timed.
                if context.device.kind != "cpu":
                    scheduler.step(POLL_S, more=len(states) < expected)
                self._report_progress(scheduler, context, searching=True)
            if context.cpu_budget is not None:
                self._run_to_completion(scheduler, context, searching=True)
        for line in report.lines():
            context.events.emit("detail", line)
        for warning in report.warnings():
            context.events.emit("warning", warning)
        for line in not_timed_lines(context, report):
            context.events.emit("line", line)
        context.named_backends.clear()  # once per run, not per batch
        return states

    def _bucket_requests(
        self, states: list[ProblemState], context: Context
    ) -> list[tuple[ProblemState, list[TrialRequest]]]:
        """Requests for leaders at one M of a bucket at its other Ms: a bucket's candidate must be timed at each."""
        asked: list[tuple[ProblemState, list[TrialRequest]]] = []
        for group in shape_group_states(states):
            for bucket in all_buckets([c.problem for c in group], context):
                inside = [c for c in group if bucket.contains(c.problem.rows)]
                leaders = bucket_leaders(bucket, [c.results for c in inside], self.bucket_keep)
                for state in inside:
                    if context.cpu_budget is not None and state.cut_short:
                        continue  # no time for them either
                    missing = [c for c in leaders if c.id in state.summary.ids and c not in state.results]
                    for candidate in missing:
                        register_candidate(state, candidate, context)
                    first_rung_requests = [
                        TrialRequest(candidate=c, launches=self.timer.iters, first_rung=True) for c in missing
                    ]
                    asked.append((state, first_rung_requests))
        return asked

    def _tables(self, states: list[ProblemState], context: Context) -> "dict[str, pd.DataFrame]":
        import pandas as pd

        from gemmpipe.core import schema

        kept = self._shortlists(states, context)
        rows = []
        for state in states:
            for candidate in kept[state.problem.id]:
                trial = state.results[candidate]
                rows.append(_shortlist_row(state, candidate, trial, context))
        trials = [t for c in states for t in c.results.values()]
        names = context.journal.kernel_names
        excluded = excluded_frame([state.summary for state in states], names)
        counts = Counter(str(t.status) for t in trials)
        for state in states:
            counts.update(state.summary.excluded["status"])
        summary = ", ".join(f"{n:,} {status}" for status, n in counts.most_common()) or "no candidate"
        context.events.emit(
            "line", f"screen: {counted(len(states), 'problem')}, {summary}; {len(rows):,} go on to bench"
        )
        return {
            "shortlist": pd.DataFrame(rows, columns=list(schema.SHORTLIST)),
            "trials": pd.concat([excluded, trial_frame(trials, names)], ignore_index=True),
        }

    def _compile_ahead(self, state: ProblemState, context: Context) -> None:
        """On a CPU kernels are interpreted; the finals of an engine's function have the order of screening."""
        if context.device.kind != "cpu" and context.engine_target is None:
            compile_ahead(state.problem, self._shortlist(state, context), context)

    def _shortlist(self, state: ProblemState, context: Context) -> list[Candidate]:
        """The finalists of a problem by itself."""
        default = state.summary.default
        return shortlist(
            state.results,
            keep=self.keep,
            margin_pct=self.margin_pct,
            always=(*context.incumbents.get(state.problem.id, ()), *([] if default is None else [default])),
            library=context.family.baseline,
        )

    def _shortlists(self, states: list[ProblemState], context: Context) -> dict[str, list[Candidate]]:
        kept = {state.problem.id: dict.fromkeys(self._shortlist(state, context)) for state in states}
        for group in shape_group_states(states):
            problems = [c.problem for c in group]
            results = {c.problem.id: c.results for c in group}
            leaders = bucket_shortlists(problems, results, all_buckets(problems, context), self.bucket_keep)
            for problem_id, leading in leaders.items():
                kept[problem_id].update(dict.fromkeys(leading))
        return {problem_id: list(chosen) for problem_id, chosen in kept.items()}


def run_end(work: ScreenWork, scheduler: Scheduler, budget: CpuBudget) -> RunEnd | None:
    """The end of a run with more problems than its budget has time for; None while this is not known."""
    if not work.share and budget.passes > 1 and scheduler.expected_s > budget.end_s:
        return budget.run_end(_PASS_SHARE * budget.end_s, _PASS_FACTOR)
    if not work.share:
        return RunEnd(left_s=budget.end_s) if budget.ends_without_result else None
    if work.left_s is None or (not budget.left and work.left_s + scheduler.finals_s() < budget.remaining_s):
        return None
    now = time.monotonic()
    screening_s = min(work.left_s, max(0.0, budget.screening_ends_at - now))
    # Problems that follow are like those so far.
    finals_s = budget.finals_pace * scheduler.screened_finals_s() / budget.screened_share(screening_s)
    return budget.run_end(min(screening_s + finals_s, budget.end_s + budget.usually_late_s), _PASS_FACTOR)


def _parts(context: Context, work: WorkEstimate, states: Collection[ProblemState]) -> Iterator[list[Problem]]:
    """The problems to search side by side: all of them, or one by one until a budget for a CPU has no more time.

    Those that take too long for the time that is left are left out; not the first of a run. `states` are those of the
    problems before.
    """
    budget = context.cpu_budget
    if budget is None:
        yield _in_order(context)
        return
    budget.begin_screening()
    for index, problem in enumerate(context.problems):
        if index and time.monotonic() > budget.screening_ends_at:
            budget.left.update(left.id for left in context.problems[index:])
            return
        budget.pace_s = min(budget.pace_s, work.pace_s(states))
        if budget.pace_s < math.inf and not budget.has_time_for(work.least_trial_s(problem, budget.pace_s)):
            budget.left.add(problem.id)
        else:
            yield [problem]


def _problem_state(started: SessionStarted, context: Context) -> ProblemState:
    """The state of a newly listed problem."""
    cache = TrialCache(own=context.record, prior_records=context.prior_records, kernel_names=started.kernel_names)
    return ProblemState(started, cache, context.search.budget_trials)


def _mark_cut_short(states: list[ProblemState], context: Context) -> None:
    """Notes which searches the budget cut short, in the journal for resumed runs too."""
    for state in states:
        problem = state.problem.id
        if state.cut_short:
            context.journal.write("cut_short", problem=problem)
            context.cut_short.add(problem)
        elif problem in context.cut_short:
            context.journal.write("complete", problem=problem)
            context.cut_short.discard(problem)
    if cut := sum(c.cut_short for c in states):
        searches, rows = counted(cut, "search", "searches"), verb(cut, "its row is", "their rows are")
        context.events.emit("line", f"screen: {searches} cut short by the budget; {rows} provisional")


def _deadline(context: Context) -> float | None:
    """When the budget for screening in this run is spent, on the monotonic clock; None: no budget."""
    budget_s = context.search.budget_s
    return None if budget_s is None else time.monotonic() + budget_s - context.stage_seconds.get("screen_s", 0.0)


def _unchecked_labels(context: Context) -> set[str]:
    """Labels of implementations with unchecked results: the family's own kernels and an engine's replacement."""
    engines = [context.engine_target.implementation] if context.engine_target is not None else []
    return {i.label for i in (*context.family.implementations, *engines)}


def _in_order(context: Context) -> list[Problem]:
    """Sorted by shape, as problems of one shape share weights; on several devices the expensive ones first."""
    if len(context.pool.devices) == 1:
        return sorted(context.problems, key=lambda p: (str(p.shape_group), p.rows))
    return sorted(context.problems, key=lambda p: (-relative_work(context.family.spec(p)), p.id))


def _account_idle(context: Context, started_at: float) -> None:
    """Records how long devices waited for their workers to start, and between the first and the last finished build."""
    ready = [u.ready_at for u in context.pool.usage()[1:] if u.ready_at is not None]
    started_s = max([at - started_at for at in ready if at > started_at], default=0.0)
    context.stage_seconds.setdefault("idle_until_workers_ready_s", started_s)
    done = context.pool.builds_done
    if done:
        devices = context.pool.usage()[1:]
        idle_s = sum(u.idle_within(done[0], done[-1]) for u in devices) / len(devices)
        context.stage_seconds["idle_while_builds_pending_s"] = idle_s


def all_buckets(problems: list[Problem], context: Context) -> list[Bucket]:
    """The buckets of the formats, for problems that differ in M alone; engines' functions have their own search."""
    ms, engines = sorted(p.rows for p in problems), {target.name for target in context.engine_targets}
    return [b for name, f in context.formats if name not in engines for b in f.buckets(context.family, ms)]


def _shortlist_row(state: ProblemState, candidate: Candidate, trial: Trial, context: Context) -> dict[str, object]:
    incumbent = candidate in context.incumbents.get(state.problem.id, ())
    library = candidate.backend in context.family.baseline
    return {
        "problem": state.problem.id,
        "candidate": candidate.id,
        "libtype": candidate.backend,
        "config": config_text(candidate),
        "role": "incumbent" if incumbent else "library" if library else "",
        "status": str(trial.status),
        "us": trial.time_us,
        "reason": trial.error,
    }
