"""The finals of one problem.

Who of some finalists is timed further, and when their race is decided.
"""

import random
from collections.abc import Collection
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
from gemmpipe.bench.timer import TimedReplay, Timer, paired_ratio
from gemmpipe.core.data import Candidate, Problem, Status, Trial, median
from gemmpipe.family import Launch

if TYPE_CHECKING:
    import torch


# (rounds, ratio to the fastest): slower than this is not timed further. Of 576 finals on H200s (2026-11-21) these put
# out the winner of all rounds twice, 3.8 and 0.01 % behind the one that was left.
_ELIMINATION_RATIOS = ((1, 1.3), (2, 1.15), (3, 1.08), (5, 1.05), (8, 1.03), (15, 1.02))
_ELIMINATION_RATIOS_LONG = ((1, 1.15), (2, 1.08), (3, 1.05))  # one launch of 20 ms and more is its own average
_FAR_BEHIND_RATIO = 2.0  # times the fastest, of a launch alone, where short ones differ less: no round at all
_BASELINE_SETTLED_RATIO = (
    1.1  # times the fastest: a baseline has been compared with after so many rounds as decide a race
)
# Rounds after which a race ends where no rival is faster than this times the fastest, with an interval of 95 %: in 288
# finals (H200, 2026-11-21) what was chosen then is within 0.11 % of the choice of 30 rounds.
_DECIDED_AFTER = 10
_DECIDED_RATIO = 0.998
_MAX_NOISE_PCT = 2.0  # a run should not state more noise than this where more rounds can say less


@dataclass(kw_only=True)
class FinalistRun:
    """A finalist whose product was looked at, in every layout of x's scales that the problem may have."""

    candidate: Candidate
    position: int
    err_ratio: float
    first_us: tuple[float, ...]
    """Of one launch by itself, in each layout."""
    binds: tuple[Bind, ...]
    """One a layout, as are the replays."""
    far_behind: bool = False
    """Whether that was all."""
    replays: tuple[TimedReplay, ...] = ()
    rounds: int = 0
    per_sample: int = 1
    extra_bytes: int = 0
    samples: list[float] = field(default_factory=list)
    """One a round, of the layout in which it is slower so far: nobody chooses the layout of a call."""
    eliminated: bool = False
    _rounds: list[list[float]] = field(default_factory=list)
    """One a round of each layout."""

    @property
    def time_us(self) -> float:
        """Of one launch by itself, in the layout in which it is slower."""
        return max(self.first_us)

    @property
    def launches(self) -> int:
        """Those that were timed."""
        return (sum(map(len, self._rounds)) or len(self.samples)) * self.per_sample

    def begin(self, *, first: bool) -> None:
        """Forget all samples; `first`: but for the first launches, which are long enough to count."""
        self._rounds = [[time_us] if first else [] for time_us in self.first_us]
        self.samples, self.eliminated = [self.time_us] if first else [], False

    def run(self) -> None:
        """A round: a replay in each layout, one after the other."""
        for samples, replay in zip(self._rounds, self.replays, strict=True):
            samples.append(replay())
        self.samples = max(self._rounds, key=median)

    def ratio_to(self, rival: "FinalistRun") -> float:
        """The ratio of this one's time to the rival's: the median over the rounds that both ran."""
        return median([mine / other for mine, other in zip(self.samples, rival.samples, strict=True)])


