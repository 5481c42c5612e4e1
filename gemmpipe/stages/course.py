"""One problem on its way through screen: its search, what waits for builds, what is ready, what came out."""

from collections import deque
from collections.abc import Collection, Sequence

from gemmpipe.data import Candidate, Status, Trial
from gemmpipe.journal import Record
from gemmpipe.search import Hunt, Request
from gemmpipe.stages.listing import Listing


class Course:
    """The scheduler's view of one problem."""

    def __init__(self, listing: Listing, hunt: Hunt, record: Record) -> None:
        self.listing = listing
        self.problem = listing.problem
        self._hunt = hunt
        self._record = record
        self._waiting: dict[str, list[Request]] = {}
        self._unbuilt: dict[str, set[str]] = {}
        self.ready: deque[Request] = deque()
        self._open: dict[str, Request] = {}
        self.results: dict[Candidate, Trial] = {}
        """Each candidate's latest trial."""
        self.worker: int | None = None
        """Whose it is: all candidates of a problem are timed on one device."""

    def pump(self, built: dict[str, str]) -> list[Trial]:
        """Take the search's wishes; `built` maps finished builds to their error, if any. Failed builds give trials."""
        failures: list[Trial] = []
        while requests := self._hunt.ask():
            recalled: list[Trial] = []
            for request in requests:
                earlier = self._record.find("screen", self.problem.id, request.candidate, request.launches)
                if earlier is not None:
                    recalled.append(earlier)
                    continue
                self._open[request.candidate.id] = request
                failures += self._place(request, built)
            self._take(recalled)
            if failures:
                self.tell(failures)
        return failures

    def _place(self, request: Request, built: dict[str, str]) -> list[Trial]:
        builds = {b.id for b in self.listing.builds[request.candidate.id]}
        broken = next((built[b] for b in sorted(builds) if built.get(b)), "")
        if broken:
            return [self._failure(request.candidate, broken)]
        missing = builds - built.keys()
        if missing:
            self._unbuilt[request.candidate.id] = missing
            for build in missing:
                self._waiting.setdefault(build, []).append(request)
        else:
            self.ready.append(request)
        return []

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
        if trials:
            self._hunt.tell(trials)

    def unanswered(self, candidates: Collection[Candidate]) -> list[Trial]:
        """A failure for each of these that is still open: its job is over and brought nothing."""
        missing = [c for c in candidates if c.id in self._open]
        return [
            Trial(stage="screen", problem=self.problem.id, candidate=c, status=Status.DIED, error="no result")
            for c in missing
        ]

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        return self._hunt.over

    @property
    def open(self) -> int:
        """Requests not answered yet."""
        return len(self._open)
