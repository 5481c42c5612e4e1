"""The state of one problem in screen: its search, requests that wait for builds, ready requests, and results.

Also the bounds between problems: a product never gets faster with more rows, so a candidate's time at a smaller M is a
lower bound of its time here.
"""

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from gemmpipe.bench.screening import DROP_RATIO
from gemmpipe.core.data import SCREENING, Build, Candidate, Problem, Scalar, Status, Trial
from gemmpipe.search import TrialRequest
from gemmpipe.stages.screen.search_pool import SessionStarted


class TrialLookup(Protocol):
    """Finds trials that need not be repeated."""

    def find(self, stage: str, problem: str, candidate: Candidate, launches: int) -> Trial | None: ...


class ProblemState:
    """The scheduler's view of one problem."""

    def __init__(self, started: SessionStarted, record: TrialLookup, budget_trials: int | None = None) -> None:
        self.summary = started.summary
        self.problem = started.summary.problem
        self.builds = started.builds
        self.kernel_names = started.kernel_names
        self.requested: list[Candidate] = []
        """Newly requested candidates; the scheduler takes them and clears the list."""
        self._session = started.session
        self._record = record
        self._trials_left = budget_trials
        self._waiting: dict[str, list[TrialRequest]] = {}
        self._unbuilt: dict[str, set[str]] = {}
        self.ready: deque[TrialRequest] = deque()
        self._pending: dict[str, TrialRequest] = {}
        self._extra: set[str] = set()
        """Ids of candidates that the search has not requested and does not wait for."""
        self.results: dict[Candidate, Trial] = {}
        """The latest trial of each candidate."""
        self.wanted_builds: list[Build] = []
        """Builds that open requests need; the scheduler takes them and clears the list."""
        self.worker: int | None = None
        """The worker that times all candidates of this problem: one device, so that times are comparable."""
        self.cut_short = False
        """True if a budget ended the search."""
        self.result_count = 0
        """Requests with a result, also one of an earlier run."""
        self.timed_us, self.timed_count = 0.0, 0
        """The launches of the results with a time, in all, and their number."""
        self._first_timed: tuple[float, int] | None = None
        """When the first results with a time came, on the monotonic clock, and their number."""
        self._last_timed: tuple[float, int] | None = None
        """The same of the last results, with the number of all."""

    def take_requests(self, built: dict[str, str]) -> list[Trial]:
        """Takes the search's requests; `built`: error of each finished build, empty if none. Returns failed trials."""
        failures: list[Trial] = []
        while requests := self._session.ask():
            known: list[Trial] = []
            dropped = 0
            self.requested += [request.candidate for request in requests]
            for request in requests:
                if request.candidate.id in self._pending:
                    continue  # the search was restarted, and this request is still running
                earlier = self._record.find(SCREENING, self.problem.id, request.candidate, request.launches)
                if earlier is not None:
                    known.append(earlier)
                elif not self._within_budget(request.candidate):
                    dropped += 1
                else:
                    failures += self._start(request, built)
            self._take(known)
            if failures:
                self.tell(failures)
            if dropped:
                self.cut_short = True
                self._session.end(dropped)
        return failures

    def _within_budget(self, candidate: Candidate) -> bool:
        """Counts a candidate that this run has not timed yet; False when the budget is spent."""
        if self._trials_left is None or candidate in self.results:
            return True
        self._trials_left -= 1
        return self._trials_left >= 0

    def _start(self, request: TrialRequest, built: dict[str, str]) -> list[Trial]:
        self._pending[request.candidate.id] = request
        builds = {b.id: b for b in self.builds[request.candidate.id]}
        broken = next((built[b] for b in sorted(builds) if built.get(b)), "")
        if broken:
            return [self._failure(request.candidate, broken)]
        missing = builds.keys() - built.keys()
        if missing:
            self._unbuilt[request.candidate.id] = set(missing)
            for build in missing:
                self._waiting.setdefault(build, []).append(request)
            self.wanted_builds += [builds[b] for b in builds if b in missing]
        else:
            self.ready.append(request)
        return []

    def add_requests(self, requests: Sequence[TrialRequest], built: dict[str, str]) -> list[Trial]:
        """Starts extra requests after the search; skips candidates that are timed. Returns failed trials."""
        failures: list[Trial] = []
        for request in requests:
            if request.candidate in self.results or request.candidate.id in self._pending:
                continue
            self._extra.add(request.candidate.id)
            self.requested.append(request.candidate)
            earlier = self._record.find(SCREENING, self.problem.id, request.candidate, request.launches)
            if earlier is not None:
                self._take([earlier])
            else:
                failures += self._start(request, built)
        self.tell(failures)
        return failures

    def end(self, *, keep_required: bool = True) -> None:
        """Ends the search with the budget spent: drops requests that do not run yet, except those selection needs.

        Without `keep_required` all of them, where there is a result.
        """
        if self._session.finished:
            return
        idle = [r for r in self._pending.values() if r in self.ready or r.candidate.id in self._unbuilt]
        exempt = set(self.summary.required if keep_required else ()) or (
            {idle[0].candidate} if idle and not self.results else set()
        )
        dropped = {r.candidate.id for r in idle if r.candidate not in exempt}
        for name in dropped:
            del self._pending[name]
            self._unbuilt.pop(name, None)
        self.ready = deque(r for r in self.ready if r.candidate.id not in dropped)
        # If every candidate has a result or is running, nothing is left for the next run.
        self.cut_short = self.cut_short or not self.summary.ids <= {c.id for c in self.results} | self._pending.keys()
        self._session.end(len(dropped))

    def build_finished(self, build: str, error: str) -> list[Trial]:
        """Takes a finished build: requests that waited for it alone become ready, or fail with it."""
        failures = []
        for request in self._waiting.pop(build, ()):
            missing = self._unbuilt.get(request.candidate.id)
            if missing is None:
                continue
            missing.discard(build)
            if error:
                del self._unbuilt[request.candidate.id]
                failures.append(self._failure(request.candidate, error))
            elif not missing:
                del self._unbuilt[request.candidate.id]
                self.ready.append(request)
        self.tell(failures)
        return failures

    def _failure(self, candidate: Candidate, error: str) -> Trial:
        return Trial(
            stage=SCREENING,
            problem=self.problem.id,
            candidate=candidate,
            status=Status.COMPILE_ERROR,
            error=error,
        )

    def tell(self, trials: Sequence[Trial]) -> list[Trial]:
        """Takes results of open requests and ignores others. Returns those taken."""
        taken = [t for t in trials if self._pending.pop(t.candidate.id, None) is not None]
        self._take(taken)
        if timed := sum(t.time_us is not None for t in taken):
            before = self._last_timed[1] if self._last_timed is not None else 0
            self._last_timed = time.monotonic(), before + timed
            self._first_timed = self._first_timed or self._last_timed
        return taken

    @property
    def trial_s(self) -> float | None:
        """Seconds of one of this run's trials, as its results come in; None before the first.

        After the first results alone it is that of their launches, twice: they came with the set-up of the worker.
        """
        if self._first_timed is None or self._last_timed is None:
            return None
        (began, first), (now, last) = self._first_timed, self._last_timed
        return (now - began) / (last - first) if last > first else 2e-6 * self.timed_us / max(1, self.timed_count)

    @property
    def times_us(self) -> list[float]:
        """The times of the results that have one."""
        return [t.time_us for t in self.results.values() if t.time_us is not None]

    @property
    def least_us(self) -> float:
        """The time of the fastest result; infinite without one."""
        return min(self.times_us, default=math.inf)

    def has_fallback(self, libraries: Collection[str]) -> bool:
        """True if a result can be chosen whatever the limits: timed, a library's where one is listed, no more memory.

        `libraries`: their labels.
        """
        trusted = {c for c in self.summary.required if c.backend in libraries}
        return any(
            t.time_us is not None and not t.extra_weight_bytes and (c in trusted or not trusted)
            for c, t in self.results.items()
        )

    def _take(self, trials: Sequence[Trial]) -> None:
        self.result_count += len(trials)
        for trial in trials:
            self.results[trial.candidate] = trial
            if trial.time_us is not None:
                self.timed_us += trial.time_us * trial.launches
                self.timed_count += 1
        own = [t for t in trials if t.candidate.id not in self._extra]
        self._extra -= {t.candidate.id for t in trials}
        if own:
            self._session.tell(own)

    def missing_results(self, candidates: Collection[Candidate]) -> list[Trial]:
        """A failed trial for each of these that is still open: its job has ended without a result."""
        missing = [c for c in candidates if c.id in self._pending]
        return [
            Trial(stage=SCREENING, problem=self.problem.id, candidate=c, status=Status.DIED, error="no result")
            for c in missing
        ]

    @property
    def finished(self) -> bool:
        """True if the search has ended and no request is open."""
        return self._session.finished and not self._pending

    @property
    def pending(self) -> int:
        """Number of open requests."""
        return len(self._pending)


