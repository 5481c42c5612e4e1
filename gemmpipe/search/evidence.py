"""What a surrogate learns from: a problem's own results and those of problems near it, as arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemmpipe.family import GemmSpec
from gemmpipe.search import Subject
from gemmpipe.search.features import Array, Sight, View, Vocabulary
from gemmpipe.search.lore import Tale

_MOST_OF_ONE = 48  # rows of one other problem: its fastest, and some of the rest
_FASTEST = 32
_FEWEST = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Results, one a row."""

    x: Array
    """Features, as `Sight.wide`."""
    y: Array
    """log(us)."""
    estimate: Array
    failed: Array
    """Features of this problem's candidates that failed."""
    owner: npt.NDArray[np.int64]
    """Which problem a row belongs to; 0 is the one that is searched."""
    places: Array
    """By owner: log2 of m, n, k and batch."""

    @property
    def far(self) -> Array:
        """By pair of owners: doublings between them."""
        gaps: Array = np.abs(self.places[:, None] - self.places[None]).sum(-1)
        return gaps


def gather(subject: Subject, vocabulary: Vocabulary, own: Sight, times_us: Array, failed: Sight, rows: int) -> Evidence:
    """The evidence on `subject`: its own results, and at most about `rows` of other problems, the nearest first."""
    others: list[tuple[Sight, Array, GemmSpec]] = []
    for _, tale in subject.lore.near(subject.problem, subject.spec):
        if sum(len(times) for _, times, _ in others) >= rows:
            break
        if len(tale.times_us) >= _FEWEST:
            others.append((*_of(tale, subject, vocabulary), tale.spec))
    columns = len(vocabulary.columns)
    sights = [own, *(sight for sight, _, _ in others)]
    times = [times_us, *(each for _, each, _ in others)]
    specs = [subject.spec, *(spec for _, _, spec in others)]
    return Evidence(
        x=np.vstack([sight.wide(columns) for sight in sights]),
        y=np.log(np.concatenate(times)),
        estimate=np.concatenate([sight.estimate for sight in sights]),
        failed=failed.wide(columns),
        owner=np.repeat(np.arange(len(times)), [len(each) for each in times]),
        places=np.log2([[s.m, s.weight_elements / s.k / max(1, s.batch), s.k, max(1, s.batch)] for s in specs]),
    )


def _of(tale: Tale, subject: Subject, vocabulary: Vocabulary) -> tuple[Sight, Array]:
    """What another problem teaches; seen again only when more is known of it."""
    seen: dict[int, tuple[int, tuple[Sight, Array]]] = subject.lore.kept("evidence", dict)
    known = seen.get(id(tale))
    if known is None or known[0] != tale.heard:
        known = seen[id(tale)] = (tale.heard, _seen(tale, subject, vocabulary))
    return known[1]


def _seen(tale: Tale, subject: Subject, vocabulary: Vocabulary) -> tuple[Sight, Array]:
    """The fastest of another problem and some of the others, so that it is known what does not pay."""
    ranked = sorted(tale.times_us, key=lambda c: (tale.times_us[c], c.id))
    if len(ranked) > _MOST_OF_ONE:
        rest = ranked[_FASTEST:]
        ranked = ranked[:_FASTEST] + rest[:: -(-len(rest) // (_MOST_OF_ONE - _FASTEST))]
    facts = subject.lore.facts
    built = {build for c in ranked for build in tale.builds.get(c.id, ())} & facts.keys()
    view = View(vocabulary, tale.spec, subject.device, ranked, tale.builds)
    sight = view.look({build: facts[build] for build in built})
    return sight, np.array([tale.times_us[c] for c in ranked], dtype=np.float64)
