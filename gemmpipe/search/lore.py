"""What is known beside a problem's own results: those of other problems, of earlier runs, and facts of builds."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gemmpipe.data import BuildFacts, Candidate, Problem, Trial
from gemmpipe.family import GemmSpec

T = TypeVar("T")

_FAR = 6.0  # doublings, all dimensions together, beyond which a problem teaches nothing


@dataclass(kw_only=True, eq=False)
class Tale:
    """What is known of one problem."""

    spec: GemmSpec
    builds: Mapping[str, Iterable[str]] = field(default_factory=dict)
    """By candidate id, the builds that it needed."""
    times_us: dict[Candidate, float] = field(default_factory=dict)
    failed: set[Candidate] = field(default_factory=set)
    winner: Candidate | None = None
    """What a tuned table chose for it."""

    def best(self, count: int) -> list[Candidate]:
        """The winner, or the fastest that are known."""
        if self.winner is not None:
            return [self.winner]
        return sorted(self.times_us, key=lambda c: (self.times_us[c], c.id))[:count]


@dataclass(kw_only=True, eq=False)
class Lore:
    """Everything a run knows that a search may learn from."""

    tales: dict[str, Tale] = field(default_factory=dict)
    """By problem id."""
    facts: dict[str, BuildFacts] = field(default_factory=dict)
    """By build id."""
    _kept: dict[str, object] = field(default_factory=dict)

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """What a search keeps over the problems of a run, made when it is not there."""
        return self._kept.setdefault(name, make())  # type: ignore[return-value]

    def hear(self, problem: Problem, spec: GemmSpec, builds: Mapping[str, Iterable[str]] | None = None) -> Tale:
        """The tale of a problem, begun when there is none."""
        tale = self.tales.setdefault(problem.id, Tale(spec=spec))
        if builds is not None:
            tale.builds = builds
        return tale

    def learn(self, trial: Trial) -> None:
        """Take a result of a problem that was heard of; the latest look at a candidate counts."""
        tale = self.tales.get(trial.problem)
        if tale is None:
            return
        if trial.time_us is None:
            tale.failed.add(trial.candidate)
        else:
            tale.times_us[trial.candidate] = trial.time_us

    def near(self, problem: Problem, spec: GemmSpec) -> list[tuple[float, Tale]]:
        """(distance, tale) of problems of the same types, the nearest first; its own is not among them."""
        found = [(distance(spec, t.spec), name, t) for name, t in self.tales.items() if name != problem.id]
        ranked = sorted((far, name) for far, name, _ in found if far <= _FAR)
        return [(far, self.tales[name]) for far, name in ranked]


def distance(a: GemmSpec, b: GemmSpec) -> float:
    """Doublings between two products, summed over their dimensions; infinite for other types."""
    kinds = [(s.x_dtype, s.w_dtype, s.out_dtype, s.x_scale, s.w_scale, s.w_layout, s.experts is None) for s in (a, b)]
    if kinds[0] != kinds[1]:
        return math.inf
    sizes = [(s.m, s.weight_elements / s.k, s.k, s.batch) for s in (a, b)]
    return sum(abs(math.log2(x / y)) for x, y in zip(*sizes, strict=True))
