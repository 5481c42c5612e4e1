"""A hunt that lives in another process, as its course sees it; it goes on in a new one when that process dies."""

from collections.abc import Callable, Sequence

from gemmpipe.data import Trial
from gemmpipe.search import Hunt, Request
from gemmpipe.stages.hunting.hunter import Told


class FarHunt(Hunt):
    """Passes on what is told and hands out what comes; in between it asks for nothing and is not over."""

    def __init__(self, problem: str, say: Callable[[Told], None]) -> None:
        self._problem, self._say_to_it = problem, say
        self._told: dict[tuple[str, int], Trial] = {}
        """By (candidate id, launches asked for): what a new process need not have timed again."""
        self._out: dict[str, Request] = {}
        """By candidate id: given to the course and not told yet."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """A process that knows nothing has been given the problem."""
        self._requests: list[Request] = []
        self._awaited: set[str] = set()
        """Candidates that this process waits for."""
        self._unanswered = 1
        self._over = False

    def ask(self) -> Sequence[Request]:
        requests, self._requests = self._requests, []
        self._out |= {request.candidate.id: request for request in requests}
        return requests

    def tell(self, trials: Sequence[Trial]) -> None:
        wanted = []
        for trial in trials:
            name = trial.candidate.id
            self._told[name, self._out.pop(name).launches] = trial
            if name in self._awaited:
                self._awaited.remove(name)
                wanted.append(trial)
        if wanted:
            self._say(Told(problem=self._problem, trials=tuple(wanted)))

    def end(self, dropped: int) -> None:
        self._say(Told(problem=self._problem, dropped=dropped))

    def _say(self, message: Told) -> None:
        self._unanswered += 1
        self._say_to_it(message)

    def heard(self, requests: Sequence[Request], over: bool) -> None:
        """An answer, and what it asks for; what an earlier process was told need not be timed again."""
        self._unanswered -= 1
        self._over = over
        known = [r for r in requests if (r.candidate.id, r.launches) in self._told]
        if known:
            trials = tuple(self._told[r.candidate.id, r.launches] for r in known)
            self._say(Told(problem=self._problem, trials=trials))
        new = [r for r in requests if r not in known]
        self._awaited |= {r.candidate.id for r in new}
        self._requests += new

    @property
    def over(self) -> bool:
        return self._over and not self._unanswered and not self._requests
