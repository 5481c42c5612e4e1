"""Searches without a model: exhaustive, random, and successive halving (Jamieson and Talwalkar, 2016).

Halving times candidates in rungs: each rung times a fraction of the candidates of the last one with more launches,
until the order of the few that are left is reliable. Random and model-based searches end with these rungs as well.
Random search is the baseline for every other search.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.core.data import Candidate, Trial
from gemmpipe.core.errors import check_at_least
from gemmpipe.search import Search, SearchProblem, SearchSession, TrialRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvingConfig:
    """Rungs of successive halving: a fraction of each enters the next, never fewer than the finalists."""

    keep_fraction: float
    first_launches: int
    max_launches: int
    cutoff: float
    """Candidates slower than this times the fastest are pruned."""

    def __post_init__(self) -> None:
        if not 0 < self.keep_fraction < 1:
            raise ValueError(f"keep_fraction={self.keep_fraction:g}, expected between 0 and 1")
        check_at_least(1, first_launches=self.first_launches, max_launches=self.max_launches, cutoff=self.cutoff)


class RungLadder:
    """The rungs of one problem: takes results, and returns the candidates and launches of the next rung."""

    def __init__(self, config: HalvingConfig, keep: int) -> None:
        self._config = config
        self._keep = keep
        self.launches = config.first_launches
        self._timed: list[tuple[float, Candidate]] = []

    @staticmethod
    def expected_trials(config: HalvingConfig, entered: int, keep: int) -> int:
        """The trials of all rungs if this many candidates enter the first, and none is pruned by `cutoff`."""
        total, launches = entered, config.first_launches
        while entered > keep and (launches := round(launches / config.keep_fraction)) <= config.max_launches:
            entered = max(keep, int(entered * config.keep_fraction))
            total += entered
        return total

    def take(self, trials: Sequence[Trial]) -> None:
        """Add results of the current rung; failures are pruned."""
        self._timed += [(t.time_us, t.candidate) for t in trials if t.time_us is not None]

    def next_rung(self) -> list[TrialRequest]:
        """The requests of the next rung; empty after the last one."""
        entered = len(self._timed)
        survivors = max(self._keep, int(entered * self._config.keep_fraction))
        self.launches = round(self.launches / self._config.keep_fraction)
        if entered <= self._keep or self.launches > self._config.max_launches:
            return []
        ranked = sorted(self._timed, key=lambda pair: (pair[0], pair[1].id))[:survivors]
        limit = ranked[0][0] * self._config.cutoff
        self._timed = []
        return [TrialRequest(candidate=c, launches=self.launches) for time_us, c in ranked if time_us <= limit]


class BatchSession(SearchSession):
    """A search in batches: `_next_batch` decides the next batch after all results of the last one."""

    def __init__(self, first: Sequence[TrialRequest]) -> None:
        self._requests = list(first)
        self._pending = len(first)
        self._ended = False

    def ask(self) -> Sequence[TrialRequest]:
        requests, self._requests = self._requests, []
        return requests

    def tell(self, trials: Sequence[Trial]) -> None:
        self._pending -= len(trials)
        self._record_trials(trials)
        self._advance()

    def end(self, dropped: int) -> None:
        self._ended = True
        self._pending -= dropped + len(self._requests)
        self._requests = []
        self._advance()

    def _advance(self) -> None:
        if self._pending == 0:
            self._requests = list(self._next_batch())
            self._pending = len(self._requests)

    @property
    def finished(self) -> bool:
        return self._pending == 0

    @abstractmethod
    def _record_trials(self, trials: Sequence[Trial]) -> None:
        """Results of the current batch, in any number of parts."""

    @abstractmethod
    def _next_batch(self) -> Sequence[TrialRequest]:
        """The next batch; empty at the end of the search. After `end`, timed candidates only."""


class HalvingSession(BatchSession):
    """A first rung over given candidates, then the next rungs."""

    def __init__(self, first_rung: Sequence[TrialRequest], ladder: RungLadder) -> None:
        super().__init__(first_rung)
        self._ladder = ladder

    def _record_trials(self, trials: Sequence[Trial]) -> None:
        self._ladder.take(trials)

    def _next_batch(self) -> Sequence[TrialRequest]:
        return self._ladder.next_rung()


class _ExhaustiveSession(BatchSession):
    def _record_trials(self, trials: Sequence[Trial]) -> None:
        """Does not depend on results."""

    def _next_batch(self) -> Sequence[TrialRequest]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Exhaustive(Search):
    """Times every candidate with the same number of launches."""

    def start(self, search_problem: SearchProblem) -> SearchSession:
        return _ExhaustiveSession(
            [TrialRequest(candidate=c, launches=search_problem.launches) for c in search_problem.candidates]
        )


@dataclass(frozen=True, kw_only=True)
class Halving(Search):
    """Times all candidates in the first rung, then fewer and fewer of them in the next `rungs`."""

    rungs: HalvingConfig

    def start(self, search_problem: SearchProblem) -> SearchSession:
        ladder = RungLadder(self.rungs, search_problem.keep)
        requests = [
            TrialRequest(candidate=c, launches=ladder.launches, first_rung=True) for c in search_problem.candidates
        ]
        return HalvingSession(requests, ladder)

    def expected_trials(self, candidates: int, keep: int) -> int:
        return RungLadder.expected_trials(self.rungs, candidates, keep)


@dataclass(frozen=True, kw_only=True)
class Random(Search):
    """Times a random `trial_fraction` of the candidates (at least `min_trials`), then the best of them in `rungs`."""

    trial_fraction: float
    min_trials: int
    seed: int
    rungs: HalvingConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trial_fraction(self.trial_fraction, self.min_trials)

    def start(self, search_problem: SearchProblem) -> SearchSession:
        given = dict.fromkeys(search_problem.required)
        others = [c for c in search_problem.candidates if c not in given]
        # Seeded by the problem's id, so that a resumed run draws the same candidates.
        order = random.Random(f"{self.seed} {search_problem.problem.id}").sample(others, len(others))
        wanted = expected_entries(len(search_problem.candidates), self.trial_fraction, self.min_trials)
        ladder = RungLadder(self.rungs, search_problem.keep)
        chosen = [*given, *order[: max(0, wanted - len(given))]]
        return HalvingSession(
            [TrialRequest(candidate=c, launches=ladder.launches, first_rung=True) for c in chosen], ladder
        )

    def expected_trials(self, candidates: int, keep: int) -> int:
        entered = expected_entries(candidates, self.trial_fraction, self.min_trials)
        return RungLadder.expected_trials(self.rungs, entered, keep)


def expected_entries(candidates: int, trial_fraction: float, min_trials: int) -> int:
    """The number of candidates that a search by `trial_fraction` times, of this many."""
    return min(candidates, max(min_trials, round(trial_fraction * candidates)))


def check_trial_fraction(trial_fraction: float, min_trials: int) -> None:
    """Raises ValueError if `trial_fraction` is not in (0, 1] or `min_trials` is less than 1."""
    if not 0 < trial_fraction <= 1:
        raise ValueError(f"trial_fraction={trial_fraction:g}, expected above 0 and at most 1")
    check_at_least(1, min_trials=min_trials)
