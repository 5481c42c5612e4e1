"""The finals of one problem: finalists are checked against the reference, then timed in interleaved rounds (a race).

Slower finalists are eliminated after a few rounds, and the race ends early when further rounds cannot change the
choice (`RacingRules`).
"""

import itertools
import math
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from gemmpipe.bench.jobs import (
    LONG_LAUNCH_US,
    RUNNING_SEVERAL,
    SETTING_UP,
    Bind,
    Job,
    WorkerContext,
    count_launches,
    round_samples,
)
from gemmpipe.bench.setup import ProblemSetup
from gemmpipe.bench.timer import TimedCall, TimedReplay, Timer, paired_ratio
from gemmpipe.core.cpu_load import ForeignProcessorTime
from gemmpipe.core.data import Candidate, Problem, Status, Trial, median
from gemmpipe.family import Launch

if TYPE_CHECKING:
    import torch

_FIRST_LAUNCHES = 3
# Finalists that take less than this times the fastest have the same number of launches per sample.
_SAME_PACE_RATIO = 3.0

# (rounds, ratio to the fastest): a slower finalist is eliminated. In 576 finals on H200s (2026-11-21) these ratios
# eliminated the winner of all rounds twice; the remaining one was 3.8 and 0.01 % slower.
_ELIMINATION_RATIOS = ((1, 1.3), (2, 1.15), (3, 1.08), (5, 1.05), (8, 1.03), (15, 1.02))
_ELIMINATION_RATIOS_LONG = ((1, 1.15), (2, 1.08), (3, 1.05))  # one launch of 20 ms and more is its own average
# Times the fastest, for a single launch (short launches differ less there): slower finalists run no round.
_FAR_BEHIND_RATIO = 2.0
# Times the fastest: such a baseline is timed for as many rounds as decide a race, not to the end.
_BASELINE_SETTLED_RATIO = 1.1
# A race ends after these rounds if no other finalist is faster than this times the fastest, with an interval of
# 95 %: in 288 finals (H200, 2026-11-21) the choice then is within 0.11 % of the choice of 30 rounds.
_DECIDED_AFTER = 10
_DECIDED_RATIO = 0.998
FULL_CLOCK_ROUNDS = 5  # of a product at the power limit, before those at sustained clocks
SUSTAINED_ROUNDS = 20  # at most: in 12 finals (H200, 2026-11-29) the choice is within 0.14 % of that of 30 to 51 rounds
# Untimed replays of the fastest finalists after a timed one at sustained clocks, by whether it is near the fastest.
NEAR_LOADS, OTHER_LOADS = 1, 3
PAUSE_RATIO = 2.0  # the pause after a replay at full clocks, over its time: the average power stays far below the limit
_NEAR_RATIO = 1.1  # times the fastest: finalists that run to lower the clocks
_MAX_NOISE_PCT = 2.0  # further rounds run if a ratio has more noise than this


@dataclass(kw_only=True)
class FinalistRun:
    """The state of a checked finalist, for every layout of x's scales that the problem may have."""

    candidate: Candidate
    position: int
    err_ratio: float
    first_us: tuple[float, ...]
    """Time of a single launch in each layout."""
    binds: tuple[Bind, ...]
    """One per layout, like `replays`."""
    far_behind: bool = False
    """True if it runs no round after its single launch."""
    replays: tuple[TimedReplay, ...] = ()
    rounds: int = 0
    per_sample: int = 1
    extra_bytes: int = 0
    samples: list[float] = field(default_factory=list)
    """One per round, for the slower layout so far: callers do not choose the layout."""
    full_us: tuple[tuple[float, ...], ...] = ()
    """Samples at full clocks in each layout, of a product that is timed at both clocks."""
    load: TimedCall | None = None
    """Keeps a GPU busy after a replay at sustained clocks."""
    eliminated: bool = False
    _rounds: list[list[float]] = field(default_factory=list)
    """Samples of all rounds in each layout."""

    @property
    def time_us(self) -> float:
        """Time of a single launch in the slower layout."""
        return max(self.first_us)

    @property
    def launches(self) -> int:
        """Number of timed launches."""
        rounds = sum(map(len, (*self._rounds, *self.full_us)))
        return (rounds or len(self.samples)) * self.per_sample

    @property
    def full_clocks_us(self) -> float | None:
        """The time at full clocks in the layout of `samples`, as in the journal; None if it was not timed apart."""
        if not self.full_us:
            return None
        [full_us] = (full for full, each in zip(self.full_us, self._rounds, strict=True) if each is self.samples)
        return round(median(full_us), 4)

    def begin(self, *, first: bool) -> None:
        """Clear all samples; with `first` the first launches remain as samples, since they are long enough."""
        self._rounds = [[time_us] if first else [] for time_us in self.first_us]
        self.samples, self.full_us, self.eliminated = [self.time_us] if first else [], (), False
        self.load = None

    def begin_sustained(self, load: TimedCall | None = None) -> None:
        """Keep the samples so far as those at full clocks, and begin anew, with this load after each replay."""
        full_us = tuple(map(tuple, self._rounds))
        self.begin(first=False)
        self.full_us, self.load = full_us, load

    def run(self) -> float:
        """Run one round, a replay in each layout, one after the other; returns the microseconds of the replays.

        After `begin_sustained` a sample is the geometric mean of a launch now and one at full clocks: neither clock
        counts more, and the means of two candidates have the mean ratio of both clocks.
        """
        took_us = 0.0
        for layout, (samples, replay) in enumerate(zip(self._rounds, self.replays, strict=True)):
            time_us = replay(self.load)
            took_us += time_us * self.per_sample
            if self.full_us:
                full_us = self.full_us[layout]
                time_us = math.sqrt(time_us * full_us[len(samples) % len(full_us)])
            samples.append(time_us)
        self.samples = max(self._rounds, key=median)
        return took_us

    def ratio_to(self, other: "FinalistRun") -> float:
        """The ratio of this time to the other's: the median over their common rounds."""
        return median([own / theirs for own, theirs in zip(self.samples, other.samples, strict=True)])