_LONG_US = 5_000.0


class Bounds:
    """Prunes slow candidates of problems with long launches without running them."""

    def __init__(self, library: Collection[str], own: Collection[str]) -> None:
        self._library = library
        self._own = own  # not checked yet: a kernel that computes nothing must not prune others
        self._known: dict[tuple[tuple[tuple[str, Scalar], ...], Candidate], list[tuple[int, float]]] = {}
        self._long: set[tuple[tuple[str, Scalar], ...]] = set()
        self._extra: dict[tuple[tuple[tuple[str, Scalar], ...], Candidate], int] = {}

    def learn(self, problem: Problem, trial: Trial) -> None:
        """Takes a time measured at this problem's M, and the extra weight memory."""
        if trial.time_us is not None:
            key = (problem.shape_group, trial.candidate)
            self._known.setdefault(key, []).append((problem.rows, trial.time_us))
            self._extra[key] = trial.extra_weight_bytes
            if trial.time_us > _LONG_US:
                self._long.add(key[0])

    def bound_us(self, problem: Problem, candidate: Candidate) -> float:
        """The longest known time at this M or a smaller one, in us; 0 where none is known."""
        known = self._known.get((problem.shape_group, candidate), ())
        return max((t for m, t in known if m <= problem.rows), default=0.0)

    def is_long(self, problem: Problem, candidate: Candidate) -> bool:
        """True if one launch is so long that checking first whether it can win pays off."""
        # Called for every ready request; most products have no long candidate at all.
        return bool(self._long) and problem.shape_group in self._long and self.bound_us(problem, candidate) > _LONG_US

    def prune(self, problem: Problem, candidate: Candidate, results: Iterable[Trial]) -> Trial | None:
        """A pruned trial if the bound exceeds the best time here with no more weight memory by `DROP_RATIO`."""
        bound = self.bound_us(problem, candidate)
        extra = self._extra.get((problem.shape_group, candidate), 0)
        trusted = [t for t in results if t.candidate.backend not in self._own]
        rival_times = [t.time_us for t in trusted if t.time_us is not None and t.extra_weight_bytes <= extra]
        if not rival_times or bound <= max(_LONG_US, DROP_RATIO * min(rival_times)):
            return None
        why = f"not run: took {bound:.0f} us with fewer rows, the best here takes {min(rival_times):.0f} us"
        return Trial(stage=SCREENING, problem=problem.id, candidate=candidate, status=Status.PRUNED, error=why)

    def exempt(self, problem: Problem, candidates: Collection[Candidate]) -> Candidate | None:
        """The library candidate with the least bound: the baseline is timed, however slow."""
        library = [c for c in candidates if c.backend in self._library]
        return min(library, key=lambda c: (self.bound_us(problem, c), c.id), default=None)
