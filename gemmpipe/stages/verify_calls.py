"""The verify_calls stage: times each row of a tuned table through gemmpipe.runtime's function, as a program calls it.

The same rounds time the bare launch of the row's candidate, so that the ratio is the cost of the call.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.bench.jobs import LONG_LAUNCH_US, RUNNING_SEVERAL, SETTING_UP, Job, WorkerContext, round_samples
from gemmpipe.bench.setup import ProblemSetup
from gemmpipe.bench.timer import TimedReplay, Timer, paired_ratio
from gemmpipe.core import schema
from gemmpipe.core.data import TIMED, Candidate, Device, Problem, Status, Trial
from gemmpipe.core.events import counted
from gemmpipe.executors import BuildResult, JobResult, drain_on_interrupt
from gemmpipe.family import Family, load_family
from gemmpipe.family.dtypes import SCALE_ORDERS
from gemmpipe.runtime.single_table import (
    EntryPointCall,
    SingleTableDispatch,
    dispatching_with,
    entry_point_call,
    single_table_dispatch,
)
from gemmpipe.stages import POLL_S, Context, Stage
from gemmpipe.stages.dispatch import dispatch_jobs
from gemmpipe.stages.finals_cost import FinalsCost
from gemmpipe.stages.rows import candidate_of

if TYPE_CHECKING:
    import pandas as pd


CALLED, BOUND = "called", "bound"
"""The beginning of a trial's stage (the runtime's function, or the candidate's bare launch); the layout follows."""

_WARM_US = 30_000  # of replays before the first sample


class DispatchMismatch(Exception):
    """The reason why the runtime does not launch the row's candidate."""


