"""Screening: times few launches of many candidates of one problem, without checking results."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from gemmpipe.bench.jobs import (
    FIRST_LAUNCH,
    LONG_LAUNCH_US,
    RUNNING_SEVERAL,
    SETTING_UP,
    Bind,
    Job,
    WorkerContext,
    count_launches,
    launch_once,
    round_samples,
)
from gemmpipe.bench.setup import ProblemSetup
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.family import Launch
from gemmpipe.search import TrialRequest

_NO_BLOCK_RATIO = 2.0  # times the fastest of the problem: slower candidates are not timed in blocks
# Times the pace after one launch: the first rung is over for a slower one (H200, 2026-11: of 800 winners none was 1.3).
DROP_RATIO = 1.5
# The pace is the time of the fourth fastest candidate, since nothing is checked yet, and a kernel that computes nothing
# is the fastest; or it is a library's time.
PACE_RANK = 4
# A single launch, which is outside of a graph, takes a kernel without programmatic dependent launch about 1.5 us longer
# than one with it (H200, 2026-11-29: both 3.3 us in a graph, 4.4 to 5.0 and 2.4 to 3.4 outside).
_OUTSIDE_US = 1.5
# Ratio of samples of one candidate that shows a disturbance (H200: one of 2 ms changed the choice of a problem).
_DISTURBED_RATIO = 1.5
# Times the pace: few candidates are slower, and another launch shows whether the first one was disturbed. If not, a
# candidate is over with that in each search: registers in memory cost a tile ten times the time and more, and such
# candidates would take most of the screening of long problems.
_REPEAT_RATIO = 4.0
# This fraction of the time of a single launch may be its start and end, which overlap when launched back to back.
_MIN_OVERLAP_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class ScreenJob(Job):
    """Few launches of many candidates, interleaved. Results are checked in the finals only.

    `library` are the labels of library paths, which are known to be correct.
    """

    stage: str
    problem: Problem
    requests: tuple[TrialRequest, ...]
    timer: Timer
    library: frozenset[str] = frozenset()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(r.candidate for r in self.requests)

    def without(self, done: Collection[Candidate]) -> "ScreenJob":
        return replace(self, requests=tuple(r for r in self.requests if r.candidate not in done))

    def run(self, context: WorkerContext) -> list[Trial]:
        trials: list[Trial] = []
        with context.timed("operands"):
            context.in_flight.begin(SETTING_UP)
            setup = context.bench.set_up(self.problem)
            for index in range(min(setup.sets, len(self.requests) + max(r.launches for r in self.requests))):
                setup.inputs(index), setup.weights(index), setup.out(index)
            context.clock.synchronize()
        with context.timed(FIRST_LAUNCH):
            ready = self._first_launches(context, setup, trials)
        with context.timed("screening"):
            context.in_flight.begin(RUNNING_SEVERAL if len(self.requests) > 1 else 0)
            trials += self._time(context, setup, ready)
        return trials

    def _first_launches(self, context: WorkerContext, setup: ProblemSetup, trials: list[Trial]) -> "list[_ScreenItem]":
        attempts = (
            self.attempt(context, trials, position, partial(self._first_launch, context, setup, position))
            for position in range(len(self.requests))
        )
        return [ready for ready in attempts if ready is not None]

    def _first_launch(
        self, context: WorkerContext, setup: ProblemSetup, position: int, candidate: Candidate
    ) -> "_ScreenItem":
        known_us = self._single_times(context).get(candidate.id)
        if known_us is None:
            bind, launch, first_us = launch_once(context, setup, position, candidate)
        else:  # it has run in this worker before
            with context.timed("load"):
                bind = setup.binder(candidate)
                launch, first_us = bind(position), known_us
        return _ScreenItem(
            request=self.requests[position],
            position=position,
            bind=bind,
            launches=[launch],
            first_us=first_us,
            extra_bytes=setup.prepared(candidate, position % setup.sets).extra_bytes,
        )

    def _single_times(self, context: WorkerContext) -> dict[str, float]:
        """Microseconds of a single launch in this worker, by candidate id."""
        return context.bench.single_launch_us.setdefault(self.problem.id, {})

    def _time(self, context: WorkerContext, setup: ProblemSetup, ready: "list[_ScreenItem]") -> list[Trial]:
        self._launch_new_once(context, setup, ready)
        staying = [item for item in ready if not item.samples_us]
        self._bind(context, setup, staying)
        self._warm_up(context, setup, staying)
        order: list[tuple[_ScreenItem, list[Launch]]] = []
        for turn in range(max((item.samples for item in staying), default=0)):
            for item in staying:
                if item.first_us > LONG_LAUNCH_US and context.bench.device.kind == "cpu":
                    item.samples_us = [item.first_us]
                elif turn < item.samples:
                    order.append((item, item.block(turn)))
        self._sample(context, order)
        disturbed = [
            item
            for item in staying
            if item.samples > 1 and max(item.samples_us) > _DISTURBED_RATIO * min(item.samples_us)
        ]
        self._sample(context, [(item, item.block(item.samples)) for item in disturbed])
        for item in staying:
            count_launches(context, setup, item.request.candidate, len(item.samples_us) * item.launches_per_block)
        return [self._trial(item) for item in ready]

    def _sample(self, context: WorkerContext, order: "list[tuple[_ScreenItem, list[Launch]]]") -> None:
        """Time each block once, and add the sample to its item."""
        least_us = _MIN_OVERLAP_FRACTION * min(self._single_times(context).values(), default=0.0)
        times = context.clock.blocks_of([b for _, b in order], least_us, separate=self.timer.separate)
        for (item, _), time_us in zip(order, times, strict=True):
            item.samples_us.append(time_us)

    def _launch_new_once(self, context: WorkerContext, setup: ProblemSetup, ready: "list[_ScreenItem]") -> None:
        """Launch each new candidate once; those far behind are finished with that, earlier in a first rung."""
        single_us = self._single_times(context)
        short = [item for item in ready if item.first_us <= LONG_LAUNCH_US]
        if not context.clock.overlaps or not short:
            return
        new = [item for item in short if item.request.candidate.id not in single_us]
        self._launch_once_each(context, new)
        for item in short:
            item.single_launch_us = single_us[item.request.candidate.id]
        far_us = _OUTSIDE_US + _REPEAT_RATIO * self._pace_us(context, short)
        self._launch_once_each(context, [item for item in new if single_us[item.request.candidate.id] > far_us])
        pace_us = self._pace_us(context, short)
        for item in new:
            count_launches(context, setup, item.request.candidate, 1)
            ratio = DROP_RATIO if item.request.first_rung else _REPEAT_RATIO
            if single_us[item.request.candidate.id] > _OUTSIDE_US + ratio * pace_us:
                item.samples_us, item.far_behind = [single_us[item.request.candidate.id]], True

    def _launch_once_each(self, context: WorkerContext, items: "list[_ScreenItem]") -> None:
        """Time a single launch of each, and record the minimum over all its single launches."""
        single_us = self._single_times(context)
        times = context.clock.sequence(
            [i.launches[0] for i in items], _MIN_OVERLAP_FRACTION * min(single_us.values(), default=0.0)
        )
        for item, time_us in zip(items, times, strict=True):
            item.single_launch_us = min(time_us, single_us.get(item.request.candidate.id, math.inf))
            single_us[item.request.candidate.id] = item.single_launch_us

    def _pace_us(self, context: WorkerContext, new: "list[_ScreenItem]") -> float:
        """The attainable time so far: the fourth fastest, or that of a library without additional weight memory."""
        single_us, paces = sorted(self._single_times(context).values()), context.bench.library_us
        trusted = [i for i in new if i.request.candidate.backend in self.library and not i.extra_bytes]
        times = [item.single_launch_us for item in trusted if item.single_launch_us is not None]
        paces[self.problem.id] = min([paces.get(self.problem.id, math.inf), *times])
        return min(paces[self.problem.id], single_us[PACE_RANK - 1] if len(single_us) >= PACE_RANK else math.inf)

    def _bind(self, context: WorkerContext, setup: ProblemSetup, staying: "list[_ScreenItem]") -> None:
        """Set the number of launches and samples of each item, and bind its launches; short ones run in blocks.

        Finals replay graphs, and so do blocks (`GpuClock.blocks_of`). A single launch of any kernel of 5 us takes 9
        (8192x1024, M <= 64, on an H200, 2026-11-21: the winners of the finals were ranked 1st to 24th by single
        launches, 1st to 9th by blocks). All blocks of a problem have equal length, and so the same share of start and
        end.
        """
        fastest_us = min(self._single_times(context).values(), default=0.0)
        for item in staying:
            if item.single_launch_us is not None:
                if item.single_launch_us <= _OUTSIDE_US + _NO_BLOCK_RATIO * fastest_us:
                    item.launches_per_block = self.timer.launches_per_block(fastest_us)
                item.max_samples = max(
                    3, int(self.timer.budget_ms * 1000 / (item.single_launch_us * item.launches_per_block))
                )
            # Sets far apart, so that a block finds no operands of the preceding block in the cache.
            step = max(1, setup.sets // item.launches_per_block) if item.launches_per_block > 1 else 1
            number = min(item.launches_per_block if item.launches_per_block > 1 else item.samples, setup.sets)
            indices = (item.position + step * i for i in range(1, number))
            with context.timed("load"):
                item.launches[1:] = map(item.bind, indices)

    def _warm_up(self, context: WorkerContext, setup: ProblemSetup, ready: "list[_ScreenItem]") -> None:
        """Run warm-up launches for requests beyond the first rung."""
        for item in ready:
            done = context.bench.launch_counts.get((setup.problem.id, item.request.candidate.id), 0)
            if (
                not item.request.first_rung
                and item.request.launches >= self.timer.iters
                and item.first_us <= LONG_LAUNCH_US
            ):
                for turn in range(max(0, self.timer.warmup - done)):
                    item.launches[turn % len(item.launches)]()
                    count_launches(context, setup, item.request.candidate, 1)

    def _trial(self, item: "_ScreenItem") -> Trial:
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=item.request.candidate,
            status=Status.PRUNED if item.far_behind else Status.OK,
            launches=len(item.samples_us) * item.launches_per_block,
            requested_launches=item.request.launches,
            samples_us=round_samples(item.samples_us),
            extra_weight_bytes=item.extra_bytes,
        )


@dataclass
class _ScreenItem:
    """The state of one request."""

    request: TrialRequest
    position: int
    bind: Bind
    launches: list[Launch]
    """Each on another operand set, the first on set `position`."""
    first_us: float
    extra_bytes: int
    single_launch_us: float | None = None
    """Time of a single launch by the device's clock; None if not timed."""
    launches_per_block: int = 1
    """Launches per sample."""
    max_samples: int | None = None
    """Limit on samples by the timer's budget."""
    far_behind: bool = False
    samples_us: list[float] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Samples for the requested launches, at least two if more than one launch is requested; at most
        `max_samples`."""
        wanted = min(self.request.launches, max(2, -(-self.request.launches // self.launches_per_block)))
        return wanted if self.max_samples is None else min(wanted, self.max_samples)

    def block(self, turn: int) -> list[Launch]:
        """The launches of one sample."""
        first = turn * self.launches_per_block
        return [self.launches[i % len(self.launches)] for i in range(first, first + self.launches_per_block)]
