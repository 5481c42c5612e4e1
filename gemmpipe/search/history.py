"""Transfer of knowledge between searches: results of other problems and earlier runs, and facts of builds."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from gemmpipe.core.data import BuildFacts, Candidate, Problem, Trial
from gemmpipe.family import GemmSpec

T = TypeVar("T")

_MAX_DISTANCE = 6.0  # doublings over all dimensions, beyond which results do not transfer


@dataclass(kw_only=True, eq=False)
class ProblemHistory:
    """Results of one problem."""

    spec: GemmSpec
    builds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Candidate id -> ids of its builds."""
    times_us: dict[Candidate, float] = field(default_factory=dict)
    failed: set[Candidate] = field(default_factory=set)
    winner: Candidate | None = None
    """The winner in a tuned table."""
    version: int = 0
    """Number of results learned: derived data is valid as long as it is unchanged."""

    def best(self, count: int) -> list[Candidate]:
        """The winner if known, else the `count` fastest candidates."""
        if self.winner is not None:
            return [self.winner]
        return sorted(self.times_us, key=lambda c: (self.times_us[c], c.id))[:count]


@dataclass(kw_only=True, eq=False)
class History:
    """All results of a run that searches learn from."""

    problems: dict[str, ProblemHistory] = field(default_factory=dict)
    """Problem id -> its results."""
    facts: dict[str, BuildFacts] = field(default_factory=dict)
    """Build id -> its facts."""
    _cache: dict[str, object] = field(default_factory=dict)
    _distances: dict[tuple[str, str], float] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """An object that searches share over the problems of a run, created on first use."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]  # type: ignore[return-value]

    def add_problem(
        self, problem: Problem, spec: GemmSpec, builds: dict[str, tuple[str, ...]] | None = None
    ) -> ProblemHistory:
        """The history of a problem, created if missing."""
        problem_history = self.problems.setdefault(problem.id, ProblemHistory(spec=spec))
        if builds is not None:
            problem_history.builds = builds
        return problem_history

    def learn(self, trial: Trial) -> None:
        """Add a result of an added problem; the latest time of a candidate replaces earlier ones."""
        problem_history = self.problems.get(trial.problem)
        if problem_history is None:
            return
        problem_history.version += 1
        if trial.time_us is None:
            problem_history.failed.add(trial.candidate)
        else:
            problem_history.times_us[trial.candidate] = trial.time_us

    def nearest(self, problem: Problem, spec: GemmSpec) -> list[tuple[float, ProblemHistory]]:
        """(distance in doublings, history) of other problems with the same dtypes, nearest first."""
        own = problem.id
        found = [(self._distance(own, spec, name), name) for name in self.problems if name != own]
        return [(far, self.problems[name]) for far, name in sorted(found) if far <= _MAX_DISTANCE]

    def _distance(self, problem: str, spec: GemmSpec, other: str) -> float:
        """Cached: needed at every step of every search."""
        known = self._distances.get((problem, other))
        if known is None:
            known = self._distances[problem, other] = distance(spec, self.problems[other].spec)
        return known


def distance(a: GemmSpec, b: GemmSpec) -> float:
    """Distance of two products in doublings, summed over their dimensions; infinite for different dtypes."""
    (kind, sizes), (other, others) = _kind_and_sizes(a), _kind_and_sizes(b)
    if kind != other:
        return math.inf
    return sum(abs(x - y) for x, y in zip(sizes, others, strict=True))


@lru_cache(maxsize=4096)
def _kind_and_sizes(spec: GemmSpec) -> tuple[tuple[object, ...], tuple[float, ...]]:
    """(dtypes, scaling and layout of a product, log2 of its dimensions)."""
    kind = (spec.x_dtype, spec.w_dtype, spec.out_dtype, spec.x_scale, spec.w_scale, spec.w_layout, spec.experts is None)
    return kind, tuple(math.log2(size) for size in (spec.m, spec.weight_elements / spec.k, spec.k, spec.batch))