@dataclass(frozen=True, kw_only=True)
class RacingRules:
    """How a race is run; candidates are given by their ids, as in FinalsJob."""

    library: frozenset[str]
    always_timed: frozenset[str]
    unchecked: frozenset[str] = frozenset()

    def baseline(self, finalists: list[FinalistRun]) -> FinalistRun | None:
        """The library path to compare with, going by the launch alone."""
        library = [r for r in finalists if r.candidate.id in self.library]
        return min(library, key=lambda r: (r.extra_bytes, r.time_us), default=None)

    def is_far_behind(self, finalist: FinalistRun, ready: list[FinalistRun]) -> bool:
        """Whether a launch tells that no round is needed. `ready` are right and can race: what they reach counts."""
        if finalist.candidate.id in self.always_timed:
            return False
        rivals = (r for r in ready if r.extra_bytes <= finalist.extra_bytes and r.candidate.id not in self.unchecked)
        return finalist.time_us > _FAR_BEHIND_RATIO * min((r.time_us for r in rivals), default=float("inf"))

    def decided(self, racing: list[FinalistRun]) -> bool:
        """Whether more rounds could only choose among those that are alike, however much memory one may afford."""
        turn = max((len(finalist.samples) for finalist in racing), default=0)
        if turn < _DECIDED_AFTER or any(finalist.candidate.id in self.always_timed for finalist in racing):
            return False
        budgets = {finalist.extra_bytes for finalist in racing}
        return all(_settled([r for r in racing if r.extra_bytes <= budget]) for budget in budgets)

    def still_racing(self, racing: list[FinalistRun]) -> list[FinalistRun]:
        """Outrun is who has a rival that needs no more weight memory and is faster by the limit of this round.

        Compared round by round: when clocks sag in the middle of a race, medians of the same kernel a round apart lie
        on either side.
        """
        times = {r.candidate.id: median(r.samples) for r in racing}
        rounds = max((len(r.samples) for r in racing), default=0)
        library = [r for r in racing if r.candidate.id in self.library]
        baseline = min(library, key=lambda r: (r.extra_bytes, times[r.candidate.id]), default=None)
        stay = []
        for finalist in racing:
            rivals = (r for r in racing if r.extra_bytes <= finalist.extra_bytes)
            rival = min(rivals, key=lambda r: times[r.candidate.id])
            known = _ELIMINATION_RATIOS if times[rival.candidate.id] < LONG_LAUNCH_US else _ELIMINATION_RATIOS_LONG
            limit = min((ratio for after, ratio in known if rounds >= after), default=float("inf"))
            kept = finalist is baseline or finalist.candidate.id in self.always_timed
            finalist.eliminated = not kept and finalist.ratio_to(rival) > limit
            if not finalist.eliminated and not (finalist is baseline and self._baseline_settled(finalist, rival)):
                stay.append(finalist)
        return stay

    def _baseline_settled(self, baseline: FinalistRun, rival: FinalistRun) -> bool:
        """Whether the baseline's ratio is known well enough for one that decides nothing."""
        if baseline.candidate.id in self.always_timed or len(baseline.samples) < _DECIDED_AFTER:
            return False
        ratio = paired_ratio(baseline.samples, rival.samples)
        return ratio.low > _BASELINE_SETTLED_RATIO and ratio.noise_pct <= _MAX_NOISE_PCT


def _settled(racing: list[FinalistRun]) -> bool:
    """Whether nobody may be faster than the fastest, and how far they are apart is known."""
    fastest = min(racing, key=lambda r: (median(r.samples), r.candidate.id))
    ratios = [paired_ratio(r.samples, fastest.samples) for r in racing if r is not fastest]
    return all(ratio.low > _DECIDED_RATIO and ratio.noise_pct <= _MAX_NOISE_PCT for ratio in ratios)


_FIRST_LAUNCHES = 3
_SAME_PACE_RATIO = 3.0  # samples of who takes less than this many times as long as the fastest have as many launches


