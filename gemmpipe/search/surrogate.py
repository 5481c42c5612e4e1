"""Model-based search: seeds, then batches by a surrogate, then the neighbors of the best candidates.

A surrogate is fitted on a TrainingSet: the problem's own results and those of the nearest problems. Subclasses of
SurrogateSearch define its acquisition function.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemmpipe.core.data import Trial
from gemmpipe.core.errors import check_at_least
from gemmpipe.family import GemmSpec
from gemmpipe.search import Search, SearchProblem, SearchSession, TrialRequest
from gemmpipe.search.features import Array, FeatureCache, FeatureEncoder, FeatureMatrix
from gemmpipe.search.history import ProblemHistory
from gemmpipe.search.neighbors import NeighborIndex
from gemmpipe.search.simple import (
    BatchSession,
    HalvingConfig,
    RungLadder,
    check_trial_fraction,
    expected_entries,
)

_MAX_ROWS_PER_PROBLEM = 48  # of one other problem: its fastest, and a sample of the rest
_FASTEST_ROWS = 32
_MIN_ROWS = 4
_MIN_BATCH = 2  # candidates per step
_MIN_DISTANCE = 0.15  # closer candidates are redundant in one batch
_MIN_SEED_DISTANCE = 0.6
_MAX_CONSIDERED = 400  # candidates ranked per step; the others ranked lower in the step before


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """Results as arrays; one result per row."""

    x: Array
    """Features: `FeatureMatrix.padded`."""
    y: Array
    """log(us)."""
    estimate: Array
    """log(us) by the analytic model."""
    failed: Array
    """Features of failed candidates of the searched problem."""
    problem_index: npt.NDArray[np.int64]
    """The problem of each row; 0 is the searched one."""
    problem_sizes: Array
    """By problem: log2 of m, n, k and batch."""

    @property
    def distances(self) -> Array:
        """By pair of problems: doublings between them, summed over dimensions."""
        gaps: Array = np.abs(self.problem_sizes[:, None] - self.problem_sizes[None]).sum(-1)
        return gaps


def training_set(
    search_problem: SearchProblem,
    encoder: FeatureEncoder,
    own: FeatureMatrix,
    times_us: Array,
    failed: FeatureMatrix,
    rows: int,
) -> TrainingSet:
    """The results of the problem, and about `rows` results of other problems, the nearest first."""
    others: list[tuple[FeatureMatrix, Array, GemmSpec]] = []
    for _, known_problem in search_problem.history.nearest(search_problem.problem, search_problem.spec):
        if sum(len(times) for _, times, _ in others) >= rows:
            break
        if len(known_problem.times_us) >= _MIN_ROWS:
            others.append((*_cached_rows(known_problem, search_problem, encoder), known_problem.spec))
    columns = len(encoder.columns)
    matrices = [own, *(matrix for matrix, _, _ in others)]
    times = [times_us, *(each for _, each, _ in others)]
    specs = [search_problem.spec, *(spec for _, _, spec in others)]
    return TrainingSet(
        x=np.vstack([matrix.padded(columns) for matrix in matrices]),
        y=np.log(np.concatenate(times)),
        estimate=np.concatenate([matrix.estimate for matrix in matrices]),
        failed=failed.padded(columns),
        problem_index=np.repeat(np.arange(len(times)), [len(each) for each in times]),
        problem_sizes=np.log2([[s.m, s.weight_elements / s.k / max(1, s.batch), s.k, max(1, s.batch)] for s in specs]),
    )


def _cached_rows(
    known_problem: ProblemHistory, search_problem: SearchProblem, encoder: FeatureEncoder
) -> tuple[FeatureMatrix, Array]:
    """(features, times in us) of another problem; encoded again only after new results."""
    cached: dict[int, tuple[int, tuple[FeatureMatrix, Array]]] = search_problem.history.cached("encoded_rows", dict)
    known = cached.get(id(known_problem))
    if known is None or known[0] != known_problem.version:
        known = cached[id(known_problem)] = (
            known_problem.version,
            _encoded_rows(known_problem, search_problem, encoder),
        )
    return known[1]


def _encoded_rows(
    known_problem: ProblemHistory, search_problem: SearchProblem, encoder: FeatureEncoder
) -> tuple[FeatureMatrix, Array]:
    """(features, times in us) of the fastest candidates of another problem and a sample of the slower ones."""
    ranked = sorted(known_problem.times_us, key=lambda c: (known_problem.times_us[c], c.id))
    if len(ranked) > _MAX_ROWS_PER_PROBLEM:
        rest = ranked[_FASTEST_ROWS:]
        ranked = ranked[:_FASTEST_ROWS] + rest[:: -(-len(rest) // (_MAX_ROWS_PER_PROBLEM - _FASTEST_ROWS))]
    facts = search_problem.history.facts
    built = {build for c in ranked for build in known_problem.builds.get(c.id, ())} & facts.keys()
    cache = FeatureCache(encoder, known_problem.spec, search_problem.device, ranked, known_problem.builds)
    matrix = cache.features({build: facts[build] for build in built})
    return matrix, np.array([known_problem.times_us[c] for c in ranked], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class SurrogateSearch(Search):
    """Times a `trial_fraction` of the candidates (at least `min_trials`) in about `steps` batches by a surrogate."""

    trial_fraction: float
    min_trials: int
    seeds: int
    """First candidates of a problem without results nearby: half by the analytic model, half spread out."""
    steps: int
    neighbor_steps: int
    """Trials of `trial_fraction` reserved for neighbors of the best at the end."""
    transfer_rows: int
    """Results of other problems in the training set."""
    transfer_winners: int
    """Winners of the nearest problems that are timed first."""
    seed: int
    rungs: HalvingConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trial_fraction(self.trial_fraction, self.min_trials)
        check_at_least(1, seeds=self.seeds, steps=self.steps)
        check_at_least(
            0,
            neighbor_steps=self.neighbor_steps,
            transfer_rows=self.transfer_rows,
            transfer_winners=self.transfer_winners,
        )

    def start(self, search_problem: SearchProblem) -> SearchSession:
        return SurrogateSession(self, search_problem)

    def expected_trials(self, candidates: int, keep: int) -> int:
        entered = expected_entries(candidates, self.trial_fraction, self.min_trials)
        return RungLadder.expected_trials(self.rungs, entered, keep)

    @abstractmethod
    def acquisition(self, data: TrainingSet, pool: FeatureMatrix, columns: int) -> Array:
        """A score per row of `pool`, lowest first to be timed; `columns`: knob columns of `FeatureMatrix.padded`."""

    def prunable(self, scores: Array, best_us: float) -> npt.NDArray[np.bool_]:
        """True for candidates that, by their scores, cannot beat the best time; all False if scores are not times."""
        return np.zeros(len(scores), dtype=np.bool_)


class SurrogateSession(BatchSession):
    """The model-based search of one problem."""

    def __init__(self, search: SurrogateSearch, search_problem: SearchProblem) -> None:
        self._search, self._search_problem = search, search_problem
        self._candidates = list(search_problem.candidates)
        self._index = {c: i for i, c in enumerate(self._candidates)}
        self._max_trials = expected_entries(len(self._candidates), search.trial_fraction, search.min_trials)
        self._max_seeds = min(search.seeds, -(-self._max_trials // 3))
        spread = self._max_trials - self._max_seeds - search.neighbor_steps
        self._batch = max(_MIN_BATCH, -(-spread // search.steps))
        self._times: dict[int, float] = {}
        self._failed: list[int] = []
        self._asked: set[int] = set()
        self._ladder = RungLadder(search.rungs, search_problem.keep)
        self._exploring = True
        self._neighbors = NeighborIndex(self._candidates, self._index)
        self._considered: npt.NDArray[np.int64] = np.arange(len(self._candidates))
        """Indices of the candidates still ranked, the best of the last step first."""
        self._encoder = _encoder_of(search_problem)
        self._cache = FeatureCache(
            self._encoder, search_problem.spec, search_problem.device, self._candidates, search_problem.builds
        )
        self._matrix: FeatureMatrix
        # Seeded by the problem's id, so that a resumed run starts with the same candidates.
        self._rng = random.Random(f"{search.seed} {search_problem.problem.id}")
        super().__init__(self._first_rung_requests(self._initial()))

    # Results and batches

    def _record_trials(self, trials: Sequence[Trial]) -> None:
        self._ladder.take(trials)
        if self._exploring:
            self._times |= {self._index[t.candidate]: t.time_us for t in trials if t.time_us is not None}
            self._failed += [self._index[t.candidate] for t in trials if t.time_us is None]

    def _next_batch(self) -> Sequence[TrialRequest]:
        if self._exploring and not self._ended:
            chosen = self._next_exploration()
            if chosen:
                return self._first_rung_requests(chosen)
        self._exploring = False
        return self._ladder.next_rung()

    def _first_rung_requests(self, chosen: Sequence[int]) -> list[TrialRequest]:
        self._asked |= set(chosen)
        return [
            TrialRequest(candidate=self._candidates[i], launches=self._ladder.launches, first_rung=True) for i in chosen
        ]

    # Selection of candidates

    def _initial(self) -> list[int]:
        """The first batch: required candidates, winners of the nearest problems, and seeds.

        All winners of the same product under other conditions (a mixture's routings), and `transfer_winners` more.
        """
        required = [self._index[c] for c in self._search_problem.required]
        near = self._search_problem.history.nearest(self._search_problem.problem, self._search_problem.spec)
        known = [(far, c) for far, known_problem in near for c in known_problem.best(1) if c in self._index]
        same = dict.fromkeys(self._index[c] for far, c in known if far == 0)
        others = [i for i in dict.fromkeys(self._index[c] for _, c in known) if i not in same]
        first = list(dict.fromkeys([*required, *same, *others[: self._search.transfer_winners]]))
        if not self._candidates:
            return []
        self._update_features()
        data = self._training_set()
        room = min(self._max_seeds, self._max_trials - len(first))
        if room <= 0:
            return first
        return first + self._first_batch(data, room, set(first))

    def _first_batch(self, data: TrainingSet, count: int, taken: set[int]) -> list[int]:
        """Candidates of a problem without results: by the surrogate if other problems suffice, else seeds."""
        if len(data.y) >= self._max_seeds:
            return self._best_expected(data, count, taken)
        return self._seeds(count, taken)

    def _seeds(self, count: int, taken: set[int]) -> list[int]:
        """Half the best by the analytic model, mutually distant; half at the largest distance from all chosen."""
        pool = self._remaining(taken)
        features = self._features(pool)
        chosen = _diverse(features, self._matrix.estimate[pool], count // 2, _MIN_SEED_DISTANCE)
        sample = self._rng.sample(range(len(pool)), min(len(pool), 256))
        while len(chosen) < min(count, len(pool)) and sample:
            gaps = (
                _squared_distances(features[sample], features[chosen]).min(axis=1) if chosen else np.zeros(len(sample))
            )
            slower = self._matrix.estimate[pool][sample] - self._matrix.estimate[pool].min()
            best = sample.pop(int(np.argmax(gaps - 0.3 * slower)))
            if best not in chosen:
                chosen.append(best)
        return [int(pool[i]) for i in chosen]

    def _next_exploration(self) -> list[int]:
        """The next batch: by the surrogate; at the end of the trials, neighbors of the best two."""
        left = self._max_trials - len(self._asked)
        if left <= 0:
            return []
        self._update_features()
        data = self._training_set()
        if not self._times:  # all trials failed
            return self._first_batch(data, min(self._batch, left), self._asked)
        if left > self._search.neighbor_steps:
            chosen = self._best_expected(data, min(self._batch, left - self._search.neighbor_steps), self._asked)
            if chosen:
                return chosen
        best = sorted(self._times, key=lambda i: (self._times[i], i))[:2]
        around = [i for b in best for i in self._neighbors.neighbors(b) if i not in self._asked]
        if not around:
            return self._best_expected(data, min(self._batch, left), self._asked)
        ranked = self._ranked(data, np.array(list(dict.fromkeys(around))))
        return [int(i) for i in ranked[: min(left, self._batch)]]

    def _best_expected(self, data: TrainingSet, count: int, taken: set[int]) -> list[int]:
        pool = self._remaining(taken)
        if not len(pool):
            return []
        scores = self._search.acquisition(data, self._matrix.take(pool), len(self._encoder.columns))
        if self._times:
            self._considered = pool[np.argsort(scores, kind="stable")[:_MAX_CONSIDERED]]
            pool, scores = self._unpruned(pool, scores)
        return [int(pool[i]) for i in _diverse(self._features(pool), scores, count, _MIN_DISTANCE)]

    def _ranked(self, data: TrainingSet, pool: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        scores = self._search.acquisition(data, self._matrix.take(pool), len(self._encoder.columns))
        pool, scores = self._unpruned(pool, scores)
        return pool[np.argsort(scores, kind="stable")]

    def _unpruned(self, pool: npt.NDArray[np.int64], scores: Array) -> tuple[npt.NDArray[np.int64], Array]:
        """`pool` and `scores` without prunable candidates, once there are as many times as seeds."""
        if len(self._times) < self._search.seeds:
            return pool, scores
        kept = ~self._search.prunable(scores, min(self._times.values()))
        return pool[kept], scores[kept]

    # Features and training set

    def _remaining(self, taken: set[int]) -> npt.NDArray[np.int64]:
        return np.array([i for i in self._considered if i not in taken], dtype=np.int64)

    def _features(self, pool: npt.NDArray[np.int64]) -> Array:
        return self._matrix.take(pool).padded(len(self._encoder.columns))

    def _update_features(self) -> None:
        """Update the features with new facts of builds."""
        self._matrix = self._cache.features(self._search_problem.history.facts)

    def _training_set(self) -> TrainingSet:
        own = np.array(list(self._times), dtype=np.int64)
        times = np.array(list(self._times.values()), dtype=np.float64)
        failed = self._matrix.take(np.array(list(self._failed), dtype=np.int64))
        return training_set(
            self._search_problem, self._encoder, self._matrix.take(own), times, failed, self._search.transfer_rows
        )


def _encoder_of(search_problem: SearchProblem) -> FeatureEncoder:
    """The encoder that all searches of the run share."""
    return search_problem.history.cached("encoder", FeatureEncoder)


def _squared_distances(a: Array, b: Array) -> Array:
    squares: Array = ((a[:, None] - b[None]) ** 2).sum(-1)
    return squares


def _diverse(features: Array, scores: Array, count: int, apart: float) -> list[int]:
    """The `count` lowest by score, skipping rows nearer than `apart` to a chosen one unless too few are left."""
    ranked = [int(i) for i in np.argsort(scores, kind="stable")]
    chosen: list[int] = []
    for i in ranked:
        if len(chosen) == count:
            return chosen
        if not chosen or float(((features[chosen] - features[i]) ** 2).sum(1).min()) >= apart**2:
            chosen.append(i)
    left = [i for i in ranked if i not in set(chosen)]
    return chosen + left[: count - len(chosen)]
