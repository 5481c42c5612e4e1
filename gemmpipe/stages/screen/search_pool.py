"""Pools that list a run's problems and search them: the interface, and the pool within the driver.

The driver itself searches on a CPU, where other processes would take cores from the kernels that are timed.
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
    """The inputs that all searches of a run share; can be pickled."""

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
    """Number of finalists."""

    def open(self, problem: Problem, history: History) -> tuple[CandidateList, SearchProblem]:
        """Lists a problem's candidates and adds the problem to the history."""
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
    """A listed problem and its search session."""

    summary: CandidateSummary
    session: SearchSession
    builds: dict[str, tuple[Build, ...]]
    """By candidate id; complete for the candidates that the session has requested."""
    kernel_names: dict[str, str]
    """By candidate id, as complete as `builds`."""


class SearchPool(ABC):
    """Starts search sessions and passes them the results that all may learn from."""

    @abstractmethod
    def submit(self, problems: Sequence[Problem]) -> None:
        """Lists these, in about this order, and starts a session on each as soon as it is listed."""

    @abstractmethod
    def started(self) -> list[SessionStarted]:
        """Returns the sessions started since the last call."""

    @abstractmethod
    def learn(self, trial: Trial) -> None:
        """Takes a result, also one that no session requested: sessions on other problems learn from it."""

    @abstractmethod
    def add_build_facts(self, build: str, facts: BuildFacts) -> None:
        """Takes the result of compiling a build."""

    def receive(self) -> list[str]:
        """Exchanges messages with other processes; returns ids of problems with possible new requests."""
        return []

    def wait_handles(self) -> Sequence[Connection | int]:
        """Connections that become readable when a message arrives."""
        return ()

    def usage(self) -> list[Usage]:
        """Time of other processes, by activity."""
        return []

    def close(self) -> None:
        """Ends other processes."""
        return


class InlineSearchPool(SearchPool):
    """Lists one problem at each call of `started`, in the driver."""

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
