"""The hunts of a run: where problems are listed and searched, in the driver or in processes beside it.

Hunts in the driver: on a CPU, whose cores belong to what is timed.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gemmpipe.core.data import Build, BuildFacts, Candidate, Device, Problem, Trial
from gemmpipe.executors import Usage
from gemmpipe.family import Implementation
from gemmpipe.family.space import Space
from gemmpipe.search import Search, SearchProblem, SearchSession
from gemmpipe.search.history import History
from gemmpipe.stages.screen.candidates import CandidateList, CandidateSummary, list_by_family_name


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """What all hunts of a run have in common; can be pickled."""

    family: str
    implementations: tuple[Implementation, ...]
    device: Device
    space: Space
    search: Search
    incumbents: Mapping[str, tuple[Candidate, ...]]
    """By problem id."""
    launches: int
    """The screen timer's `iters`."""
    keep: int
    """How many finalists are wanted."""

    def open(self, problem: Problem, history: History) -> tuple[CandidateList, SearchProblem]:
        """List a problem's candidates, and add the problem to the history."""
        incumbents = self.incumbents.get(problem.id, ())
        listing = list_by_family_name(problem, self.family, self.implementations, self.device, self.space, incumbents)
        builds = {c: tuple(b.id for b in needed) for c, needed in listing.builds.items()}
        history.add_problem(problem, listing.spec, builds)
        search_problem = SearchProblem(
            problem=problem,
            spec=listing.spec,
            device=self.device,
            candidates=listing.candidates,
            required=listing.summary.required,
            builds=builds,
            launches=self.launches,
            keep=self.keep,
            history=history,
        )
        return listing, search_problem


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionStarted:
    """A problem that is listed, and its hunt."""

    summary: CandidateSummary
    session: SearchSession
    builds: dict[str, tuple[Build, ...]]
    """By candidate id, of those at least that the hunt has asked for."""
    kernel_names: dict[str, str]
    """The same."""


class SearchPool(ABC):
    """Begins hunts and tells them what all may learn from."""

    @abstractmethod
    def submit(self, problems: Sequence[Problem]) -> None:
        """List these, in about this order, and begin to search each as soon as it is listed."""

    @abstractmethod
    def started(self) -> list[SessionStarted]:
        """Those that have begun since the last call."""

    @abstractmethod
    def learn(self, trial: Trial) -> None:
        """A result, whoever asked for it: hunts on other problems learn from it."""

    @abstractmethod
    def add_build_facts(self, build: str, facts: BuildFacts) -> None:
        """What compiling a build gave."""

    def receive(self) -> list[str]:
        """Exchange news with hunts that live elsewhere; ids of the problems whose hunt may have something to ask."""
        return []

    def wait_handles(self) -> Sequence[Connection | int]:
        """What becomes readable when there is something to hear."""
        return ()

    def usage(self) -> list[Usage]:
        """Where the time of other processes went."""
        return []

    def close(self) -> None:
        """End what lives elsewhere."""
        return


class InlineSearchPool(SearchPool):
    """Lists one problem at each look."""

    def __init__(self, search_context: SearchContext, history: History) -> None:
        self._context, self._history = search_context, history
        self._queue: deque[Problem] = deque()

    def submit(self, problems: Sequence[Problem]) -> None:
        self._queue.extend(problems)

    def started(self) -> list[SessionStarted]:
        if not self._queue:
            return []
        listing, search_problem = self._context.open(self._queue.popleft(), self._history)
        session = self._context.search.start(search_problem)
        return [
            SessionStarted(
                summary=listing.summary, session=session, builds=listing.builds, kernel_names=listing.kernel_names
            )
        ]

    def learn(self, trial: Trial) -> None:
        self._history.learn(trial)

    def add_build_facts(self, build: str, facts: BuildFacts) -> None:
        self._history.facts[build] = facts
