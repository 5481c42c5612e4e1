"""One problem on its way through screen: its search, what waits for builds, what is ready, what came out."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from gemmpipe.data import Build, Candidate, Status, Trial
from gemmpipe.search import Request
from gemmpipe.stages.hunting import Begun


class Finished(Protocol):
    """Trials that need not be made again."""

    def find(self, stage: str, problem: str, candidate: Candidate, launches: int) -> Trial | None: ...


class Course:
    """The scheduler's view of one problem."""

    def __init__(self, begun: Begun, record: Finished, budget_trials: int | None = None) -> None:
        self.outline = begun.outline
        self.problem = begun.outline.problem
        self.builds = begun.builds
        self.kernel_names = begun.kernel_names
        self.asked: list[Candidate] = []
        """Whom its search, or anyone, asked for; whoever takes them empties the list."""
        self._hunt = begun.hunt
        self._record = record
        self._left = budget_trials
        self._waiting: dict[str, list[Request]] = {}
        self._unbuilt: dict[str, set[str]] = {}
        self.ready: deque[Request] = deque()
        self._open: dict[str, Request] = {}
        self._further: set[str] = set()
        """Candidates that are timed for others' sake: the search does not wait for them."""
        self.results: dict[Candidate, Trial] = {}
        """Each candidate's latest trial."""
        self.wanted: list[Build] = []
        """Builds that open requests need; whoever takes them empties the list."""
        self.worker: int | None = None
        """Whose it is: all candidates of a problem are timed on one device."""
        self.cut = False
        """Whether the search ended before it was done."""

    def pump(self, built: dict[str, str]) -> list[Trial]:
        """Take the search's wishes; `built` maps finished builds to their error, if any. Failed builds give trials."""
        failures: list[Trial] = []
        while requests := self._hunt.ask():
            recalled: list[Trial] = []
            dropped = 0
            self.asked += [request.candidate for request in requests]
            for request in requests:
                if request.candidate.id in self._open:
                    continue  # the hunt began anew, and this is still under way
                earlier = self._record.find("screen", self.problem.id, request.candidate, request.launches)
                if earlier is not None:
                    recalled.append(earlier)
                elif not self._affordable(request.candidate):
                    dropped += 1
                else:
                    failures += self._begin(request, built)
            self._take(recalled)
            if failures:
                self.tell(failures)
            if dropped:
                self.cut = True
                self._hunt.end(dropped)
        return failures

    def _affordable(self, candidate: Candidate) -> bool:
        """Count a candidate that was not timed in this run yet; False when the budget is spent."""
        if self._left is None or candidate in self.results:
            return True
        self._left -= 1
        return self._left >= 0

    def _begin(self, request: Request, built: dict[str, str]) -> list[Trial]:
        self._open[request.candidate.id] = request
        builds = {b.id: b for b in self.builds[request.candidate.id]}
        broken = next((built[b] for b in sorted(builds) if built.get(b)), "")
        if broken:
            return [self._failure(request.candidate, broken)]
        missing = builds.keys() - built.keys()
        if missing:
            self._unbuilt[request.candidate.id] = set(missing)
            for build in missing:
                self._waiting.setdefault(build, []).append(request)
            self.wanted += [builds[b] for b in builds if b in missing]
        else:
            self.ready.append(request)
        return []

    def further(self, requests: Sequence[Request], built: dict[str, str]) -> list[Trial]:
        """Time these too, once the search is over; those that were timed already are left out."""
        failures: list[Trial] = []
        for request in requests:
            if request.candidate in self.results or request.candidate.id in self._open:
                continue
            self._further.add(request.candidate.id)
            self.asked.append(request.candidate)
            earlier = self._record.find("screen", self.problem.id, request.candidate, request.launches)
            if earlier is not None:
                self._take([earlier])
            else:
                failures += self._begin(request, built)
        self.tell(failures)
        return failures

    def end(self) -> None:
        """The budget is spent: what is not under way is dropped, but for what a choice cannot do without."""
        if self._hunt.over:
            return
        idle = [r for r in self._open.values() if r in self.ready or r.candidate.id in self._unbuilt]
        spared = set(self.outline.given) or ({idle[0].candidate} if idle and not self.results else set())
        dropped = {r.candidate.id for r in idle if r.candidate not in spared}
        for name in dropped:
            del self._open[name]
            self._unbuilt.pop(name, None)
        self.ready = deque(r for r in self.ready if r.candidate.id not in dropped)
        # Where everybody has a time, or is about to, nothing is left for the next run.
        self.cut = self.cut or not self.outline.ids <= {c.id for c in self.results} | self._open.keys()
        self._hunt.end(len(dropped))

    def built(self, build: str, error: str) -> list[Trial]:
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
        taken = [t for t in trials if self._open.pop(t.candidate.id, None) is not None]
        self._take(taken)
        return taken

    def _take(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self.results[trial.candidate] = trial
        told = [t for t in trials if t.candidate.id not in self._further]
        self._further -= {t.candidate.id for t in trials}
        if told:
            self._hunt.tell(told)

    def unanswered(self, candidates: Collection[Candidate]) -> list[Trial]:
        """A failure for each of these that is still open: its job is over and brought nothing."""
        missing = [c for c in candidates if c.id in self._open]
        return [
            Trial(stage="screen", problem=self.problem.id, candidate=c, status=Status.DIED, error="no result")
            for c in missing
        ]

    @property
    def over(self) -> bool:
        """Whether the search has ended and nothing else is under way."""
        return self._hunt.over and not self._open

    @property
    def open(self) -> int:
        """Requests not answered yet."""
        return len(self._open)
