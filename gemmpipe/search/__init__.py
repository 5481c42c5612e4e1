"""The search interface: which candidates of a problem are timed, and with how many launches (ask and tell)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemmpipe.core.data import Candidate, Device, Problem, Trial
from gemmpipe.core.errors import check_at_least
from gemmpipe.family import GemmSpec
from gemmpipe.search.history import History


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """A request of a search to time a candidate with a number of launches."""

    candidate: Candidate
    launches: int
    first_rung: bool = False
    """True: without the screen timer's `warmup`; the first launch is the only warm-up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchProblem:
    """The input of a search: a problem, its candidates, and what is known already."""

    problem: Problem
    spec: GemmSpec
    device: Device
    candidates: Sequence[Candidate]
    required: Sequence[Candidate] = ()
    """Candidates that are always timed: library paths and incumbents."""
    builds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Candidate id -> ids of the builds that it needs."""
    launches: int
    """The screen timer's `iters`."""
    keep: int
    """Number of finalists."""
    history: History


class SearchSession(ABC):
    """A search on one problem. Results may come in any order; `ask` may return nothing while results are pending."""

    @abstractmethod
    def ask(self) -> Sequence[TrialRequest]:
        """New requests; each is returned once."""

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None:
        """Results of requests, failures included."""

    @abstractmethod
    def end(self, dropped: int) -> None:
        """The budget is spent, and `dropped` requests get no result; later requests are for timed candidates only."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True if all requests have results and no more will follow."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search algorithm with its settings; the base class of the options of `search`."""

    budget_s: float | None
    """Seconds of screening per run; remaining candidates are left for the next run."""
    budget_trials: int | None
    """Candidates of a problem that may be timed per run; known results do not count."""
    journals: tuple[str, ...]
    """Folders of earlier runs to learn from."""

    def __post_init__(self) -> None:
        if self.budget_s is not None and self.budget_s <= 0:
            raise ValueError(f"budget_s={self.budget_s:g}, expected more than 0 seconds, or null")
        check_at_least(1, budget_trials=self.budget_trials)

    @abstractmethod
    def start(self, search_problem: SearchProblem) -> SearchSession:
        """Start a search on one problem."""
