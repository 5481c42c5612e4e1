"""Having Triton's own tuner choose a configuration of one problem."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from gemmpipe.backends.autotune import LABEL, Autotuned
from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.jobs import SETTING_UP, Job, Tools, rounded
from gemmpipe.workbench import Setup


@dataclass(frozen=True, kw_only=True)
class AutotuneJob(Job):
    """The trial's candidate is what was chosen, its time what the tuner saw; it is checked and timed in the finals.

    It counts as one candidate in the air, from configuration to configuration: one that hangs ends the job, and the
    tuning as a whole may take longer than a candidate's deadline.
    """

    stage: str
    problem: Problem
    configurations: tuple[Candidate, ...]
    """What it chooses among, in the order in which it looks at them."""
    asks: tuple[Candidate, ...] = (Candidate.of(LABEL, {}),)
    """The one candidate that is in the air until it has chosen; none where that is given up."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.asks

    def without(self, done: Collection[Candidate]) -> "AutotuneJob":
        return replace(self, asks=tuple(c for c in self.asks if c not in done))

    def run(self, tools: Tools) -> list[Trial]:
        trials: list[Trial] = []
        with tools.spending("operands"):
            tools.flight.begin(SETTING_UP)
            setup = tools.bench.set_up(self.problem)
            setup.inputs(0), setup.weights(0), setup.out(0)
            tools.clock.synchronize()
        with tools.spending("autotune"):
            chosen = self.attempt(tools, trials, 0, partial(self._choose, tools, setup))
        return trials if chosen is None else [chosen]

    def _choose(self, tools: Tools, setup: Setup, candidate: Candidate) -> Trial:
        implementation = tools.bench.implementation(candidate)
        assert isinstance(implementation, Autotuned), "an AutotuneJob is for the backend of its label"
        choice = implementation.choose(
            setup.spec,
            [c.knobs for c in self.configurations],
            tools.bench.device,
            setup.inputs(0),
            setup.prepared(candidate, 0),
            setup.out(0),
            before_each=lambda: tools.flight.begin(0),
        )
        tools.clock.synchronize()
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=Candidate.of(LABEL, self.configurations[choice.place].knobs),
            status=Status.OK,
            samples_us=() if choice.time_us is None else rounded([choice.time_us]),
            tuning=choice.tuning,
        )
