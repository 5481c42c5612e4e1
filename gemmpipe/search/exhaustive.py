"""Every candidate, timed alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.data import Candidate, Trial
from gemmpipe.search import Hunt, Request, Search


class _ExhaustiveHunt(Hunt):
    def __init__(self, candidates: Sequence[Candidate], launches: int) -> None:
        self._requests = [Request(candidate=c, launches=launches) for c in candidates]
        self._open = len(self._requests)

    def ask(self) -> Sequence[Request]:
        requests, self._requests = self._requests, []
        return requests

    def tell(self, trials: Sequence[Trial]) -> None:
        self._open -= len(trials)

    @property
    def over(self) -> bool:
        return self._open == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Exhaustive(Search):
    """Times every candidate with the same number of launches."""

    def start(self, candidates: Sequence[Candidate], launches: int, keep: int) -> Hunt:
        return _ExhaustiveHunt(candidates, launches)