def _queue_next(replays: Iterator[TimedReplay], count: int) -> None:
    for replay in itertools.islice(replays, count):
        replay.queue()


@dataclass(frozen=True, kw_only=True)
class RacingRules:
    """The rules of a race; candidates are given by their ids, as in FinalsJob."""

    library: frozenset[str]
    always_timed: frozenset[str]
    unchecked: frozenset[str] = frozenset()

    def baseline(self, finalists: list[FinalistRun]) -> FinalistRun | None:
        """The library path to compare with, by the time of a single launch; None without library paths."""
        library = [r for r in finalists if r.candidate.id in self.library]
        return min(library, key=lambda r: (r.extra_bytes, r.time_us), default=None)

    def is_far_behind(self, finalist: FinalistRun, ready: list[FinalistRun]) -> bool:
        """True if a single launch is too slow for the race, relative to `ready`: correct finalists that can race."""
        if finalist.candidate.id in self.always_timed:
            return False
        others = (r for r in ready if r.extra_bytes <= finalist.extra_bytes and r.candidate.id not in self.unchecked)
        return finalist.time_us > _FAR_BEHIND_RATIO * min((r.time_us for r in others), default=float("inf"))

    def decided(self, racing: list[FinalistRun]) -> bool:
        """True if further rounds could only choose among equally fast finalists, for every limit of extra memory."""
        rounds = max((len(finalist.samples) for finalist in racing), default=0)
        if rounds < _DECIDED_AFTER or any(finalist.candidate.id in self.always_timed for finalist in racing):
            return False
        budgets = {finalist.extra_bytes for finalist in racing}
        return all(_settled([r for r in racing if r.extra_bytes <= budget]) for budget in budgets)

    def still_racing(self, racing: list[FinalistRun]) -> list[FinalistRun]:
        """The finalists that stay in the race; sets `eliminated` for the others.

        A finalist is eliminated if another one with no more weight memory is faster by the limit of this round. Times
        are compared round by round: when clocks drop during a race, medians over different rounds are not comparable.
        """
        times = {r.candidate.id: median(r.samples) for r in racing}
        rounds = max((len(r.samples) for r in racing), default=0)
        library = [r for r in racing if r.candidate.id in self.library]
        baseline = min(library, key=lambda r: (r.extra_bytes, times[r.candidate.id]), default=None)
        stay = []
        for finalist in racing:
            others = (r for r in racing if r.extra_bytes <= finalist.extra_bytes)
            fastest = min(others, key=lambda r: times[r.candidate.id])
            known = _ELIMINATION_RATIOS if times[fastest.candidate.id] < LONG_LAUNCH_US else _ELIMINATION_RATIOS_LONG
            limit = min((ratio for after, ratio in known if rounds >= after), default=float("inf"))
            protected = finalist is baseline or finalist.candidate.id in self.always_timed
            finalist.eliminated = not protected and finalist.ratio_to(fastest) > limit
            if not finalist.eliminated and not (finalist is baseline and self._baseline_settled(finalist, fastest)):
                stay.append(finalist)
        return stay

    def _baseline_settled(self, baseline: FinalistRun, other: FinalistRun) -> bool:
        """True if the ratio of a much slower baseline is known well enough."""
        if baseline.candidate.id in self.always_timed or len(baseline.samples) < _DECIDED_AFTER:
            return False
        ratio = paired_ratio(baseline.samples, other.samples)
        return ratio.low > _BASELINE_SETTLED_RATIO and ratio.noise_pct <= _MAX_NOISE_PCT


