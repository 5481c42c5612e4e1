"""Closer looks: who did well at a glance is timed longer, until few are left and their order can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.data import Candidate, Trial
from gemmpipe.errors import at_least
from gemmpipe.search import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """Rungs of launches: a share of each goes on to the next, never fewer than the finalists wanted."""

    keep_ratio: float
    first_launches: int
    most_launches: int
    cutoff: float
    """Slower than this many times the fastest: out."""

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio < 1:
            raise ValueError(f"keep_ratio={self.keep_ratio:g}, expected between 0 and 1")
        at_least(1, first_launches=self.first_launches, most_launches=self.most_launches, cutoff=self.cutoff)


class Ladder:
    """The rungs of one problem: give it results, it says who is looked at next and how long."""

    def __init__(self, looks: Looks, keep: int) -> None:
        self._looks = looks
        self._keep = keep
        self.launches = looks.first_launches
        self._timed: list[tuple[float, Candidate]] = []

    def take(self, trials: Sequence[Trial]) -> None:
        """Results of the current rung; failures are out."""
        self._timed += [(t.time_us, t.candidate) for t in trials if t.time_us is not None]

    def climb(self) -> list[Request]:
        """The requests of the next rung; nothing when the order is good enough."""
        entered = len(self._timed)
        survivors = max(self._keep, int(entered * self._looks.keep_ratio))
        self.launches = round(self.launches / self._looks.keep_ratio)
        if entered <= self._keep or self.launches > self._looks.most_launches:
            return []
        ranked = sorted(self._timed, key=lambda pair: (pair[0], pair[1].id))[:survivors]
        limit = ranked[0][0] * self._looks.cutoff
        self._timed = []
        return [Request(candidate=c, launches=self.launches) for time_us, c in ranked if time_us <= limit]
