"""One problem on its way through screen: its search, what waits for builds, what is ready, what came out.

A product never gets faster by more rows: what a candidate took at a smaller M bounds what it takes here.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from gemmpipe.core.data import Build, Candidate, Problem, Scalar, Status, Trial
from gemmpipe.search import TrialRequest
from gemmpipe.stages.screen.search_pool import SessionStarted


class TrialLookup(Protocol):
    """Trials that need not be made again."""

    def find(self, stage: str, problem: str, candidate: Candidate, launches: int) -> Trial | None: ...


class ProblemState:
    """The scheduler's view of one problem."""

    def __init__(self, started: SessionStarted, record: TrialLookup, budget_trials: int | None = None) -> None:
        self.summary = started.summary
        self.problem = started.summary.problem
        self.builds = started.builds
        self.kernel_names = started.kernel_names
        self.requested: list[Candidate] = []
        """Whom its search, or anyone, asked for; whoever takes them empties the list."""
        self._session = started.session
        self._record = record
        self._trials_left = budget_trials
        self._waiting: dict[str, list[TrialRequest]] = {}
        self._unbuilt: dict[str, set[str]] = {}
        self.ready: deque[TrialRequest] = deque()
        self._pending: dict[str, TrialRequest] = {}
        self._extra: set[str] = set()
        """Candidates that are timed for others' sake: the search does not wait for them."""
        self.results: dict[Candidate, Trial] = {}
        """Each candidate's latest trial."""
        self.wanted_builds: list[Build] = []
        """Builds that open requests need; whoever takes them empties the list."""
        self.worker: int | None = None
        """Whose it is: all candidates of a problem are timed on one device."""
        self.cut_short = False
        """Whether the search ended before it was done."""

    def take_requests(self, built: dict[str, str]) -> list[Trial]:
        """Take the search's wishes; `built` maps finished builds to their error, if any. Failed builds give trials."""
        failures: list[Trial] = []
        while requests := self._session.ask():
            recalled: list[Trial] = []
            dropped = 0
            self.requested += [request.candidate for request in requests]
            for request in requests:
                if request.candidate.id in self._pending:
                    continue  # the hunt began anew, and this is still under way
                earlier = self._record.find("screen", self.problem.id, request.candidate, request.launches)
                if earlier is not None:
                    recalled.append(earlier)
                elif not self._within_budget(request.candidate):
                    dropped += 1
                else:
                    failures += self._start(request, built)
            self._take(recalled)
            if failures:
                self.tell(failures)
            if dropped:
                self.cut_short = True
                self._session.end(dropped)
        return failures

    def _within_budget(self, candidate: Candidate) -> bool:
        """Count a candidate that was not timed in this run yet; False when the budget is spent."""
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
        """Time these too, once the search is over; those that were timed already are left out."""
        failures: list[Trial] = []
        for request in requests:
            if request.candidate in self.results or request.candidate.id in self._pending:
                continue
            self._extra.add(request.candidate.id)
            self.requested.append(request.candidate)
            earlier = self._record.find("screen", self.problem.id, request.candidate, request.launches)
            if earlier is not None:
                self._take([earlier])
            else:
                failures += self._start(request, built)
        self.tell(failures)
        return failures

    def end(self) -> None:
        """The budget is spent: what is not under way is dropped, but for what a choice cannot do without."""
        if self._session.finished:
            return
        idle = [r for r in self._pending.values() if r in self.ready or r.candidate.id in self._unbuilt]
        exempt = set(self.summary.required) or ({idle[0].candidate} if idle and not self.results else set())
        dropped = {r.candidate.id for r in idle if r.candidate not in exempt}
        for name in dropped:
            del self._pending[name]
            self._unbuilt.pop(name, None)
        self.ready = deque(r for r in self.ready if r.candidate.id not in dropped)
        # Where everybody has a time, or is about to, nothing is left for the next run.
        self.cut_short = self.cut_short or not self.summary.ids <= {c.id for c in self.results} | self._pending.keys()
        self._session.end(len(dropped))

    def build_finished(self, build: str, error: str) -> list[Trial]:
        """A build is finished: what waited for it alone is ready, or failed with it."""
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
            stage="screen",
            problem=self.problem.id,
            candidate=candidate,
            status=Status.COMPILE_ERROR,
            error=error,
        )

    def tell(self, trials: Sequence[Trial]) -> list[Trial]:
        """Results for open requests; those that nobody waits for are ignored. Returns those taken."""
        taken = [t for t in trials if self._pending.pop(t.candidate.id, None) is not None]
        self._take(taken)
        return taken

    def _take(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self.results[trial.candidate] = trial
        own = [t for t in trials if t.candidate.id not in self._extra]
        self._extra -= {t.candidate.id for t in trials}
        if own:
            self._session.tell(own)

    def missing_results(self, candidates: Collection[Candidate]) -> list[Trial]:
        """A failure for each of these that is still open: its job is over and brought nothing."""
        missing = [c for c in candidates if c.id in self._pending]
        return [
            Trial(stage="screen", problem=self.problem.id, candidate=c, status=Status.DIED, error="no result")
            for c in missing
        ]

    @property
    def finished(self) -> bool:
        """Whether the search has ended and nothing else is under way."""
        return self._session.finished and not self._pending

    @property
    def pending(self) -> int:
        """Requests not answered yet."""
        return len(self._pending)


_LONG_US = 5_000.0
_DROP_RATIO = 1.5


class Bounds:
    """Drops slow candidates of long problems without running them at all."""

    def __init__(self, library: Collection[str], own: Collection[str]) -> None:
        self._library = library
        self._own = own  # not checked yet: a kernel that computes nothing must not show that others are hopeless
        self._known: dict[tuple[tuple[tuple[str, Scalar], ...], Candidate], list[tuple[int, float]]] = {}
        self._long: set[tuple[tuple[str, Scalar], ...]] = set()
        self._extra: dict[tuple[tuple[tuple[str, Scalar], ...], Candidate], int] = {}

    def learn(self, problem: Problem, trial: Trial) -> None:
        """A time measured at this problem's M, and the weight memory it took."""
        if trial.time_us is not None:
            key = (problem.shape_group, trial.candidate)
            self._known.setdefault(key, []).append((problem.rows, trial.time_us))
            self._extra[key] = trial.extra_weight_bytes
            if trial.time_us > _LONG_US:
                self._long.add(key[0])

    def bound_us(self, problem: Problem, candidate: Candidate) -> float:
        """The longest time at an M no larger; 0 where none is known."""
        known = self._known.get((problem.shape_group, candidate), ())
        return max((t for m, t in known if m <= problem.rows), default=0.0)

    def is_long(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether one launch is so long that asking first whether it can win pays."""
        # The scheduler asks for everything that is ready; most products have no long candidate at all.
        return bool(self._long) and problem.shape_group in self._long and self.bound_us(problem, candidate) > _LONG_US

    def prune(self, problem: Problem, candidate: Candidate, results: Iterable[Trial]) -> Trial | None:
        """A `dropped` trial when the bound is beyond what is reached here with no more weight memory."""
        bound = self.bound_us(problem, candidate)
        extra = self._extra.get((problem.shape_group, candidate), 0)
        trusted = [t for t in results if t.candidate.backend not in self._own]
        rival_times = [t.time_us for t in trusted if t.time_us is not None and t.extra_weight_bytes <= extra]
        if not rival_times or bound <= max(_LONG_US, _DROP_RATIO * min(rival_times)):
            return None
        why = f"not run: took {bound:.0f} us with fewer rows, {min(rival_times):.0f} us is reached here"
        return Trial(stage="screen", problem=problem.id, candidate=candidate, status=Status.PRUNED, error=why)

    def exempt(self, problem: Problem, candidates: Collection[Candidate]) -> Candidate | None:
        """The library candidate with the least bound: the baseline is measured, however slow."""
        library = [c for c in candidates if c.backend in self._library]
        return min(library, key=lambda c: (self.bound_us(problem, c), c.id), default=None)