def _settled(racing: list[FinalistRun]) -> bool:
    """True if none can be faster than the fastest, and all ratios to it have little noise."""
    fastest = min(racing, key=lambda r: (median(r.samples), r.candidate.id))
    ratios = [paired_ratio(r.samples, fastest.samples) for r in racing if r is not fastest]
    return all(ratio.low > _DECIDED_RATIO and ratio.noise_pct <= _MAX_NOISE_PCT for ratio in ratios)


@dataclass(frozen=True, kw_only=True)
class FinalsJob(Job):
    """Check every finalist against the reference, then time them in interleaved rounds.

    The fastest candidate in `library` is the baseline and is never eliminated; those in `always_timed` (the incumbent)
    run all rounds (at sustained clocks SUSTAINED_ROUNDS at most). Those in `unchecked` compute something else on
    purpose. If the problem allows both layouts of x's block scales, a candidate is checked and timed in both in every
    round, and its time is that of the slower one.
    """

    stage: str
    problem: Problem
    finalists: tuple[Candidate, ...]
    library: frozenset[str]
    always_timed: frozenset[str]
    timer: Timer
    err_ratio: float
    unchecked: frozenset[str] = frozenset()
    max_foreign_pct: float | None = None
    """On a CPU: the trials are those of a shared device if other processes use more of the cores; None: not checked."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.finalists

    def without(self, done: Collection[Candidate]) -> "FinalsJob":
        return replace(self, finalists=tuple(c for c in self.finalists if c not in done))

    def run(self, context: WorkerContext) -> list[Trial]:
        trials: list[Trial] = []
        with context.timed("operands"):
            context.in_flight.begin(SETTING_UP)
            setup = context.bench.set_up(self.problem, finals=True)
            setup.release()
            for candidate in self.finalists:
                setup.implementation(candidate)  # imports an engine, which takes seconds
            setup.reference()
            for index in range(setup.sets):
                setup.weights(index), setup.out(index)
                for order in setup.spec.x_scale_orders:
                    setup.inputs(index, order)
            context.clock.synchronize()
        with context.timed("checks"):
            finalists = self._check(context, setup, trials)
            finalists = self._capture(context, setup, finalists, trials)
        with context.timed("finals"):
            shared = self._race_undisturbed(context, setup, finalists)
        without = context.clock.no_dependent_launch
        return trials + [replace(self._trial(each), shared=shared, no_dependent_launch=without) for each in finalists]

    def _check(self, context: WorkerContext, setup: ProblemSetup, trials: list[Trial]) -> list[FinalistRun]:
        """The finalists with correct results; trials of the others are appended to `trials`."""
        finalists: list[FinalistRun] = []
        for position in range(len(self.finalists)):
            finalist = self.attempt(context, trials, position, partial(self._check_finalist, context, setup, position))
            if finalist is not None and self._passes(finalist.candidate, finalist.err_ratio):
                finalists.append(finalist)
            elif finalist is not None:
                trials.append(self._incorrect_trial(finalist))
        return finalists

    def _check_finalist(
        self, context: WorkerContext, setup: ProblemSetup, position: int, candidate: Candidate
    ) -> FinalistRun:
        """Check the candidate and time a launch in each layout. The caller catches failures."""
        binds = tuple(setup.binder(candidate, order) for order in setup.timed_scale_orders(candidate))
        checks: list[tuple[float, float]] = []
        for bind in binds:
            checks.append(self._check_and_time(context, setup, candidate, bind(0)))
            if not self._passes(candidate, checks[-1][0]):
                break
        return FinalistRun(
            candidate=candidate,
            position=position,
            err_ratio=max(error for error, _ in checks),
            first_us=tuple(time_us for _, time_us in checks),
            binds=binds,
            extra_bytes=setup.prepared(candidate, 0).extra_bytes,
        )

    def _check_and_time(
        self, context: WorkerContext, setup: ProblemSetup, candidate: Candidate, launch: Launch
    ) -> tuple[float, float]:
        """(share of wrong elements, microseconds of a launch)."""
        outputs: list[torch.Tensor] = []
        setup.fill_nan()
        [time_us] = context.clock.sequence([lambda: outputs.append(launch())])
        error = 0.0 if candidate.id in self.unchecked else setup.error_ratio(outputs.pop())
        # The first launch includes loading, which does not matter for a long one.
        if time_us < LONG_LAUNCH_US and self._passes(candidate, error):
            # The minimum: if the host falls behind, a launch seems to take up to four times as long.
            time_us = min(context.clock.sequence([launch] * _FIRST_LAUNCHES))
        return error, time_us

    def _capture(
        self, context: WorkerContext, setup: ProblemSetup, finalists: list[FinalistRun], trials: list[Trial]
    ) -> list[FinalistRun]:
        """Capture a replay of each finalist, with the same number of launches for all that may win.

        Starting a graph takes some microseconds: with 22 launches per sample for one finalist and 66 for another, a
        launch of 5 us seemed up to 7 % longer (H200). On a GPU, a finalist far behind the captured ones is not replayed
        at all, unless no other can be the baseline.
        """
        pace_us = min((r.time_us for r in finalists if r.candidate.id not in self.unchecked), default=0.0)
        captured: list[FinalistRun] = []
        far: list[FinalistRun] = []

        def capture(finalist: FinalistRun) -> None:
            paced_us = pace_us if pace_us <= finalist.time_us < _SAME_PACE_RATIO * pace_us else finalist.time_us
            work = partial(self._capture_replays, context, setup, finalist, paced_us)
            if self.attempt(context, trials, finalist.position, work) is not None:
                captured.append(finalist)

        for finalist in sorted(finalists, key=lambda r: r.time_us):
            if context.clock.overlaps and self._rules.is_far_behind(finalist, captured):
                far.append(finalist)
            else:
                capture(finalist)
        while (baseline := self._rules.baseline(captured + far)) is not None and baseline in far:
            far.remove(baseline)
            capture(baseline)
        for finalist in far:
            finalist.samples, finalist.far_behind, finalist.eliminated = [finalist.time_us], True, True
        context.in_flight.begin(RUNNING_SEVERAL)
        return sorted(captured + far, key=lambda r: r.position)

    def _capture_replays(
        self, context: WorkerContext, setup: ProblemSetup, finalist: FinalistRun, paced_us: float, candidate: Candidate
    ) -> FinalistRun:
        """Set the finalist's replays, and warm them up. The caller catches failures."""
        per_sample = context.clock.launches_per_sample(paced_us, setup.sets)
        replays = []
        for bind in finalist.binds:
            bound = [bind(i) for i in range(min(per_sample, setup.sets))]
            launches = [bound[i % len(bound)] for i in range(per_sample)]
            replays.append(context.clock.replay_of(launches, separate=self.timer.separate))
        finalist.replays, finalist.per_sample = tuple(replays), per_sample
        finalist.rounds = self.timer.rounds_for(sum(finalist.first_us), per_sample)
        finalist.begin(first=finalist.time_us >= LONG_LAUNCH_US)
        if finalist.time_us < LONG_LAUNCH_US:
            for _ in range(min(3, -(-self.timer.warmup // per_sample))):
                for replay in replays:
                    replay()
        return finalist

    @property
    def _rules(self) -> RacingRules:
        return RacingRules(library=self.library, always_timed=self.always_timed, unchecked=self.unchecked)

    def _passes(self, candidate: Candidate, error: float) -> bool:
        return candidate.id in self.unchecked or error < self.err_ratio

    def _race_undisturbed(self, context: WorkerContext, setup: ProblemSetup, finalists: list[FinalistRun]) -> bool:
        """Race, and again if another process used the GPU. True if one used it during the second race as well.

        On a CPU a second race is no better: other processes stay for minutes, and a race takes seconds.
        """
        if isinstance(context.foreign_processes, ForeignProcessorTime):
            context.foreign_processes.used_pct()
            self._race(context, setup, finalists)
            used_pct = context.foreign_processes.used_pct()
            return self.max_foreign_pct is not None and used_pct > self.max_foreign_pct
        context.foreign_processes.detect()
        self._race(context, setup, finalists)
        if not context.foreign_processes.detect():
            return False
        for finalist in finalists:
            if not finalist.far_behind:
                finalist.begin(first=False)
        self._race(context, setup, finalists)
        return context.foreign_processes.detect()

    def _race(self, context: WorkerContext, setup: ProblemSetup, finalists: list[FinalistRun]) -> None:
        """Run the rounds, at both clocks if the product reaches the power limit of a GPU."""
        racing = [r for r in finalists if not r.far_behind]
        sustained_ms = self.timer.sustained_ms_of(context.bench.family, setup.spec) if context.clock.overlaps else 0.0
        if sustained_ms:
            self._race_at_both_clocks(context, racing, sustained_ms)
        else:
            self._run_rounds(context, racing)
        for finalist in finalists:
            count_launches(context, setup, finalist.candidate, finalist.launches)

    def _race_at_both_clocks(self, context: WorkerContext, finalists: list[FinalistRun], sustained_ms: float) -> None:
        """Rounds at full clocks; launches that lower the clocks; then the rounds at sustained clocks.

        The first rounds have pauses, and eliminate slower finalists, which have one sample, taken after the others'
        rounds. All samples count both clocks (`FinalistRun.run`). The GPU has no pause at sustained clocks: after each
        replay it runs the fastest finalists in turn, longer after a slow one, which draws less power. Without these,
        launches took 1.02 to 1.1 times as long as at full clocks, with them 1.11 to 1.2 times (H200, 2026-11-29).
        """
        for finalist in finalists:
            finalist.begin(first=False)  # a first launch had no pause
        racing = self._run_rounds(context, finalists, most=FULL_CLOCK_ROUNDS, pause_ratio=PAUSE_RATIO)
        slower = [r for r in finalists if r.eliminated]
        fastest = min(racing, key=lambda r: median(r.samples), default=None)
        near = [r for r in racing if fastest is not None and r.ratio_to(fastest) <= _NEAR_RATIO]
        replays = itertools.cycle([replay for finalist in near for replay in finalist.replays])
        for finalist in finalists:
            loads = NEAR_LOADS if finalist in near else OTHER_LOADS
            finalist.begin_sustained(partial(_queue_next, replays, loads))
        self._reach_sustained_clocks(context, near, sustained_ms)
        self._run_rounds(context, racing, most=SUSTAINED_ROUNDS)
        for finalist in slower:
            context.in_flight.begin(RUNNING_SEVERAL)
            finalist.run()
            finalist.eliminated = True
        context.in_flight.begin(RUNNING_SEVERAL)
        context.clock.synchronize()

    def _reach_sustained_clocks(self, context: WorkerContext, near: list[FinalistRun], sustained_ms: float) -> None:
        """Replay the fastest finalists in turn for `sustained_ms`, and as long untimed.

        A slow one, such as a baseline, draws less power.
        """
        left_us = 1000 * sustained_ms
        for finalist in itertools.cycle(near):
            if left_us <= 0:
                break
            context.in_flight.begin(RUNNING_SEVERAL)
            left_us -= sum(replay(finalist.load) for replay in finalist.replays) * finalist.per_sample
        context.in_flight.begin(RUNNING_SEVERAL)

    def _run_rounds(
        self, context: WorkerContext, racing: list[FinalistRun], most: int | None = None, pause_ratio: float = 0.0
    ) -> list[FinalistRun]:
        """Run rounds in which every finalist still racing runs once, each in another random order; returns these.

        After each run there is a pause of `pause_ratio` times its length.

        The order is random, not rotated: a GPU at its power limit lowers its clocks some time after a power-hungry
        kernel, and in any fixed order this slows the same one (3072x8192x3584 on an H200: 155 us against 146 for ten
        rounds, then 155 against 162). All that race to the end have the same rounds, as many as the slowest of them
        affords: clocks drop under load, so times of different rounds are not comparable.
        """
        turn, rng = 0, random.Random(self.problem.id)
        while turn != most and turn < min((r.rounds for r in racing), default=0) and not self._rules.decided(racing):
            for finalist in rng.sample(racing, len(racing)):
                # Each finalist is in flight by its position, so that a hang is not blamed on the whole round; with a
                # load others run at the same time.
                context.in_flight.begin(finalist.position if finalist.load is None else RUNNING_SEVERAL)
                if len(finalist.samples) <= turn:
                    took_us = finalist.run()
                    if pause_ratio:
                        time.sleep(pause_ratio * took_us / 1e6)
            context.in_flight.begin(RUNNING_SEVERAL)
            racing = self._rules.still_racing(racing)
            turn += 1
        return racing

    def _incorrect_trial(self, finalist: FinalistRun) -> Trial:
        text = f"error ratio {finalist.err_ratio:.4f}, must be below {self.err_ratio:g}"
        return replace(self.failed_trial(finalist.candidate, Status.INCORRECT, text), err_ratio=finalist.err_ratio)

    def _trial(self, finalist: FinalistRun) -> Trial:
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=finalist.candidate,
            status=Status.PRUNED if finalist.eliminated else Status.OK,
            launches=finalist.launches,
            samples_us=round_samples(finalist.samples),
            full_clocks_us=finalist.full_clocks_us,
            err_ratio=finalist.err_ratio,
            extra_weight_bytes=finalist.extra_bytes,
        )
