"""A process that lists problems and hunts on them, so that the driver need not: what it is told and what it answers."""

import queue
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gemmpipe.core.data import Build, BuildFacts, Problem, Trial
from gemmpipe.core.events import IDLE, TimeAccount
from gemmpipe.core.signals import exit_with_driver
from gemmpipe.family import GemmSpec
from gemmpipe.search import SearchSession, TrialRequest
from gemmpipe.search.history import History
from gemmpipe.stages.screen.candidates import CandidateList, CandidateSummary
from gemmpipe.stages.screen.search_pool import SearchContext


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Results of one hunt's requests, and how many it need not wait for as the budget is spent (None: it is not)."""

    problem: str
    trials: tuple[Trial, ...] = ()
    dropped: int | None = None


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """What all hunts may learn from, wherever they are."""

    problems: tuple[tuple[Problem, GemmSpec], ...]
    trials: tuple[Trial, ...]
    builds: Mapping[tuple[str, str], tuple[str, ...]]
    """By (problem id, candidate id), what these trials' candidates had compiled."""
    facts: Mapping[str, BuildFacts]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The answer to a quarry and to each Told: what the hunt asks for."""

    problem: str
    summary: CandidateSummary | None
    """With the first answer."""
    requests: tuple[TrialRequest, ...]
    builds: Mapping[str, tuple[str, ...]]
    """By candidate id, of those who are asked for the first time."""
    kernel_names: Mapping[str, str]
    """The same."""
    new_builds: tuple[Build, ...]
    """Builds that this process has not spoken of before."""
    finished: bool
    spent_s: Mapping[str, float]
    """Where this process' time went until now."""


@dataclass(frozen=True, kw_only=True)
class SessionFailed:
    """The hunter is at its end."""

    error: Exception


class _SearchWorker:
    def __init__(self, search_context: SearchContext, history: History, time_account: TimeAccount) -> None:
        self._context, self._history, self._time_account = search_context, history, time_account
        self._sessions: dict[str, tuple[CandidateList, SearchSession]] = {}
        self._sent_builds: set[str] = set()

    def handle(self, message: Problem | Tell | Broadcast) -> Ask | None:
        match message:
            case Broadcast():
                with self._time_account.timed("search"):
                    self._learn(message)
                return None
            case Problem():
                with self._time_account.timed("listing"):
                    listing, search_problem = self._context.open(message, self._history)
                with self._time_account.timed("search"):
                    self._sessions[listing.problem.id] = (listing, self._context.search.start(search_problem))
                return self._reply(listing.problem.id, listing.summary)
            case Tell():
                if message.problem in self._sessions:
                    with self._time_account.timed("search"):
                        self._tell(self._sessions[message.problem][1], message)
                return self._reply(message.problem)

    def _tell(self, session: SearchSession, message: Tell) -> None:
        if message.trials:
            session.tell(message.trials)
        if message.dropped is not None:
            session.end(message.dropped)

    def _learn(self, broadcast: Broadcast) -> None:
        for problem, spec in broadcast.problems:
            self._history.add_problem(problem, spec)
        for (problem_id, candidate), builds in broadcast.builds.items():
            self._history.problems[problem_id].builds.setdefault(candidate, builds)
        self._history.facts.update(broadcast.facts)
        for trial in broadcast.trials:
            self._history.learn(trial)

    def _reply(self, problem: str, outline: CandidateSummary | None = None) -> Ask:
        if problem not in self._sessions:  # it was over when this was told
            return Ask(
                problem=problem,
                summary=None,
                requests=(),
                builds={},
                kernel_names={},
                new_builds=(),
                finished=True,
                spent_s=dict(self._time_account.spent_s),
            )
        listing, session = self._sessions[problem]
        with self._time_account.timed("search"):
            requests = tuple(session.ask())
        needed = {r.candidate.id: listing.builds[r.candidate.id] for r in requests}
        fresh = {b.id: b for builds in needed.values() for b in builds if b.id not in self._sent_builds}
        self._sent_builds |= fresh.keys()
        if session.finished:
            del self._sessions[problem]
        return Ask(
            problem=problem,
            summary=outline,
            requests=requests,
            builds={name: tuple(b.id for b in builds) for name, builds in needed.items()},
            kernel_names={name: listing.kernel_names[name] for name in needed},
            new_builds=tuple(fresh.values()),
            finished=session.finished,
            spent_s=dict(self._time_account.spent_s),
        )


def main(search_context: SearchContext, history: History, begun: float, pipe: Connection) -> None:
    """Serve until told None, or until the driver is gone. `begun` is when the driver asked for this process."""
    exit_with_driver()
    time_account = TimeAccount(spent_s={"start": time.monotonic() - begun})
    inbox: queue.SimpleQueue[Problem | Tell | Broadcast | None] = queue.SimpleQueue()
    # Always listening: two processes that only speak to each other would wait for ever.
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    worker = _SearchWorker(search_context, history, time_account)
    while True:
        with time_account.timed(IDLE):
            message = inbox.get()
        if message is None:
            return
        try:
            answer: Ask | SessionFailed | None = worker.handle(message)
        except Exception as error:  # noqa: BLE001 - told by the driver, which ends with it
            error.add_note(traceback.format_exc())
            answer = SessionFailed(error=error)
        if answer is not None:
            pipe.send(answer)


def _listen(pipe: Connection, inbox: "queue.SimpleQueue[Problem | Tell | Broadcast | None]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