@dataclass(frozen=True, kw_only=True)
class CallJob(Job):
    """Times the runtime's function on a problem that a row of `table` has, and the row's launch, in turns.

    Each layout of x's scales that the row is for gives two trials with samples paired by round. A family without a
    function in gemmpipe.runtime gives none.
    """

    stage: str
    problem: Problem
    candidate: Candidate
    table: Path
    """The table with the row; the runtime reads no other."""
    changed_ns: int
    """Modification time of the file: part of the key under which workers cache its contents."""
    timer: Timer
    err_ratio: float
    pending: tuple[Candidate, ...] = ()
    """The candidate, until it is timed."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.pending

    def without(self, done: Collection[Candidate]) -> "CallJob":
        return replace(self, pending=tuple(c for c in self.pending if c not in done))

    def run(self, context: WorkerContext) -> list[Trial]:
        trials: list[Trial] = []
        with context.timed("operands"):
            context.in_flight.begin(SETTING_UP)
            setup = context.bench.set_up(self.problem)
            call = entry_point_call(context.bench.family, setup.spec)
            setup.reference()
            for index in range(setup.sets):
                setup.weights(index), setup.out(index)
            dispatch = _read(context.bench.family.module, self.table, self.changed_ns)
            context.clock.synchronize()
        if call is None:
            return trials
        with context.timed("called"), dispatching_with(dispatch):
            found = self.attempt(context, trials, 0, partial(self._time, context, setup, call, dispatch))
        return trials + (found or [])

    def _time(
        self,
        context: WorkerContext,
        setup: ProblemSetup,
        call: EntryPointCall,
        dispatch: SingleTableDispatch,
        candidate: Candidate,
    ) -> list[Trial]:
        """The trials of each layout, or a failed one with the reason. Raises what a launch raises."""
        found: list[Trial] = []
        for order in setup.spec.x_scale_orders:
            dispatch.clear_cache()
            try:
                error = self._check(context, setup, order, call, dispatch)
            except DispatchMismatch as reason:
                return [self.failed_trial(candidate, Status.INCORRECT, str(reason))]
            bind = setup.binder(candidate, order)
            launch = bind(0)
            launch(), context.clock.synchronize()
            time_us = min(context.clock.sequence([launch] * 3))
            many = context.clock.launches_per_sample(time_us, setup.sets)
            calls = [partial(call, setup.inputs(i, order), setup.weights(i)) for i in range(min(many, setup.sets))]
            for each in calls:  # a candidate prepares its weight before a graph is captured
                each()
            called = self._replay(context, calls, many)
            bound = self._replay(context, [bind(i) for i in range(len(calls))], many)
            rounds = self.timer.rounds_for(time_us, many)
            warm_us = max(_WARM_US, 1000 * self.timer.sustained_ms_of(context.bench.family, setup.spec))
            for _ in range(_warm_replays(context, warm_us, time_us * many)):
                called(), bound()
            context.in_flight.begin(RUNNING_SEVERAL if time_us < LONG_LAUNCH_US else 0)
            pairs = [(called(), bound()) if turn % 2 else (bound(), called())[::-1] for turn in range(rounds)]
            context.in_flight.begin(0)
            for name, samples in zip((CALLED, BOUND), zip(*pairs, strict=True), strict=True):
                found.append(self._trial(f"{name} {order}", samples, many, error))
        return found

    def _check(
        self,
        context: WorkerContext,
        setup: ProblemSetup,
        order: str,
        call: EntryPointCall,
        dispatch: SingleTableDispatch,
    ) -> float:
        """The error ratio of a call. Raises DispatchMismatch if another candidate ran or the result is wrong."""
        out = call(setup.inputs(0, order), setup.weights(0))
        context.clock.synchronize()
        name = context.bench.family.entry_point
        (selected,) = dispatch.selected
        if (
            selected.step != "exact"
            or selected.runnable.candidate != self.candidate
            or selected.runnable.rows is not None
        ):
            source = "the rules" if selected.step == "fallback" else f"{selected.step} {selected.source}"
            raise DispatchMismatch(f"{name} launches {selected.description} ({source}), not this row")
        error = setup.error_ratio(out.view(setup.spec.out_shape))
        if not error < self.err_ratio:
            raise DispatchMismatch(f"{name}: error ratio {error:.4f}, must be below {self.err_ratio:g}")
        return error

    def _replay(self, context: WorkerContext, launches: Sequence[Callable[[], object]], count: int) -> TimedReplay:
        """A warm replay of `count` launches, cycling through the sets of operands."""
        many = [launches[i % len(launches)] for i in range(count)]
        replay = context.clock.replay_of(many, separate=self.timer.separate)
        replay()
        return replay

    def _trial(self, stage: str, samples: tuple[float, ...], per_sample: int, error: float) -> Trial:
        return Trial(
            stage=stage,
            problem=self.problem.id,
            candidate=self.candidate,
            status=Status.OK,
            launches=len(samples) * per_sample,
            samples_us=round_samples(samples),
            err_ratio=error,
        )


def _warm_replays(context: WorkerContext, warm_us: float, replay_us: float) -> int:
    """Replays until a GPU idle during set-up has its clocks up; without them M=1 was up to 26 % too slow (H200)."""
    return math.ceil(warm_us / max(1.0, 2 * replay_us)) if context.clock.overlaps else 0


@lru_cache(maxsize=1)
def _read(family: str, table: Path, changed_ns: int) -> SingleTableDispatch:
    return single_table_dispatch(load_family(family), table)


@dataclass(frozen=True, kw_only=True)
class VerifyCalls(Stage):
    """Times calls in a CUDA graph with cold operands (on a CPU directly), in turns with the launch of the row.

    The runtime reads the table under test alone, in each layout of x's scales that a row is for.
    """

    err_ratio: float
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems", "selections", "trials")
    gives: ClassVar[tuple[str, ...]] = ("called",)
    uses_device: ClassVar[bool] = True
    cpu_budget_share: ClassVar[float] = 0.3

    @property
    def separate_launches(self) -> bool:
        """True if other kernels run between timed launches: part of the rows' policy."""
        return self.timer.separate

    def __post_init__(self) -> None:
        if not 0 < self.err_ratio <= 1:
            raise ValueError(f"err_ratio={self.err_ratio:g}, expected above 0 and at most 1")

    def cost(self, problem: Problem, family: Family, device: Device) -> FinalsCost:
        """What timing a row of this problem costs."""
        return FinalsCost(family=family, spec=family.spec(problem), timer=self.timer, device=device)

    def expected_s(self, context: Context) -> float:
        """Of a row of each problem, by its product."""
        each_s = (self.cost(problem, context.family, context.device).call_s(None) for problem in context.problems)
        return sum(each_s) / context.device_count

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns `called`: a row per problem, candidate and layout, or with the error (`schema.CALLED`)."""
        import pandas as pd

        jobs = list(self._jobs(tables, context))
        trials = _run(jobs, self._costs_s(tables, context), context)
        if context.cpu_budget is not None:
            jobs = [job for job in jobs if job.problem.id not in context.cpu_budget.left]
        rows = [row for job in jobs for row in _rows(job, trials.get((job.problem.id, job.candidate), []))]
        frame = pd.DataFrame(rows, columns=list(schema.CALLED))
        text = f"{CALLED}: {counted(len(jobs), 'row')}"
        context.events.emit("line", text if rows or not jobs else f"{text}, no function in gemmpipe.runtime")
        return {"called": frame}

    def _costs_s(self, tables: "dict[str, pd.DataFrame]", context: Context) -> dict[tuple[str, str], float]:
        """By problem and candidate id, the expected seconds of a job, by the time in the finals."""
        finals = tables["trials"][tables["trials"]["us"].notna()]
        times_us = {
            (str(p), str(c)): float(us) for p, c, us in finals[["problem", "candidate", "us"]].itertuples(index=False)
        }
        costs = {problem.id: self.cost(problem, context.family, context.device) for problem in context.problems}
        return {pair: costs[pair[0]].call_s(us) for pair, us in times_us.items() if pair[0] in costs}

    def _jobs(self, tables: "dict[str, pd.DataFrame]", context: Context) -> Iterator[CallJob]:
        """One job for each row with a winner that was timed in the finals."""
        if context.table is None:
            return
        problems = {problem.id: problem for problem in context.problems}
        finals = tables["trials"][tables["trials"]["status"].isin([*map(str, TIMED)])]
        timed = {
            (str(p), str(c)): (lib, config) for p, c, lib, config in finals[_CANDIDATE_COLUMNS].itertuples(index=False)
        }
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
            pending=(candidate,),
        )


_CANDIDATE_COLUMNS = ["problem", "candidate", "libtype", "config"]


def _leave_late(queue: list[Job], costs_s: Mapping[tuple[str, str], float], context: Context) -> set[str]:
    """Removes jobs from the front that a budget for a CPU has no time for; returns their problems."""
    budget, left = context.cpu_budget, set[str]()
    while budget is not None and queue and not any(map(context.pool.backlog, range(len(context.pool.devices)))):
        name, candidate = queue[0].problem.id, queue[0].candidates[0].id
        if costs_s.get((name, candidate), 0.0) < budget.remaining_s and name not in left:
            break
        left.add(name)
        del queue[0]
    return left


def _run(
    jobs: list[CallJob], costs_s: Mapping[tuple[str, str], float], context: Context
) -> dict[tuple[str, Candidate], list[Trial]]:
    """The trials of each problem and candidate; those of an earlier session of the run are not timed again.

    `costs_s`: by problem and candidate id, the expected seconds of a job. On a CPU the first of a run is never left.
    """
    found: dict[tuple[str, Candidate], list[Trial]] = {}
    for job in jobs:
        stages = [CALLED, *(f"{name} {order}" for name in (CALLED, BOUND) for order in SCALE_ORDERS)]
        earlier = [t for s in stages for t in context.record.of(s, job.problem.id) if t.candidate == job.candidate]
        if (CALLED, job.problem.id) in context.record.finished and earlier:
            found[job.problem.id, job.candidate] = earlier
    queue: list[Job] = [job for job in jobs if (job.problem.id, job.candidate) not in found]
    open_ = {(job.problem.id, job.candidates) for job in queue}
    total = len(open_)

    def receive(message: BuildResult | JobResult) -> None:
        if isinstance(message, BuildResult) or message.job.stage != CALLED or not isinstance(message.job, CallJob):
            return
        for trial in message.trials:
            context.journal.trial(trial)
            found.setdefault((trial.problem, trial.candidate), []).append(trial)
        if message.complete:
            open_.discard((message.job.problem.id, (message.job.candidate,)))
            context.journal.write("done", stage=CALLED, problem=message.job.problem.id)

    budget = context.cpu_budget
    has_begun = bool(found) or (budget is not None and budget.passes > 1)
    total_s = _open_s(open_, costs_s)
    context.events.emit("stage", CALLED, total=total, unit="problems", expected_s=total_s / len(context.pool.devices))
    with drain_on_interrupt(context.pool, receive):
        while open_:
            if budget is not None and has_begun and (left := _leave_late(queue, costs_s, context)):
                budget.left |= left
                open_ -= {pair for pair in open_ if pair[0] in left}
                queue[:] = [job for job in queue if job.problem.id not in left]
                continue
            has_begun = True
            dispatch_jobs(queue, context)
            for message in context.pool.poll(POLL_S):
                receive(message)
            context.check()
            share = 1 - _open_s(open_, costs_s) / total_s if total_s else None
            most_s = budget.end_s if budget is not None else None
            context.events.emit("progress", done=total - len(open_), share=share, most_s=most_s)
    return found


def _open_s(open_: Iterable[tuple[str, tuple[Candidate, ...]]], costs_s: Mapping[tuple[str, str], float]) -> float:
    """The expected seconds of these jobs."""
    return sum(costs_s.get((name, candidate.id), 0.0) for name, candidates in open_ for candidate in candidates)


def _rows(job: CallJob, trials: list[Trial]) -> Iterator[Mapping[str, object]]:
    place = {"problem": job.problem.id, "candidate": job.candidate.id}
    stages = {trial.stage: trial for trial in trials}
    for order in SCALE_ORDERS:
        called, bound = stages.get(f"{CALLED} {order}"), stages.get(f"{BOUND} {order}")
        if called is not None and bound is not None:
            ratio = paired_ratio(called.samples_us, bound.samples_us)
            times = {"called_us": called.time_us, "bound_us": bound.time_us}
            text = {"called_ratio": ratio.median, "called_low": ratio.low, "called_high": ratio.high}
            yield {**place, "layout": order, **times, **text, "called_error": ""}
    if (failed := stages.get(CALLED)) is not None:
        yield {**place, "called_error": failed.error or str(failed.status)}
