"""The process that lists problems and runs search sessions for the driver, and the messages between the two."""

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
    """Results for one session, and the number of requests dropped with the budget spent (None: it is not)."""

    problem: str
    trials: tuple[Trial, ...] = ()
    dropped: int | None = None


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """Results that all sessions learn from, sent to every process."""

    problems: tuple[tuple[Problem, GemmSpec], ...]
    trials: tuple[Trial, ...]
    builds: Mapping[tuple[str, str], tuple[str, ...]]
    """By (problem id, candidate id), the build ids of these trials' candidates."""
    facts: Mapping[str, BuildFacts]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The reply to a problem and to each `Tell`: the session's new requests."""

    problem: str
    summary: CandidateSummary | None
    """With the first reply."""
    requests: tuple[TrialRequest, ...]
    builds: Mapping[str, tuple[str, ...]]
    """By id of the requested candidates, the build ids."""
    kernel_names: Mapping[str, str]
    """By id of the requested candidates."""
    new_builds: tuple[Build, ...]
    """Builds that this process has not sent before."""
    finished: bool
    spent_s: Mapping[str, float]
    """Time of this process until now, by activity."""


@dataclass(frozen=True, kw_only=True)
class SessionFailed:
    """An exception in the worker, to be raised in the driver."""

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

    def _reply(self, problem: str, summary: CandidateSummary | None = None) -> Ask:
        if problem not in self._sessions:  # the session had finished when this was sent
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
            summary=summary,
            requests=requests,
            builds={name: tuple(b.id for b in builds) for name, builds in needed.items()},
            kernel_names={name: listing.kernel_names[name] for name in needed},
            new_builds=tuple(fresh.values()),
            finished=session.finished,
            spent_s=dict(self._time_account.spent_s),
        )


def main(search_context: SearchContext, history: History, started_at: float, pipe: Connection) -> None:
    """Serves until the driver closes the pipe. `started_at`: when the driver started this process, monotonic clock."""
    exit_with_driver()
    time_account = TimeAccount(spent_s={"start": time.monotonic() - started_at})
    inbox: queue.SimpleQueue[Problem | Tell | Broadcast | None] = queue.SimpleQueue()
    # A thread always receives: two processes that both block in a send would wait forever.
    threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
    worker = _SearchWorker(search_context, history, time_account)
    while True:
        with time_account.timed(IDLE):
            message = inbox.get()
        if message is None:
            return
        try:
            reply: Ask | SessionFailed | None = worker.handle(message)
        except Exception as error:  # noqa: BLE001 - raised in the driver, which ends with it
            error.add_note(traceback.format_exc())
            reply = SessionFailed(error=error)
        if reply is not None:
            try:
                pipe.send(reply)
            except BrokenPipeError:  # the driver was killed
                return


def _receive(pipe: Connection, inbox: "queue.SimpleQueue[Problem | Tell | Broadcast | None]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
