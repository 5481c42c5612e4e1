"""Searches: which candidates of one problem are timed, and how often."""

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
    """A wish of the search: time this candidate with so many launches."""

    candidate: Candidate
    launches: int
    first_rung: bool = False
    """Without the screen timer's `warmup`: the first launch has to do."""


@renamed_members(lore="history", given="required")
@dataclass(frozen=True, kw_only=True, eq=False)
class SearchProblem:
    """What a search is told: the problem, what can be tried on it, and what is known already."""

    problem: Problem
    spec: GemmSpec
    device: Device
    candidates: Sequence[Candidate]
    required: Sequence[Candidate] = ()
    """Those of `candidates` that are looked at in any case: library paths and incumbents."""
    builds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By candidate id, the ids of the builds that it needs."""
    launches: int
    """The screen timer's `iters`."""
    keep: int
    """How many finalists are wanted."""
    history: History


class SearchSession(ABC):
    """One search on one problem. Results may come in any order; `ask` may return nothing while it waits."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, {"over": "finished"})

    @abstractmethod
    def ask(self) -> Sequence[TrialRequest]:
        """New requests, each given out once."""

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None:
        """Results of requests, failures included."""

    @abstractmethod
    def end(self, dropped: int) -> None:
        """The budget is spent and so many requests are dropped: from here on only looks at what was timed."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether nothing more will be asked for and everything asked for was told."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A way to search, as the configuration names it."""

    budget_s: float | None
    """Seconds that screening may take in a run; what is not reached then is left for the next run."""
    budget_trials: int | None
    """Candidates of a problem that may be timed anew in a run."""
    journals: tuple[str, ...]
    """Folders of earlier runs to learn from."""

    def __post_init__(self) -> None:
        if self.budget_s is not None and self.budget_s <= 0:
            raise ValueError(f"budget_s={self.budget_s:g}, expected more than 0 seconds, or null")
        check_at_least(1, budget_trials=self.budget_trials)

    @abstractmethod
    def start(self, search_problem: SearchProblem) -> SearchSession:
        """Begin on one problem."""
