"""A row of a tuned table as a program calls it, beside the launch that the row was timed by."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.family import load_family
from gemmpipe.jobs import LONG_US, SETTING_UP, TOGETHER, Job, Tools, rounded
from gemmpipe.runtime.one_table import Call, OneTable, answering, entry_point, one_table
from gemmpipe.timer import Replay, Timer
from gemmpipe.workbench import Setup

CALLED, BOUND = "called", "bound"
"""What a trial's stage begins with: the run time's function, or the candidate's own launch; then the layout."""

_WARM_US = 30_000  # of replays, before the first that counts


class Unanswered(Exception):
    """Why the run time does not answer with the row's candidate."""


@dataclass(frozen=True, kw_only=True)
class CallJob(Job):
    """Time the run time's function on a problem that a row of `table` answers, and the row's launch, in turns.

    For each layout of x's scales that the row is for there are two trials, whose samples belong together round by
    round. A family without a function in gemmpipe.runtime gives none.
    """

    stage: str
    problem: Problem
    candidate: Candidate
    table: Path
    """Where the row stands; nothing else is looked up."""
    changed_ns: int
    """When the file was last changed: workers keep what they have read of it."""
    timer: Timer
    err_ratio: float
    asks: tuple[Candidate, ...] = ()
    """The candidate until it was timed."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.asks

    def without(self, done: Collection[Candidate]) -> "CallJob":
        return replace(self, asks=tuple(c for c in self.asks if c not in done))

    def run(self, tools: Tools) -> list[Trial]:
        trials: list[Trial] = []
        with tools.spending("operands"):
            tools.flight.begin(SETTING_UP)
            setup = tools.bench.set_up(self.problem)
            call = entry_point(tools.bench.family, setup.spec)
            setup.reference()
            for index in range(setup.sets):
                setup.weights(index), setup.out(index)
            dispatch = _read(tools.bench.family.module, self.table, self.changed_ns)
            tools.clock.synchronize()
        if call is None:
            return trials
        with tools.spending("called"), answering(dispatch):
            found = self.attempt(tools, trials, 0, partial(self._time, tools, setup, call, dispatch))
        return trials + (found or [])

    def _time(self, tools: Tools, setup: Setup, call: Call, dispatch: OneTable, candidate: Candidate) -> list[Trial]:
        """The trials of each layout, or the one that says why there is none. Raises what a launch raises."""
        found: list[Trial] = []
        for order in setup.spec.possible_orders:
            dispatch.begin_anew()
            try:
                error = self._check(tools, setup, order, call, dispatch)
            except Unanswered as reason:
                return [self.failed(candidate, Status.WRONG, str(reason))]
            bind = setup.binder(candidate, order)
            launch = bind(0)
            launch(), tools.clock.synchronize()
            time_us = min(tools.clock.sequence([launch] * 3))
            many = tools.clock.launches_per_sample(time_us, setup.sets)
            calls = [partial(call, setup.inputs(i, order), setup.weights(i)) for i in range(min(many, setup.sets))]
            for each in calls:  # what a candidate makes of a weight is made before a graph is captured
                each()
            called = _replay(tools, calls, many)
            bound = _replay(tools, [bind(i) for i in range(len(calls))], many)
            rounds = self.timer.rounds_for(time_us, many)
            for _ in range(_warm_replays(tools, time_us * many)):
                called(), bound()
            tools.flight.begin(TOGETHER if time_us < LONG_US else 0)
            pairs = [(called(), bound()) if turn % 2 else (bound(), called())[::-1] for turn in range(rounds)]
            tools.flight.begin(0)
            for word, samples in zip((CALLED, BOUND), zip(*pairs, strict=True), strict=True):
                found.append(self._trial(f"{word} {order}", samples, many, error))
        return found

    def _check(self, tools: Tools, setup: Setup, order: str, call: Call, dispatch: OneTable) -> float:
        """The share of wrong elements of a call, which the row's candidate must have answered. Raises Unanswered."""
        out = call(setup.inputs(0, order), setup.weights(0))
        tools.clock.synchronize()
        name = tools.bench.family.entry_point
        (selected,) = dispatch.selected
        if selected.step != "exact" or selected.chosen.candidate != self.candidate or selected.chosen.rows is not None:
            where = "the rules" if selected.step == "fallback" else f"{selected.step} {selected.source}"
            raise Unanswered(f"{name} answers with {selected.words} ({where}), not with this row")
        error = setup.error_ratio(out.view(setup.spec.out_shape))
        if not error < self.err_ratio:
            raise Unanswered(f"{name}: error ratio {error:.4f}, must be below {self.err_ratio:g}")
        return error

    def _trial(self, stage: str, samples: tuple[float, ...], per_sample: int, error: float) -> Trial:
        return Trial(
            stage=stage,
            problem=self.problem.id,
            candidate=self.candidate,
            status=Status.OK,
            launches=len(samples) * per_sample,
            samples_us=rounded(samples),
            err_ratio=error,
        )


def _warm_replays(tools: Tools, replay_us: float) -> int:
    """Replays until a GPU that set-up work left idle has its clocks up: before, M=1 seemed up to 26 % slower (H200)."""
    return math.ceil(_WARM_US / max(1.0, 2 * replay_us)) if tools.clock.overlaps else 0


def _replay(tools: Tools, launches: Sequence[Callable[[], object]], many: int) -> Replay:
    """A warm replay of so many launches, on one set of operands after the other."""
    replay = tools.clock.replay([launches[i % len(launches)] for i in range(many)])
    replay()
    return replay


@lru_cache(maxsize=1)
def _read(family: str, table: Path, changed_ns: int) -> OneTable:
    return one_table(load_family(family), table)
