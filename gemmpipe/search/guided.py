"""Searches that learn: seeds, then what a surrogate finds promising, then the winner's whole neighbourhood."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemmpipe.data import Trial
from gemmpipe.errors import at_least
from gemmpipe.search import Hunt, Request, Search, Subject
from gemmpipe.search.evidence import Evidence, gather
from gemmpipe.search.features import Array, Sight, View, Vocabulary
from gemmpipe.search.looks import Ladder, Looks
from gemmpipe.search.neighbourhood import Neighbourhood
from gemmpipe.search.random import check_share
from gemmpipe.search.steps import StepHunt

_FEWEST = 2  # a step
_TWINS = 0.15  # closer than this two candidates teach the same
_SEEDS_APART = 0.6
_CONSIDERED = 400  # the rest did not look promising once much was known, and is not ranked again


@dataclass(frozen=True, kw_only=True)
class Guided(Search):
    """Looks at a `share` of the candidates (at least `least`), chosen in about so many `steps` from what is known."""

    share: float
    least: int
    seeds: int
    """First candidates of a problem of which nothing is known: half by the analytic model, half spread out."""
    steps: int
    polish: int
    """Of the share, kept for the neighbours of the best at the end."""
    rows: int
    """Results of other problems that the surrogate takes in."""
    winners: int
    """Winners of the nearest problems that are tried first."""
    seed: int
    looks: Looks

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.share, self.least)
        at_least(1, seeds=self.seeds, steps=self.steps)
        at_least(0, polish=self.polish, rows=self.rows, winners=self.winners)

    def start(self, subject: Subject) -> Hunt:
        return GuidedHunt(self, subject)

    @abstractmethod
    def order(self, evidence: Evidence, pool: Sight, columns: int) -> Array:
        """A number for each row of `pool`: the lower, the sooner it should be timed."""

    def hopeless(self, order: Array, best_us: float) -> npt.NDArray[np.bool_]:
        """Who cannot be faster than the best any more, by this `order`; nobody, where it says nothing of times."""
        return np.zeros(len(order), dtype=np.bool_)


class GuidedHunt(StepHunt):
    """One problem's guided search."""

    def __init__(self, search: Guided, subject: Subject) -> None:
        self._search, self._subject = search, subject
        self._candidates = list(subject.candidates)
        self._place = {c: i for i, c in enumerate(self._candidates)}
        self._wanted = min(len(self._candidates), max(search.least, round(search.share * len(self._candidates))))
        self._seeds_wanted = min(search.seeds, -(-self._wanted // 3))
        spread = self._wanted - self._seeds_wanted - search.polish
        self._batch = max(_FEWEST, -(-spread // search.steps))
        self._times: dict[int, float] = {}
        self._failed: list[int] = []
        self._asked: set[int] = set()
        self._ladder = Ladder(search.looks, subject.keep)
        self._exploring = True
        self._near = Neighbourhood(self._candidates, self._place)
        self._outlook: npt.NDArray[np.int64] = np.arange(len(self._candidates))
        """Who is considered, the most promising of the last step first."""
        self._vocabulary = _vocabulary(subject)
        self._view = View(self._vocabulary, subject.spec, subject.device, self._candidates, subject.builds)
        self._sight: Sight
        # By the problem's name, so that a resumed run begins alike.
        self._dice = random.Random(f"{search.seed} {subject.problem.id}")
        super().__init__(self._glances(self._first()))

    # What was heard

    def _heard(self, trials: Sequence[Trial]) -> None:
        self._ladder.take(trials)
        if self._exploring:
            self._times |= {self._place[t.candidate]: t.time_us for t in trials if t.time_us is not None}
            self._failed += [self._place[t.candidate] for t in trials if t.time_us is None]

    def _next(self) -> Sequence[Request]:
        if self._exploring and not self._ended:
            chosen = self._explore()
            if chosen:
                return self._glances(chosen)
        self._exploring = False
        return self._ladder.climb()

    def _glances(self, chosen: Sequence[int]) -> list[Request]:
        self._asked |= set(chosen)
        return [Request(candidate=self._candidates[i], launches=self._ladder.launches, glance=True) for i in chosen]

    # What is asked

    def _first(self) -> list[int]:
        """What must be seen, winners of the nearest problems, and seeds."""
        given = [self._place[c] for c in self._subject.given]
        near = self._subject.lore.near(self._subject.problem, self._subject.spec)
        known = [c for _, tale in near for c in tale.best(1)]
        winners = [self._place[c] for c in dict.fromkeys(known) if c in self._place][: self._search.winners]
        first = list(dict.fromkeys([*given, *winners]))
        if not self._candidates:
            return []
        self._look()
        evidence = self._evidence()
        room = min(self._seeds_wanted, self._wanted - len(first))
        if room <= 0:
            return first
        return first + self._opening(evidence, room, set(first))

    def _opening(self, evidence: Evidence, count: int, taken: set[int]) -> list[int]:
        """Where nothing of this problem is known: by what other problems teach, else seeds."""
        if len(evidence.y) >= self._seeds_wanted:
            return self._promising(evidence, count, taken)
        return self._seeds(count, taken)

    def _seeds(self, count: int, taken: set[int]) -> list[int]:
        """Half the best by the analytic model, each unlike the others; half far from everything chosen."""
        pool = self._modelled(taken)
        features = self._features(pool)
        chosen = _unlike(features, self._sight.estimate[pool], count // 2, _SEEDS_APART)
        sample = self._dice.sample(range(len(pool)), min(len(pool), 256))
        while len(chosen) < min(count, len(pool)) and sample:
            gaps = _squares(features[sample], features[chosen]).min(axis=1) if chosen else np.zeros(len(sample))
            slower = self._sight.estimate[pool][sample] - self._sight.estimate[pool].min()
            best = sample.pop(int(np.argmax(gaps - 0.3 * slower)))
            if best not in chosen:
                chosen.append(best)
        return [int(pool[i]) for i in chosen]

    def _explore(self) -> list[int]:
        """The next step: a batch by the surrogate while the share lasts, its last part for neighbours of the best."""
        left = self._wanted - len(self._asked)
        if left <= 0:
            return []
        self._look()
        evidence = self._evidence()
        if not self._times:  # whatever was tried failed
            return self._opening(evidence, min(self._batch, left), self._asked)
        if left > self._search.polish:
            chosen = self._promising(evidence, min(self._batch, left - self._search.polish), self._asked)
            if chosen:
                return chosen
        best = sorted(self._times, key=lambda i: (self._times[i], i))[:2]
        around = [i for b in best for i in self._near.around(b) if i not in self._asked]
        if not around:
            return self._promising(evidence, min(self._batch, left), self._asked)
        ranked = self._ranked(evidence, np.array(list(dict.fromkeys(around))))
        return [int(i) for i in ranked[: min(left, self._batch)]]

    def _promising(self, evidence: Evidence, count: int, taken: set[int]) -> list[int]:
        pool = self._modelled(taken)
        if not len(pool):
            return []
        order = self._search.order(evidence, self._sight.take(pool), len(self._vocabulary.columns))
        if self._times:
            self._outlook = pool[np.argsort(order, kind="stable")[:_CONSIDERED]]
            pool, order = self._hopeful(pool, order)
        return [int(pool[i]) for i in _unlike(self._features(pool), order, count, _TWINS)]

    def _ranked(self, evidence: Evidence, pool: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        order = self._search.order(evidence, self._sight.take(pool), len(self._vocabulary.columns))
        pool, order = self._hopeful(pool, order)
        return pool[np.argsort(order, kind="stable")]

    def _hopeful(self, pool: npt.NDArray[np.int64], order: Array) -> tuple[npt.NDArray[np.int64], Array]:
        """Without those who cannot be the fastest any more, once as many are known as there are seeds."""
        if len(self._times) < self._search.seeds:
            return pool, order
        kept = ~self._search.hopeless(order, min(self._times.values()))
        return pool[kept], order[kept]

    # What is known

    def _modelled(self, taken: set[int]) -> npt.NDArray[np.int64]:
        return np.array([i for i in self._outlook if i not in taken], dtype=np.int64)

    def _features(self, pool: npt.NDArray[np.int64]) -> Array:
        return self._sight.take(pool).wide(len(self._vocabulary.columns))

    def _look(self) -> None:
        """See the candidates again where more builds became known."""
        self._sight = self._view.look(self._subject.lore.facts)

    def _evidence(self) -> Evidence:
        own = np.array(list(self._times), dtype=np.int64)
        times = np.array(list(self._times.values()), dtype=np.float64)
        failed = self._sight.take(np.array(list(self._failed), dtype=np.int64))
        return gather(self._subject, self._vocabulary, self._sight.take(own), times, failed, self._search.rows)


def _vocabulary(subject: Subject) -> Vocabulary:
    """The columns of this run; kept with what the run knows."""
    return subject.lore.kept("vocabulary", Vocabulary)


def _squares(a: Array, b: Array) -> Array:
    squares: Array = ((a[:, None] - b[None]) ** 2).sum(-1)
    return squares


def _unlike(features: Array, order: Array, count: int, apart: float) -> list[int]:
    """The first `count` by `order`, leaving out who is nearer than `apart` to one chosen, unless too few are left."""
    ranked = [int(i) for i in np.argsort(order, kind="stable")]
    chosen: list[int] = []
    for i in ranked:
        if len(chosen) == count:
            return chosen
        if not chosen or float(((features[chosen] - features[i]) ** 2).sum(1).min()) >= apart**2:
            chosen.append(i)
    left = [i for i in ranked if i not in set(chosen)]
    return chosen + left[: count - len(chosen)]
