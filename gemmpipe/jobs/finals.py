"""The finals of one problem."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from gemmpipe.data import Candidate, Problem, Status, Trial, median
from gemmpipe.family import Launch
from gemmpipe.jobs import LONG_US, SETTING_UP, TOGETHER, Job, Tools, count, rounded
from gemmpipe.paired import paired_ratio
from gemmpipe.timer import Replay, Timer
from gemmpipe.workbench import Setup

if TYPE_CHECKING:
    import torch

# (rounds, ratio to the fastest): slower than this is not timed further. Of 576 finals on H200s (2026-11-21) these put
# out the winner of all rounds twice, 3.8 and 0.01 % behind the one that was left.
_OUTRUN = ((1, 1.3), (2, 1.15), (3, 1.08), (5, 1.05), (8, 1.03), (15, 1.02))
_OUTRUN_LONG = ((1, 1.15), (2, 1.08), (3, 1.05))  # one launch of 20 ms and more is its own average
_GLANCES = 3
_ALIKE = 3.0  # samples of who takes less than this many times as long as the fastest have as many launches
_DECIDED_AFTER = 10  # rounds, when all but the fastest are behind by more than this with an interval of 95 %: in the
_DECIDED = 1.005  # same finals the choice of all rounds but for five, which the one chosen is within 0.3 % of


@dataclass(frozen=True, kw_only=True)
class FinalsJob(Job):
    """Check every finalist against the reference, then time them in interleaved rounds.

    `library` are the candidates among which the baseline is found: the fastest of them races to the end, as do those
    in `kept` (the incumbent), for whom no round is left out. Who is in `unchecked` computes something else on purpose.
    """

    stage: str
    problem: Problem
    finalists: tuple[Candidate, ...]
    library: frozenset[str]
    kept: frozenset[str]
    timer: Timer
    err_ratio: float
    unchecked: frozenset[str] = frozenset()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.finalists

    def without(self, done: Collection[Candidate]) -> "FinalsJob":
        return replace(self, finalists=tuple(c for c in self.finalists if c not in done))

    def run(self, tools: Tools) -> list[Trial]:
        trials: list[Trial] = []
        with tools.spending("operands"):
            tools.flight.begin(SETTING_UP)
            setup = tools.bench.set_up(self.problem)
            setup.reference()
            for index in range(setup.sets):
                setup.inputs(index), setup.weights(index), setup.out(index)
            tools.clock.synchronize()
        with tools.spending("checks"):
            runners = self._check(tools, setup, trials)
            runners = self._capture(tools, setup, runners, trials)
        with tools.spending("finals"):
            shared = self._race_alone(tools, setup, runners)
        return trials + [replace(self._trial(runner), shared=shared) for runner in runners]

    def _check(self, tools: Tools, setup: Setup, trials: list[Trial]) -> "list[_Runner]":
        """Those whose result is right."""
        runners: list[_Runner] = []
        for position in range(len(self.finalists)):
            runner = self.attempt(tools, trials, position, partial(self._runner, tools, setup, position))
            if runner is not None and self._passes(runner.candidate, runner.err_ratio):
                runners.append(runner)
            elif runner is not None:
                trials.append(self._wrong(runner))
        return runners

    def _runner(self, tools: Tools, setup: Setup, position: int, candidate: Candidate) -> "_Runner":
        """Check the candidate, and look how long a launch takes. Its failure is caught by the caller."""
        launch = setup.bind(candidate, 0)
        outputs: list[torch.Tensor] = []
        setup.poison()
        [time_us] = tools.clock.sequence([lambda: outputs.append(launch())])
        free = candidate.id in self.unchecked
        error = 0.0 if free else setup.error_ratio(outputs.pop())
        runner = _Runner(candidate=candidate, position=position, err_ratio=error, time_us=time_us, launch=launch)
        if self._passes(candidate, error) and time_us < LONG_US:  # the first loads things; a long one does not care
            # The least of some: where the host fell behind, a launch seems to take up to four times as long.
            runner.time_us = min(tools.clock.sequence([launch] * _GLANCES))
        return runner

    def _capture(self, tools: Tools, setup: Setup, runners: "list[_Runner]", trials: list[Trial]) -> "list[_Runner]":
        """A replay of each: of as many launches for all who may win, since starting a graph takes some microseconds.

        With 22 launches a sample for one and 66 for another, a launch of 5 us seemed up to 7 % longer (H200).
        """
        pace_us = min((r.time_us for r in runners), default=0.0)
        captured = []
        for runner in runners:
            paced_us = pace_us if runner.time_us < _ALIKE * pace_us else runner.time_us
            work = partial(self._captured, tools, setup, runner, paced_us)
            if (replayed := self.attempt(tools, trials, runner.position, work)) is not None:
                captured.append(replayed)
        tools.flight.begin(TOGETHER)
        return captured

    def _captured(
        self, tools: Tools, setup: Setup, runner: "_Runner", paced_us: float, candidate: Candidate
    ) -> "_Runner":
        """The runner with its replay, warm. Its failure is caught by the caller."""
        per_sample = tools.clock.launches_per_sample(paced_us, setup.sets)
        bound = [runner.launch, *setup.bind_each(candidate, range(1, min(per_sample, setup.sets)))]
        runner.replay = tools.clock.replay([bound[i % len(bound)] for i in range(per_sample)])
        runner.per_sample = per_sample
        runner.rounds = self.timer.rounds_for(runner.time_us, per_sample)
        runner.extra_bytes = setup.prepared(candidate, 0).extra_bytes
        if runner.time_us < LONG_US:
            for _ in range(min(3, -(-self.timer.warmup // per_sample))):
                runner.replay()
        else:
            runner.samples = [runner.time_us]
        return runner

    def _passes(self, candidate: Candidate, error: float) -> bool:
        return candidate.id in self.unchecked or error < self.err_ratio

    def _race_alone(self, tools: Tools, setup: Setup, runners: "list[_Runner]") -> bool:
        """Race; once more when another process used the device meanwhile. Whether one did to the last."""
        tools.neighbours.look()
        self._race(tools, setup, runners)
        if not tools.neighbours.look():
            return False
        for runner in runners:
            runner.samples, runner.outrun = [], False
        self._race(tools, setup, runners)
        return tools.neighbours.look()

    def _race(self, tools: Tools, setup: Setup, runners: "list[_Runner]") -> None:
        """Rounds in which everyone still in the race runs once, each round in another order.

        Drawn, not turned: a GPU at its power limit lowers its clocks some time after a hungry kernel, and in any fixed
        order the same rival pays for it (3072x8192x3584 on an H200: 155 us against 146 for ten rounds, then 155
        against 162).
        All who race to the end have the same rounds, as many as the slowest of them affords: clocks sag under load,
        so times of other rounds say nothing.
        """
        racing, turn, draw = list(runners), 0, random.Random(self.problem.id)
        while turn < min((r.rounds for r in racing), default=0) and not self._decided(racing, turn):
            for runner in draw.sample(racing, len(racing)):
                # Long launches are in the air by name, so that a hang is not blamed on the round.
                tools.flight.begin(runner.position)
                if len(runner.samples) <= turn:
                    runner.samples.append(runner.replay())
            tools.flight.begin(TOGETHER)
            racing = self._still_racing(racing)
            turn += 1
        for runner in runners:
            count(tools, setup, runner.candidate, len(runner.samples) * runner.per_sample)

    def _decided(self, racing: "list[_Runner]", turn: int) -> bool:
        """Whether more rounds would only say more exactly what is known: who is the fastest, and of whom."""
        if turn < _DECIDED_AFTER or any(runner.candidate.id in self.kept for runner in racing):
            return False
        fastest = min(racing, key=lambda r: (median(r.samples), r.candidate.id))
        rivals = [r for r in racing if r is not fastest]
        return all(paired_ratio(r.samples, fastest.samples).low > _DECIDED for r in rivals)

    def _still_racing(self, racing: "list[_Runner]") -> "list[_Runner]":
        """Outrun is who has a rival that needs no more weight memory and is faster by the limit of this round.

        Compared round by round: when clocks sag in the middle of a race, medians of the same kernel a round apart lie
        on either side.
        """
        times = {r.candidate.id: median(r.samples) for r in racing}
        rounds = max((len(r.samples) for r in racing), default=0)
        library = [r for r in racing if r.candidate.id in self.library]
        baseline = min(library, key=lambda r: (r.extra_bytes, times[r.candidate.id]), default=None)
        stay = []
        for runner in racing:
            rivals = (r for r in racing if r.extra_bytes <= runner.extra_bytes)
            rival = min(rivals, key=lambda r: times[r.candidate.id])
            known = _OUTRUN if times[rival.candidate.id] < LONG_US else _OUTRUN_LONG
            limit = min((ratio for after, ratio in known if rounds >= after), default=float("inf"))
            kept = runner is baseline or runner.candidate.id in self.kept
            runner.outrun = not kept and runner.behind(rival) > limit
            if not runner.outrun:
                stay.append(runner)
        return stay

    def _wrong(self, runner: "_Runner") -> Trial:
        text = f"error ratio {runner.err_ratio:.4f}, must be below {self.err_ratio:g}"
        return replace(self.failed(runner.candidate, Status.WRONG, text), err_ratio=runner.err_ratio)

    def _trial(self, runner: "_Runner") -> Trial:
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=runner.candidate,
            status=Status.DROPPED if runner.outrun else Status.OK,
            launches=len(runner.samples) * runner.per_sample,
            samples_us=rounded(runner.samples),
            err_ratio=runner.err_ratio,
            extra_weight_bytes=runner.extra_bytes,
        )


def _no_replay() -> float:
    raise AssertionError("a wrong candidate is never replayed")


@dataclass
class _Runner:
    candidate: Candidate
    position: int
    err_ratio: float
    time_us: float
    launch: Launch
    replay: Replay = _no_replay
    rounds: int = 0
    per_sample: int = 1
    extra_bytes: int = 0
    samples: list[float] = field(default_factory=list)
    outrun: bool = False

    def behind(self, rival: "_Runner") -> float:
        """The ratio of this one's time to the rival's: the median over the rounds that both ran."""
        return median([mine / other for mine, other in zip(self.samples, rival.samples, strict=True)])
