"""A process that lists problems and hunts on them, so that the driver need not: what it is told and what it answers."""

import queue
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gemmpipe.data import Build, BuildFacts, Problem, Trial
from gemmpipe.family import GemmSpec
from gemmpipe.interrupt import end_with_the_driver
from gemmpipe.search import Hunt, Request
from gemmpipe.search.lore import Lore
from gemmpipe.stages.hunting import Ground, Quarry
from gemmpipe.stages.listing import Listing, Outline
from gemmpipe.stopwatch import IDLE, Stopwatch


@dataclass(frozen=True, kw_only=True)
class Told:
    """Results of one hunt's requests, and how many it need not wait for as the budget is spent (None: it is not)."""

    problem: str
    trials: tuple[Trial, ...] = ()
    dropped: int | None = None


@dataclass(frozen=True, kw_only=True)
class News:
    """What all hunts may learn from, wherever they are."""

    begun: tuple[tuple[Problem, GemmSpec], ...]
    trials: tuple[Trial, ...]
    builds: Mapping[tuple[str, str], tuple[str, ...]]
    """By (problem id, candidate id), what these trials' candidates had compiled."""
    facts: Mapping[str, BuildFacts]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The answer to a quarry and to each Told: what the hunt asks for."""

    problem: str
    outline: Outline | None
    """With the first answer."""
    requests: tuple[Request, ...]
    builds: Mapping[str, tuple[str, ...]]
    """By candidate id, of those who are asked for the first time."""
    kernel_names: Mapping[str, str]
    """The same."""
    new_builds: tuple[Build, ...]
    """Builds that this process has not spoken of before."""
    over: bool
    spent_s: Mapping[str, float]
    """Where this process' time went until now."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The hunter is at its end."""

    error: Exception


class _Hunter:
    def __init__(self, ground: Ground, lore: Lore, watch: Stopwatch) -> None:
        self._ground, self._lore, self._watch = ground, lore, watch
        self._hunts: dict[str, tuple[Listing, Hunt]] = {}
        self._spoken_of: set[str] = set()

    def take(self, message: Quarry | Told | News) -> Asked | None:
        match message:
            case News():
                with self._watch.spending("search"):
                    self._learn(message)
                return None
            case Quarry():
                with self._watch.spending("listing"):
                    listing, subject = self._ground.set_out(message, self._lore)
                with self._watch.spending("search"):
                    self._hunts[listing.problem.id] = (listing, self._ground.search.start(subject))
                return self._asked(listing.problem.id, listing.outline())
            case Told():
                if message.problem in self._hunts:
                    with self._watch.spending("search"):
                        self._tell(self._hunts[message.problem][1], message)
                return self._asked(message.problem)

    def _tell(self, hunt: Hunt, message: Told) -> None:
        if message.trials:
            hunt.tell(message.trials)
        if message.dropped is not None:
            hunt.end(message.dropped)

    def _learn(self, news: News) -> None:
        for problem, spec in news.begun:
            self._lore.hear(problem, spec)
        for (problem_id, candidate), builds in news.builds.items():
            self._lore.tales[problem_id].builds.setdefault(candidate, builds)
        self._lore.facts.update(news.facts)
        for trial in news.trials:
            self._lore.learn(trial)

    def _asked(self, problem: str, outline: Outline | None = None) -> Asked:
        if problem not in self._hunts:  # it was over when this was told
            return Asked(
                problem=problem,
                outline=None,
                requests=(),
                builds={},
                kernel_names={},
                new_builds=(),
                over=True,
                spent_s=dict(self._watch.spent_s),
            )
        listing, hunt = self._hunts[problem]
        with self._watch.spending("search"):
            requests = tuple(hunt.ask())
        needed = {r.candidate.id: listing.builds[r.candidate.id] for r in requests}
        fresh = {b.id: b for builds in needed.values() for b in builds if b.id not in self._spoken_of}
        self._spoken_of |= fresh.keys()
        if hunt.over:
            del self._hunts[problem]
        return Asked(
            problem=problem,
            outline=outline,
            requests=requests,
            builds={name: tuple(b.id for b in builds) for name, builds in needed.items()},
            kernel_names={name: listing.kernel_names[name] for name in needed},
            new_builds=tuple(fresh.values()),
            over=hunt.over,
            spent_s=dict(self._watch.spent_s),
        )


def main(ground: Ground, lore: Lore, begun: float, pipe: Connection) -> None:
    """Serve until told None, or until the driver is gone. `begun` is when the driver asked for this process."""
    end_with_the_driver()
    watch = Stopwatch(spent_s={"start": time.monotonic() - begun})
    inbox: queue.SimpleQueue[Quarry | Told | News | None] = queue.SimpleQueue()
    # Always listening: two processes that only speak to each other would wait for ever.
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    hunter = _Hunter(ground, lore, watch)
    while True:
        with watch.spending(IDLE):
            message = inbox.get()
        if message is None:
            return
        try:
            answer: Asked | Failed | None = hunter.take(message)
        except Exception as error:  # noqa: BLE001 - told by the driver, which ends with it
            error.add_note(traceback.format_exc())
            answer = Failed(error=error)
        if answer is not None:
            pipe.send(answer)


def _listen(pipe: Connection, inbox: "queue.SimpleQueue[Quarry | Told | News | None]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
