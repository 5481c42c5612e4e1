"""The scheduler of screen: keeps the compile processes and all devices busy with the candidates of several problems."""

import time
from collections.abc import Callable, Iterable, Sequence

from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import SCREENING, Candidate, Trial
from gemmpipe.executors import BuildResult, JobResult
from gemmpipe.search import TrialRequest
from gemmpipe.stages import Context
from gemmpipe.stages.cpu_budget import trials_at_once
from gemmpipe.stages.needed_builds import SHARE_WHILE_SCREENING
from gemmpipe.stages.screen.search_pool import SearchPool
from gemmpipe.stages.screen.state import Bounds, ProblemState
from gemmpipe.stages.screen.work import ScreenWork, WorkEstimate, relative_work

_BATCH = 64  # requests per job: long enough to hide the exchange with the worker, short enough to lose little
_MAX_PROBLEMS = 4  # problems per worker
_QUEUE_DEPTH = 3  # jobs per worker, running and next, so that it never waits for the driver


class Scheduler:
    """Runs the problems' searches to their end on a pool."""

    def __init__(
        self,
        context: Context,
        search_pool: SearchPool,
        timer: Timer,
        bounds: Bounds,
        work: WorkEstimate,
        deadline: float | None = None,
        when_finished: Callable[[ProblemState], object] = lambda state: None,
    ) -> None:
        """`deadline`: when searches end with the results they have, on the monotonic clock.

        `when_finished` is called when the search of a problem has ended, and again after each addition to it.
        """
        self._context = context
        self._search_pool = search_pool
        self._pool = context.pool
        self._time_account = context.time_account
        self._journal = context.journal
        self._timer = timer
        self._bounds = bounds
        self._states: dict[str, ProblemState] = {}
        """By problem id."""
        self._running: dict[str, ProblemState] = {}
        """By problem id, those not finished."""
        self._to_advance: dict[str, ProblemState] = {}
        """By problem id, those with possible new requests."""
        self._built: dict[str, str] = {}
        self._waiting: dict[str, dict[str, ProblemState]] = {}
        """By build id, then problem id: the problems that wait for it."""
        self._deadline = deadline
        self._when_finished = when_finished
        self._work = work
        self.running_now: ProblemState | None = None
        """The problem that a device is timing: of the last job that began at once, or else of the last result."""

    def add(self, state: ProblemState) -> None:
        """Takes a problem and queues its builds: they compile while the next problem is listed."""
        self._states[state.problem.id] = state
        state.worker = self._context.worker_of(state.problem.id)
        if state.worker is None and len(self._pool.devices) == 1:
            state.worker = 0
            self._context.assign(state.problem.id, 0)
        for trial in self._context.record.of(SCREENING, state.problem.id):
            self._bounds.learn(state.problem, trial)
        self._advance(state)

    def add_requests(self, state: ProblemState, requests: Sequence[TrialRequest]) -> None:
        """Times these candidates of a problem in addition to the requests of its search."""
        failures = state.add_requests(requests, self._built)
        self._queue_work(state, failures)

    def _advance(self, state: ProblemState) -> None:
        with self._time_account.timed("search"):
            failures = state.take_requests(self._built)
        self._queue_work(state, failures)

    def _queue_work(self, state: ProblemState, failures: Sequence[Trial]) -> None:
        """Registers its new candidates in the journal, compiles its builds, and notes whether it is finished."""
        for candidate in state.requested:
            self._journal.kernel_names[candidate.id] = state.kernel_names[candidate.id]
            builds = tuple(build.id for build in state.builds[candidate.id])
            self._journal.builds[state.problem.id, candidate.id] = builds
        state.requested.clear()
        self._record_trials(state, failures)
        for build in state.wanted_builds:
            waiting = self._waiting.get(build.id)
            if waiting is None:
                waiting = self._waiting[build.id] = {}
                self._pool.compile(build)
            waiting[state.problem.id] = state
        state.wanted_builds.clear()
        if state.finished:
            self._running.pop(state.problem.id, None)
            self._when_finished(state)
        else:
            self._running[state.problem.id] = state

    @property
    def finished_count(self) -> int:
        """Number of finished problems."""
        return len(self._states) - len(self._running)

    def work(self, *, searching: bool) -> ScreenWork | None:
        """The work done and expected; `searching` is False for requests after the searches. None: no need to look."""
        if not self._work.is_due():
            return None
        builds = {"built": len(self._built), "requested": len(self._waiting)}
        return self._work.measure(self._states.values(), searching=searching, **builds)

    def finals_s(self) -> float:
        """The expected time of all problems' finals on a CPU in seconds, estimated from the trials so far."""
        return self._work.finals_s(self._states.values())

    @property
    def expected_s(self) -> float:
        """The expected time of screening on a CPU before any result."""
        return self._work.expected_s

    def screened_finals_s(self) -> float:
        """The same of the problems with a time."""
        return self._work.screened_finals_s(self._states.values())

    def fastest_us(self) -> dict[str, float]:
        """By problem id, the time of its fastest candidate so far, in us; infinite if its search found none."""
        return {n: state.least_us for n, state in self._states.items() if state.timed_count or state.finished}

    @property
    def past_deadline(self) -> bool:
        """True if the time for searches is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def step(self, timeout_s: float, *, more: bool = False) -> bool:
        """Submits ready jobs and takes results; False when all problems are finished and no `more` will be added."""
        if self.past_deadline:
            for state in self._running.values():
                state.end()
            self._to_advance |= self._running
        self._end_long_searches()
        while self._to_advance:
            self._advance(self._to_advance.pop(next(iter(self._to_advance))))
        self._dispatch()
        if not self._running and not more:
            return False
        self._context.builds_ahead.send(self._pool, SHARE_WHILE_SCREENING)
        for message in self._pool.poll(timeout_s, self._search_pool.wait_handles()):
            self.receive(message)
        with self._time_account.timed("search"):
            names = self._search_pool.receive()
        self._to_advance |= {name: self._states[name] for name in names if name in self._states}
        return True

    def _end_long_searches(self) -> None:
        """Ends searches with enough results for a selection if their next trial would exceed a budget for a CPU."""
        budget = self._context.cpu_budget
        for name, state in self._running.items() if budget is not None else ():
            trial_s, libraries = state.trial_s, self._context.family.baseline
            if trial_s is None or not state.has_fallback(libraries):
                continue
            if budget is not None and budget.cuts_search(trial_s, self._work.trials_left(state)):
                state.end(keep_required=False)
                self._to_advance[name] = state

    def receive(self, message: BuildResult | JobResult) -> None:
        """Takes one message of the pool."""
        if isinstance(message, BuildResult):
            self._take_build(message)
        elif message.job.problem.id in self._states:
            self._take_trials(message)

    def _take_build(self, message: BuildResult) -> None:
        facts = message.facts
        # A search may need the same build: problems of a fixed memory order are screened in the other one.
        if self._context.builds_ahead.receive(message) and message.build.id not in self._waiting:
            self._journal.build(message.build.id, facts)
            return
        self._built[message.build.id] = facts.error
        self._search_pool.add_build_facts(message.build.id, facts)
        self._journal.build(message.build.id, facts)
        # An earlier batch may have left builds in the pool; no problem waits for these.
        for state in self._waiting.get(message.build.id, {}).values():
            self._mark(state, state.build_finished(message.build.id, facts.error))

    def _take_trials(self, message: JobResult) -> None:
        state = self.running_now = self._states[message.job.problem.id]
        self._work.take_first_launches(state.problem.id, message.first_launch_s)
        trials = list(message.trials)
        if message.complete:
            received = {t.candidate for t in trials}
            trials += state.missing_results([c for c in message.job.candidates if c not in received])
        with self._time_account.timed("search"):
            taken = state.tell(trials)
        self._mark(state, taken)

    def _mark(self, state: ProblemState, trials: Sequence[Trial]) -> None:
        """Notes that its search has these new results."""
        if trials:
            self._to_advance[state.problem.id] = state
            self._record_trials(state, trials)

    def _record_trials(self, state: ProblemState, trials: Iterable[Trial]) -> None:
        with self._time_account.timed("journal"):
            for trial in trials:
                self._bounds.learn(state.problem, trial)
                self._search_pool.learn(trial)
                self._journal.trial(trial)

    def _dispatch(self) -> None:
        """Keeps every worker busy; workers claim problems in turns, the one with the fewest first."""
        own: list[list[ProblemState]] = [[] for _ in self._pool.devices]
        for state in self._running.values():
            if state.worker is not None:
                own[state.worker].append(state)
        idle = sorted(range(len(own)), key=lambda worker: len(own[worker]))
        while idle:
            for worker in idle:
                self._feed(worker, own[worker])
            idle = [worker for worker in idle if self._claim(worker, own[worker])]

    def _feed(self, worker: int, own: list[ProblemState]) -> None:
        """Gives a worker the ready requests of its own problems."""
        depth = (
            _QUEUE_DEPTH if self._context.cpu_budget is None else 1
        )  # a job that is sent runs, also after the budget
        mine = [state for state in own if state.ready] if self._pool.backlog(worker) < depth else []
        while mine and self._pool.backlog(worker) < depth:
            # While builds arrive, the fullest problem; afterwards in order, so that small M comes before large.
            waiting = len(self._built) < len(self._waiting)
            state = max(mine, key=lambda state: len(state.ready)) if waiting else mine[0]
            if not self._submit_batch(state, worker) or not state.ready:
                mine.remove(state)

    def _claim(self, worker: int, own: list[ProblemState]) -> bool:
        """A worker out of work takes the most expensive problem without a worker, so that all end together.

        Only an idle one takes more problems than it needs to hide the time that searches take to decide.
        """
        backlog = self._pool.backlog(worker)
        if backlog >= _QUEUE_DEPTH or (backlog and len(own) >= _MAX_PROBLEMS):
            return False
        free = [state for state in self._running.values() if state.worker is None and state.ready]
        if not free:
            return False
        state = max(free, key=lambda state: len(state.summary.ids) * relative_work(state.summary.spec))
        state.worker = worker
        own.append(state)
        self._context.assign(state.problem.id, worker)
        return True

    def _submit_batch(self, state: ProblemState, worker: int) -> bool:
        """Submits a job of the problem's ready requests; False when they must wait for a first result."""
        requests = self._next_requests(state)
        if not requests:
            return False
        self._journal.launch(SCREENING, state.problem.id, [r.candidate for r in requests])
        job = ScreenJob(
            stage=SCREENING,
            problem=state.problem,
            requests=tuple(requests),
            timer=self._timer,
            library=frozenset(self._context.family.baseline),
        )
        if not self._pool.backlog(worker):  # it begins at once, and its first result may come after many seconds
            self.running_now = state
        self._pool.submit(job, worker)
        return True

    def _next_requests(self, state: ProblemState) -> list[TrialRequest]:
        """A batch of short requests; else one long request, the most promising that can still win."""
        short = [r for r in state.ready if not self._bounds.is_long(state.problem, r.candidate)]
        if short:
            limited = self._context.cpu_budget is not None
            chosen = short[: min(_BATCH, trials_at_once(state.trial_s)) if limited else _BATCH]
            for request in chosen:
                state.ready.remove(request)
            return chosen
        if not state.results and state.pending > len(state.ready):
            return []  # the first result is pending, and may settle the rest
        return self._next_long(state)

    def _next_long(self, state: ProblemState) -> list[TrialRequest]:
        problem = state.problem
        ranked = sorted(state.ready, key=lambda r: (self._bounds.bound_us(problem, r.candidate), r.candidate.id))
        exempt: Candidate | None = self._bounds.exempt(problem, state.summary.required)
        for request in ranked:
            state.ready.remove(request)
            dropped = self._bounds.prune(problem, request.candidate, state.results.values())
            if dropped is None or request.candidate == exempt:
                return [request]
            self._mark(state, state.tell([dropped]))
        return []
