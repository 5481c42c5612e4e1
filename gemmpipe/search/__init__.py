"""Searches: which candidates of one problem are timed, and how often."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.data import Candidate, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A wish of the search: time this candidate with so many launches."""

    candidate: Candidate
    launches: int


class Hunt(ABC):
    """One search on one problem. Results may come in any order; `ask` may return nothing while it waits."""

    @abstractmethod
    def ask(self) -> Sequence[Request]:
        """New requests, each given out once."""

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None:
        """Results of requests, failures included."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing more will be asked for and everything asked for was told."""


class Search(ABC):
    """A way to search, as the configuration names it."""

    @abstractmethod
    def start(self, candidates: Sequence[Candidate], launches: int, keep: int) -> Hunt:
        """Begin on one problem: `launches` is the screen timer's `iters`, `keep` how many finalists are wanted."""
