"""The finals of one problem."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.family import Launch
from gemmpipe.jobs import LONG_US, SETTING_UP, TOGETHER, Job, Tools, count, rounded
from gemmpipe.jobs.race import Rules, Runner
from gemmpipe.timer import Timer
from gemmpipe.workbench import Setup

if TYPE_CHECKING:
    import torch


_GLANCES = 3
_ALIKE = 3.0  # samples of who takes less than this many times as long as the fastest have as many launches


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
            setup = tools.bench.set_up(self.problem, finals=True)
            setup.release()
            for candidate in self.finalists:
                setup.implementation(candidate)  # an engine's is imported now: that takes seconds
            setup.reference()
            for index in range(setup.sets):
                setup.weights(index), setup.out(index)
                for order in setup.spec.possible_orders:
                    setup.inputs(index, order)
            tools.clock.synchronize()
        with tools.spending("checks"):
            runners = self._check(tools, setup, trials)
            runners = self._capture(tools, setup, runners, trials)
        with tools.spending("finals"):
            shared = self._race_alone(tools, setup, runners)
        return trials + [replace(self._trial(runner), shared=shared) for runner in runners]

    def _check(self, tools: Tools, setup: Setup, trials: list[Trial]) -> list[Runner]:
        """Those whose result is right."""
        runners: list[Runner] = []
        for position in range(len(self.finalists)):
            runner = self.attempt(tools, trials, position, partial(self._runner, tools, setup, position))
            if runner is not None and self._passes(runner.candidate, runner.err_ratio):
                runners.append(runner)
            elif runner is not None:
                trials.append(self._wrong(runner))
        return runners

    def _runner(self, tools: Tools, setup: Setup, position: int, candidate: Candidate) -> Runner:
        """Check the candidate in each layout, and look how long a launch takes. Failures are caught by the caller."""
        binds = tuple(setup.binder(candidate, order) for order in setup.orders(candidate))
        looks: list[tuple[float, float]] = []
        for bind in binds:
            looks.append(self._look(tools, setup, candidate, bind(0)))
            if not self._passes(candidate, looks[-1][0]):
                break
        return Runner(
            candidate=candidate,
            position=position,
            err_ratio=max(error for error, _ in looks),
            first_us=tuple(time_us for _, time_us in looks),
            binds=binds,
            extra_bytes=setup.prepared(candidate, 0).extra_bytes,
        )

    def _look(self, tools: Tools, setup: Setup, candidate: Candidate, launch: Launch) -> tuple[float, float]:
        """The share of wrong elements, and what a launch takes."""
        outputs: list[torch.Tensor] = []
        setup.poison()
        [time_us] = tools.clock.sequence([lambda: outputs.append(launch())])
        error = 0.0 if candidate.id in self.unchecked else setup.error_ratio(outputs.pop())
        if time_us < LONG_US and self._passes(candidate, error):  # the first loads things; a long one does not care
            # The least of some: where the host fell behind, a launch seems to take up to four times as long.
            time_us = min(tools.clock.sequence([launch] * _GLANCES))
        return error, time_us

    def _capture(self, tools: Tools, setup: Setup, runners: list[Runner], trials: list[Trial]) -> list[Runner]:
        """A replay of each: of as many launches for all who may win, since starting a graph takes some microseconds.

        With 22 launches a sample for one and 66 for another, a launch of 5 us seemed up to 7 % longer (H200). On a GPU
        who is far behind those that could be captured is not replayed at all, unless no other can be the baseline.
        """
        pace_us = min((r.time_us for r in runners if r.candidate.id not in self.unchecked), default=0.0)
        captured: list[Runner] = []
        far: list[Runner] = []

        def replayed(runner: Runner) -> None:
            paced_us = pace_us if pace_us <= runner.time_us < _ALIKE * pace_us else runner.time_us
            work = partial(self._captured, tools, setup, runner, paced_us)
            if self.attempt(tools, trials, runner.position, work) is not None:
                captured.append(runner)

        for runner in sorted(runners, key=lambda r: r.time_us):
            if tools.clock.overlaps and self._rules.is_far(runner, captured):
                far.append(runner)
            else:
                replayed(runner)
        while (baseline := self._rules.baseline(captured + far)) is not None and baseline in far:
            far.remove(baseline)
            replayed(baseline)
        for runner in far:
            runner.samples, runner.far, runner.outrun = [runner.time_us], True, True
        tools.flight.begin(TOGETHER)
        return sorted(captured + far, key=lambda r: r.position)

    def _captured(self, tools: Tools, setup: Setup, runner: Runner, paced_us: float, candidate: Candidate) -> Runner:
        """The runner with its replays, warm. Its failure is caught by the caller."""
        per_sample = tools.clock.launches_per_sample(paced_us, setup.sets)
        replays = []
        for bind in runner.binds:
            bound = [bind(i) for i in range(min(per_sample, setup.sets))]
            replays.append(tools.clock.replay([bound[i % len(bound)] for i in range(per_sample)]))
        runner.replays, runner.per_sample = tuple(replays), per_sample
        runner.rounds = self.timer.rounds_for(sum(runner.first_us), per_sample)
        runner.begin(first=runner.time_us >= LONG_US)
        if runner.time_us < LONG_US:
            for _ in range(min(3, -(-self.timer.warmup // per_sample))):
                for replay in replays:
                    replay()
        return runner

    @property
    def _rules(self) -> Rules:
        return Rules(library=self.library, kept=self.kept, unchecked=self.unchecked)

    def _passes(self, candidate: Candidate, error: float) -> bool:
        return candidate.id in self.unchecked or error < self.err_ratio

    def _race_alone(self, tools: Tools, setup: Setup, runners: list[Runner]) -> bool:
        """Race; once more when another process used the device meanwhile. Whether one did to the last."""
        tools.neighbours.look()
        self._race(tools, setup, runners)
        if not tools.neighbours.look():
            return False
        for runner in runners:
            if not runner.far:
                runner.begin(first=False)
        self._race(tools, setup, runners)
        return tools.neighbours.look()

    def _race(self, tools: Tools, setup: Setup, runners: list[Runner]) -> None:
        """Rounds in which everyone still in the race runs once, each round in another order.

        Drawn, not turned: a GPU at its power limit lowers its clocks some time after a hungry kernel, and in any fixed
        order the same rival pays for it (3072x8192x3584 on an H200: 155 us against 146 for ten rounds, then 155
        against 162).
        All who race to the end have the same rounds, as many as the slowest of them affords: clocks sag under load,
        so times of other rounds say nothing.
        """
        racing, turn, draw = [r for r in runners if not r.far], 0, random.Random(self.problem.id)
        while turn < min((r.rounds for r in racing), default=0) and not self._rules.decided(racing):
            for runner in draw.sample(racing, len(racing)):
                # Long launches are in the air by name, so that a hang is not blamed on the round.
                tools.flight.begin(runner.position)
                if len(runner.samples) <= turn:
                    runner.run()
            tools.flight.begin(TOGETHER)
            racing = self._rules.still_racing(racing)
            turn += 1
        for runner in runners:
            count(tools, setup, runner.candidate, runner.launches)

    def _wrong(self, runner: Runner) -> Trial:
        text = f"error ratio {runner.err_ratio:.4f}, must be below {self.err_ratio:g}"
        return replace(self.failed(runner.candidate, Status.WRONG, text), err_ratio=runner.err_ratio)

    def _trial(self, runner: Runner) -> Trial:
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=runner.candidate,
            status=Status.DROPPED if runner.outrun else Status.OK,
            launches=runner.launches,
            samples_us=rounded(runner.samples),
            err_ratio=runner.err_ratio,
            extra_weight_bytes=runner.extra_bytes,
        )
