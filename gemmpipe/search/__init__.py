"""The interface of searches: a session chooses which candidates of one problem are timed, with how many launches."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemmpipe.core.data import Candidate, Device, Problem, Trial
from gemmpipe.core.errors import check_at_least
from gemmpipe.core.renamed import accept_old_methods, renamed_members
from gemmpipe.family import GemmSpec
from gemmpipe.search.history import History


@renamed_members(glance="first_rung")
@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """A request of a search to time a candidate with this number of launches."""

    candidate: Candidate
    launches: int
    first_rung: bool = False
    """Skips the screen timer's `warmup`: the first launch is the warm-up."""


@renamed_members(lore="history", given="required")
@dataclass(frozen=True, kw_only=True, eq=False)
class SearchProblem:
    """The input of a search: a problem, its candidates, and the history of other problems."""

    problem: Problem
    spec: GemmSpec
    device: Device
    candidates: Sequence[Candidate]
    required: Sequence[Candidate] = ()
    """Candidates that every search times: library paths and incumbents."""
    builds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Candidate id -> ids of the builds that it needs."""
    launches: int
    """The screen timer's `iters`."""
    keep: int
    """Number of finalists."""
    history: History


class SearchSession(ABC):
    """A search on one problem. Results may come in any order; `ask` may return nothing while results are missing."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, {"over": "finished"})

    @abstractmethod
    def ask(self) -> Sequence[TrialRequest]:
        """Returns new requests, each once."""

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None:
        """Takes the results of requests, failures included."""

    @abstractmethod
    def end(self, dropped: int) -> None:
        """Ends the search when the budget is spent: `dropped` requests get no result, no new candidate is requested."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True if no request follows and every request has its result."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search algorithm with its options, as configured."""

    budget_s: float | None
    """Seconds of screening per run; candidates not reached by then are left for the next run."""
    budget_trials: int | None
    """Candidates per problem that may be timed in a run; recorded times do not count."""
    journals: tuple[str, ...]
    """Folders of earlier runs to learn from."""

    def __post_init__(self) -> None:
        if self.budget_s is not None and self.budget_s <= 0:
            raise ValueError(f"budget_s={self.budget_s:g}, expected more than 0 seconds, or null")
        check_at_least(1, budget_trials=self.budget_trials)

    @abstractmethod
    def start(self, search_problem: SearchProblem) -> SearchSession:
        """Starts a session on one problem."""

    def expected_trials(self, candidates: int, keep: int) -> int:
        """The trials of a problem with this many candidates and `keep` finalists, for the estimate of a run's end."""
        return candidates