@dataclass(frozen=True, kw_only=True)
class FinalsJob(Job):
    """Check every finalist against the reference, then time them in interleaved rounds.

    `library` are the candidates among which the baseline is found: the fastest of them races to the end, as do those
    in `kept` (the incumbent), for whom no round is left out. Who is in `unchecked` computes something else on purpose.
    Where the problem leaves open how x's block scales lie, a candidate is checked and timed in both layouts in every
    round, and counts by the one in which it is slower.
    """

    stage: str
    problem: Problem
    finalists: tuple[Candidate, ...]
    library: frozenset[str]
    always_timed: frozenset[str]
    timer: Timer
    err_ratio: float
    unchecked: frozenset[str] = frozenset()

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
                setup.implementation(candidate)  # an engine's is imported now: that takes seconds
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
        return trials + [replace(self._trial(finalist), shared=shared) for finalist in finalists]

    def _check(self, context: WorkerContext, setup: ProblemSetup, trials: list[Trial]) -> list[FinalistRun]:
        """Those whose result is right."""
        finalists: list[FinalistRun] = []
        for position in range(len(self.finalists)):
            finalist = self.attempt(context, trials, position, partial(self._check_finalist, context, setup, position))
            if finalist is not None and self._passes(finalist.candidate, finalist.err_ratio):
                finalists.append(finalist)
            elif finalist is not None:
                trials.append(self._wrong(finalist))
        return finalists

    def _check_finalist(
        self, context: WorkerContext, setup: ProblemSetup, position: int, candidate: Candidate
    ) -> FinalistRun:
        """Check the candidate in each layout, and look how long a launch takes. Failures are caught by the caller."""
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
        """The share of wrong elements, and what a launch takes."""
        outputs: list[torch.Tensor] = []
        setup.fill_nan()
        [time_us] = context.clock.sequence([lambda: outputs.append(launch())])
        error = 0.0 if candidate.id in self.unchecked else setup.error_ratio(outputs.pop())
        if time_us < LONG_LAUNCH_US and self._passes(
            candidate, error
        ):  # the first loads things; a long one does not care
            # The least of some: where the host fell behind, a launch seems to take up to four times as long.
            time_us = min(context.clock.sequence([launch] * _FIRST_LAUNCHES))
        return error, time_us

    def _capture(
        self, context: WorkerContext, setup: ProblemSetup, finalists: list[FinalistRun], trials: list[Trial]
    ) -> list[FinalistRun]:
        """A replay of each: of as many launches for all who may win, since starting a graph takes some microseconds.

        With 22 launches a sample for one and 66 for another, a launch of 5 us seemed up to 7 % longer (H200). On a GPU
        who is far behind those that could be captured is not replayed at all, unless no other can be the baseline.
        """
        pace_us = min((r.time_us for r in finalists if r.candidate.id not in self.unchecked), default=0.0)
        captured: list[FinalistRun] = []
        far: list[FinalistRun] = []

        def replayed(finalist: FinalistRun) -> None:
            paced_us = pace_us if pace_us <= finalist.time_us < _SAME_PACE_RATIO * pace_us else finalist.time_us
            work = partial(self._captured, context, setup, finalist, paced_us)
            if self.attempt(context, trials, finalist.position, work) is not None:
                captured.append(finalist)

        for finalist in sorted(finalists, key=lambda r: r.time_us):
            if context.clock.overlaps and self._rules.is_far_behind(finalist, captured):
                far.append(finalist)
            else:
                replayed(finalist)
        while (baseline := self._rules.baseline(captured + far)) is not None and baseline in far:
            far.remove(baseline)
            replayed(baseline)
        for finalist in far:
            finalist.samples, finalist.far_behind, finalist.eliminated = [finalist.time_us], True, True
        context.in_flight.begin(RUNNING_SEVERAL)
        return sorted(captured + far, key=lambda r: r.position)

    def _captured(
        self, context: WorkerContext, setup: ProblemSetup, finalist: FinalistRun, paced_us: float, candidate: Candidate
    ) -> FinalistRun:
        """The runner with its replays, warm. Its failure is caught by the caller."""
        per_sample = context.clock.launches_per_sample(paced_us, setup.sets)
        replays = []
        for bind in finalist.binds:
            bound = [bind(i) for i in range(min(per_sample, setup.sets))]
            replays.append(context.clock.replay([bound[i % len(bound)] for i in range(per_sample)]))
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
        """Race; once more when another process used the device meanwhile. Whether one did to the last."""
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
        """Rounds in which everyone still in the race runs once, each round in another order.

        Drawn, not turned: a GPU at its power limit lowers its clocks some time after a hungry kernel, and in any fixed
        order the same rival pays for it (3072x8192x3584 on an H200: 155 us against 146 for ten rounds, then 155
        against 162).
        All who race to the end have the same rounds, as many as the slowest of them affords: clocks sag under load,
        so times of other rounds say nothing.
        """
        racing, turn, draw = [r for r in finalists if not r.far_behind], 0, random.Random(self.problem.id)
        while turn < min((r.rounds for r in racing), default=0) and not self._rules.decided(racing):
            for finalist in draw.sample(racing, len(racing)):
                # Long launches are in the air by name, so that a hang is not blamed on the round.
                context.in_flight.begin(finalist.position)
                if len(finalist.samples) <= turn:
                    finalist.run()
            context.in_flight.begin(RUNNING_SEVERAL)
            racing = self._rules.still_racing(racing)
            turn += 1
        for finalist in finalists:
            count_launches(context, setup, finalist.candidate, finalist.launches)

    def _wrong(self, finalist: FinalistRun) -> Trial:
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
            err_ratio=finalist.err_ratio,
            extra_weight_bytes=finalist.extra_bytes,
        )
