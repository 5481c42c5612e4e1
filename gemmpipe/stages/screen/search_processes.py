"""Searches in processes apart from the driver: the pool of processes and the driver's side of each.

The pool assigns problems to processes, broadcasts results to all of them, and replaces one that dies: its searches
restart in a new process and get the known results again, so that nothing is timed twice.
"""

import contextlib
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait

from gemmpipe.bench.forkserver import RETRY_PAUSES_S, ForkedProcess, forkserver
from gemmpipe.core.data import Build, BuildFacts, Problem, Trial
from gemmpipe.core.device import usable_cores
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import IDLE, Events, counted
from gemmpipe.executors import Usage
from gemmpipe.family import GemmSpec
from gemmpipe.search import SearchSession, TrialRequest
from gemmpipe.search.history import History
from gemmpipe.stages import Context
from gemmpipe.stages.screen.search_pool import InlineSearchPool, SearchContext, SearchPool, SessionStarted
from gemmpipe.stages.screen.search_worker import Ask, Broadcast, SessionFailed, Tell, main


class SearchWorkerProcess:
    """The driver's side of a search process; after `end`, `start` begins a new one."""

    def __init__(self, search_context: SearchContext, history: History) -> None:
        self._context, self._history = search_context, history
        self.assigned: dict[str, Problem] = {}
        """By problem id, the problems it has and has not finished."""
        self.unlisted = 0
        """How many of these it has not listed yet."""
        self.losses = 0
        """Deaths since it last finished a search."""
        self._builds: dict[str, Build] = {}
        self._past: list[Usage] = []
        self.start()

    def start(self) -> None:
        """Starts a process with the driver's history. Raises EnvironmentProblem where none can be started."""
        self.pipe: Connection
        pipe, theirs = forkserver().Pipe()
        self._started_at = time.monotonic()
        self._spent_s: dict[str, float] = {}
        self._builds = {}
        arguments = (self._context, self._history, self._started_at, theirs)
        with theirs:
            self._process = ForkedProcess(main, arguments)
        self.pipe = pipe

    def send(self, message: Problem | Tell) -> None:
        """Sends a message; a dead process is noticed in `replies`."""
        self.send_pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_pickled(self, message: bytes) -> None:
        """Sends a message that is pickled once for all processes."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def replies(self) -> Iterator[Ask | SessionFailed | None]:
        """Its replies since the last call; None at the end when the process is dead."""
        try:
            while self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            yield None

    def builds_of(self, ask: Ask) -> dict[str, tuple[Build, ...]]:
        """The builds of the candidates it requests."""
        self._builds |= {build.id: build for build in ask.new_builds}
        self._spent_s = dict(ask.spent_s)
        return {name: tuple(self._builds[b] for b in builds) for name, builds in ask.builds.items()}

    def end(self) -> str:
        """Ends the process; returns how it ended."""
        now = time.monotonic()
        self._past.append(self._usage(now))
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()
        return f"exit code {self._process.exitcode}"

    def usage(self) -> Usage:
        """Time of this process and of those before it, by activity."""
        whole = Usage(name="")
        for part in [*self._past, self._usage(time.monotonic())]:
            whole.merge(part)
        return whole

    def _usage(self, now: float) -> Usage:
        busy = dict(self._spent_s)
        idle_s = busy.pop(IDLE, 0.0)
        idle_s += max(0.0, now - self._started_at - idle_s - sum(busy.values()))
        return Usage(name="", wall_s=now - self._started_at, busy_s=busy, idle=[(0.0, idle_s)])


class RemoteSession(SearchSession):
    """A session in another process: forwards results and returns its requests; has none while a reply is open."""

    def __init__(self, problem: str, send: Callable[[Tell], None]) -> None:
        self._problem, self._send_to_worker = problem, send
        self._results: dict[tuple[str, int], Trial] = {}
        """By (candidate id, requested launches): not timed again for a new process."""
        self._outstanding: dict[str, TrialRequest] = {}
        """By candidate id: requests returned by `ask` that have no result yet."""
        self.restart()

    def restart(self) -> None:
        """Resets the state of the process: a new one gets the problem."""
        self._requests: list[TrialRequest] = []
        self._awaited: set[str] = set()
        """Ids of candidates that this process waits for."""
        self._open_replies = 1
        self._finished = False

    def ask(self) -> Sequence[TrialRequest]:
        requests, self._requests = self._requests, []
        self._outstanding |= {request.candidate.id: request for request in requests}
        return requests

    def tell(self, trials: Sequence[Trial]) -> None:
        wanted = []
        for trial in trials:
            name = trial.candidate.id
            self._results[name, self._outstanding.pop(name).launches] = trial
            if name in self._awaited:
                self._awaited.remove(name)
                wanted.append(trial)
        if wanted:
            self._send(Tell(problem=self._problem, trials=tuple(wanted)))

    def end(self, dropped: int) -> None:
        self._send(Tell(problem=self._problem, dropped=dropped))

    def _send(self, message: Tell) -> None:
        self._open_replies += 1
        self._send_to_worker(message)

    def take_reply(self, requests: Sequence[TrialRequest], finished: bool) -> None:
        """Takes a reply and its requests; results that an earlier process received are sent at once."""
        self._open_replies -= 1
        self._finished = finished
        known = [r for r in requests if (r.candidate.id, r.launches) in self._results]
        if known:
            trials = tuple(self._results[r.candidate.id, r.launches] for r in known)
            self._send(Tell(problem=self._problem, trials=trials))
        new = [r for r in requests if r not in known]
        self._awaited |= {r.candidate.id for r in new}
        self._requests += new

    @property
    def finished(self) -> bool:
        return self._finished and not self._open_replies and not self._requests


# A single process needs as long to list and search as an H200 to screen (aiter's space of 1,944 points, 2026-11-21).
_PROCESSES_PER_DEVICE = 2
_QUEUE_DEPTH = 2  # problems that a process has to list: more would delay its replies to results


def search_pool_for(context: Context, *, launches: int, keep: int) -> SearchPool:
    """The run's pool for searches with these launches and finalists; opened by the first batch, closed with the run.

    On a CPU the driver searches; else two processes per device do, on at most half of the cores.
    """
    opened = context.search_pools
    if (launches, keep) not in opened:
        search_context = context.search_context(launches=launches, keep=keep)
        if context.device.kind == "cpu":
            opened[launches, keep] = InlineSearchPool(search_context, context.history)
        else:
            count = max(1, min(_PROCESSES_PER_DEVICE * len(context.pool.devices), usable_cores() // 2))
            opened[launches, keep] = ProcessSearchPool(search_context, context.history, count, context.events)
    return opened[launches, keep]


class ProcessSearchPool(SearchPool):
    """Searches in `count` processes, which start with the first problem."""

    def __init__(self, search_context: SearchContext, history: History, count: int, events: Events) -> None:
        self._context, self._history, self._count, self._events = search_context, history, count, events
        self._workers: list[SearchWorkerProcess] = []
        self._queue: deque[Problem] = deque()
        self._sessions: dict[str, RemoteSession] = {}
        self._started: dict[str, SessionStarted] = {}
        """By problem id."""
        self._new: list[SessionStarted] = []
        self._new_problems: list[tuple[Problem, GemmSpec]] = []
        self._new_trials: list[Trial] = []
        self._facts: dict[str, BuildFacts] = {}

    def submit(self, problems: Sequence[Problem]) -> None:
        if not self._workers:
            self._workers = [SearchWorkerProcess(self._context, self._history) for _ in range(self._count)]
        self._queue.extend(problems)
        self._assign_problems()

    def started(self) -> list[SessionStarted]:
        new, self._new = self._new, []
        return new

    def learn(self, trial: Trial) -> None:
        self._history.learn(trial)
        self._new_trials.append(trial)

    def add_build_facts(self, build: str, facts: BuildFacts) -> None:
        self._history.facts[build] = self._facts[build] = facts

    def wait_handles(self) -> Sequence[Connection | int]:
        return [each.pipe for each in self._workers]

    def receive(self) -> list[str]:
        self._broadcast()
        changed = []
        readable = wait(self.wait_handles(), timeout=0)
        for each in [each for each in self._workers if each.pipe in readable]:
            for reply in each.replies():
                if isinstance(reply, SessionFailed):
                    raise reply.error
                if reply is None:
                    self._replace(each)
                    break
                self._take(each, reply)
                changed.append(reply.problem)
        self._assign_problems()
        return changed

    def _take(self, each: SearchWorkerProcess, ask: Ask) -> None:
        session, builds = self._sessions[ask.problem], each.builds_of(ask)
        started = self._started.get(ask.problem)
        if ask.summary is not None:
            each.unlisted -= 1
        if started is None and ask.summary is not None:
            started = SessionStarted(summary=ask.summary, session=session, builds={}, kernel_names={})
            self._started[ask.problem] = started
            self._new.append(started)
            self._history.add_problem(ask.summary.problem, ask.summary.spec)
            self._new_problems.append((ask.summary.problem, ask.summary.spec))
        if started is not None:
            started.builds.update(builds)
            started.kernel_names.update(ask.kernel_names)
            self._history.problems[ask.problem].builds.update(ask.builds)
        session.take_reply(ask.requests, ask.finished)
        if session.finished:
            each.losses = 0
            del each.assigned[ask.problem], self._sessions[ask.problem], self._started[ask.problem]

    def _assign_problems(self) -> None:
        """Gives each problem to the process with the fewest."""
        while self._queue and (free := [w for w in self._workers if w.unlisted < _QUEUE_DEPTH]):
            each, problem = min(free, key=lambda w: len(w.assigned)), self._queue.popleft()
            self._sessions[problem.id] = RemoteSession(problem.id, partial(self._send, each))
            self._send_problem(each, problem)

    def _send(self, each: SearchWorkerProcess, message: Tell) -> None:
        """Sends after the broadcast, in the order in which the driver learnt, so that all pools decide alike."""
        self._broadcast()
        each.send(message)

    def _send_problem(self, each: SearchWorkerProcess, problem: Problem) -> None:
        each.assigned[problem.id] = problem
        each.unlisted += 1
        each.send(problem)

    def _broadcast(self) -> None:
        """Sends new results to all processes, also to the one that requested them, for its other sessions."""
        if not (self._new_problems or self._new_trials or self._facts):
            return
        builds = {
            (t.problem, t.candidate.id): self._history.problems[t.problem].builds.get(t.candidate.id, ())
            for t in self._new_trials
        }
        broadcast = Broadcast(
            problems=tuple(self._new_problems), trials=tuple(self._new_trials), builds=builds, facts=dict(self._facts)
        )
        pickled = pickle.dumps(broadcast, pickle.HIGHEST_PROTOCOL)
        for each in self._workers:
            each.send_pickled(pickled)
        self._new_problems, self._new_trials, self._facts = [], [], {}

    def _replace(self, each: SearchWorkerProcess) -> None:
        """Restarts the searches of a dead process in a new one, which gets known results again as it requests them."""
        how = each.end()
        each.losses += 1
        if each.losses > len(RETRY_PAUSES_S):  # with no search finished in between: retries do not help
            raise EnvironmentProblem(f"search worker died {each.losses} times in a row: {how}")
        self._events.emit(
            "warning", f"search worker died ({how}); restarting its {counted(len(each.assigned), 'search', 'searches')}"
        )
        time.sleep(RETRY_PAUSES_S[each.losses - 1] if each.losses > 1 else 0)
        each.start()
        each.unlisted = 0
        for problem in each.assigned.values():
            self._sessions[problem.id].restart()
            self._send_problem(each, problem)

    def usage(self) -> list[Usage]:
        if not self._workers:
            return []
        whole = Usage(name=f"search processes ({len(self._workers)})")
        for each in self._workers:
            whole.merge(each.usage())
        return [whole]

    def close(self) -> None:
        for each in self._workers:
            each.end()
        self._workers = []
