"""Successive halving (Jamieson and Talwalkar, 2016): a glance at everything, longer looks at what is left."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.data import Candidate, Trial
from gemmpipe.errors import at_least
from gemmpipe.search import Hunt, Request, Search


class _HalvingHunt(Hunt):
    def __init__(self, candidates: Sequence[Candidate], search: "Halving", keep: int) -> None:
        self._search = search
        self._keep = keep
        self._launches = search.first_launches
        self._requests = [Request(candidate=c, launches=self._launches) for c in candidates]
        self._open = len(self._requests)
        self._timed: list[tuple[float, Candidate]] = []

    def ask(self) -> Sequence[Request]:
        requests, self._requests = self._requests, []
        return requests

    def tell(self, trials: Sequence[Trial]) -> None:
        self._open -= len(trials)
        self._timed += [(t.time_us, t.candidate) for t in trials if t.time_us is not None]
        if self._open == 0:
            self._next_rung()

    def _next_rung(self) -> None:
        """Keep the fastest share, never fewer than the finalists wanted, and look `1 / keep_ratio` times longer."""
        entered = len(self._timed)
        survivors = max(self._keep, int(entered * self._search.keep_ratio))
        self._launches = round(self._launches / self._search.keep_ratio)
        if entered <= self._keep or self._launches > self._search.most_launches:
            return
        ranked = sorted(self._timed, key=lambda pair: (pair[0], pair[1].id))[:survivors]
        limit = ranked[0][0] * self._search.cutoff
        chosen = [c for time_us, c in ranked if time_us <= limit]
        self._timed = []
        self._requests = [Request(candidate=c, launches=self._launches) for c in chosen]
        self._open = len(chosen)

    @property
    def over(self) -> bool:
        return self._open == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Halving(Search):
    """Times all candidates with `first_launches`, then the fastest `keep_ratio` of them longer, and so on.

    `most_launches` ends it; a candidate slower than `cutoff` times the fastest never enters the next rung.
    """

    keep_ratio: float
    first_launches: int
    most_launches: int
    cutoff: float

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio < 1:
            raise ValueError(f"keep_ratio={self.keep_ratio:g}, expected between 0 and 1")
        at_least(1, first_launches=self.first_launches, most_launches=self.most_launches, cutoff=self.cutoff)

    def start(self, candidates: Sequence[Candidate], launches: int, keep: int) -> Hunt:
        return _HalvingHunt(candidates, self, keep)
