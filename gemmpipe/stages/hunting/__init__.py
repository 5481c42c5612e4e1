"""The hunts of a run: where problems are listed and searched, in the driver or in processes beside it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gemmpipe.data import Build, BuildFacts, Candidate, Device, Problem, Trial
from gemmpipe.executors import Usage
from gemmpipe.family import Implementation
from gemmpipe.search import Hunt, Search, Subject
from gemmpipe.search.lore import Lore
from gemmpipe.space import Space
from gemmpipe.stages.listing import Listing, Outline, list_by_family_name


@dataclass(frozen=True, kw_only=True)
class Quarry:
    """A problem to hunt on, and what the stage wants of it."""

    problem: Problem
    launches: int
    """The screen timer's `iters`."""
    keep: int
    """How many finalists are wanted."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all hunts of a run have in common; can be pickled."""

    family: str
    implementations: tuple[Implementation, ...]
    device: Device
    space: Space
    search: Search
    incumbents: Mapping[str, tuple[Candidate, ...]]
    """By problem id."""

    def set_out(self, quarry: Quarry, lore: Lore) -> tuple[Listing, Subject]:
        """List a problem, and tell the lore of it."""
        problem = quarry.problem
        incumbents = self.incumbents.get(problem.id, ())
        listing = list_by_family_name(problem, self.family, self.implementations, self.device, self.space, incumbents)
        builds = {c: tuple(b.id for b in needed) for c, needed in listing.builds.items()}
        lore.hear(problem, listing.spec, builds)
        subject = Subject(
            problem=problem,
            spec=listing.spec,
            device=self.device,
            candidates=listing.candidates,
            given=listing.given,
            builds=builds,
            launches=quarry.launches,
            keep=quarry.keep,
            lore=lore,
        )
        return listing, subject


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """A problem that is listed, and its hunt."""

    outline: Outline
    hunt: Hunt
    builds: dict[str, tuple[Build, ...]]
    """By candidate id, of those at least that the hunt has asked for."""
    kernel_names: dict[str, str]
    """The same."""


class Hunts(ABC):
    """Begins hunts and tells them what all may learn from."""

    @abstractmethod
    def begin(self, quarries: Sequence[Quarry]) -> None:
        """List these, in about this order, and begin to search each as soon as it is listed."""

    @abstractmethod
    def begun(self) -> list[Begun]:
        """Those that have begun since the last call."""

    @abstractmethod
    def learn(self, trial: Trial) -> None:
        """A result, whoever asked for it: hunts on other problems learn from it."""

    @abstractmethod
    def know(self, build: str, facts: BuildFacts) -> None:
        """What compiling a build gave."""

    def hear(self) -> list[str]:
        """Exchange news with hunts that live elsewhere; ids of the problems whose hunt may have something to ask."""
        return []

    def ears(self) -> Sequence[Connection | int]:
        """What becomes readable when there is something to hear."""
        return ()

    def usage(self) -> list[Usage]:
        """Where the time of other processes went."""
        return []

    def close(self) -> None:
        """End what lives elsewhere."""
        return
