"""Every candidate, timed alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.data import Trial
from gemmpipe.search import Hunt, Request, Search, Subject
from gemmpipe.search.steps import StepHunt


class _ExhaustiveHunt(StepHunt):
    def _heard(self, trials: Sequence[Trial]) -> None:
        """Nothing depends on results."""

    def _next(self) -> Sequence[Request]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Exhaustive(Search):
    """Times every candidate with the same number of launches."""

    def start(self, subject: Subject) -> Hunt:
        return _ExhaustiveHunt([Request(candidate=c, launches=subject.launches) for c in subject.candidates])
