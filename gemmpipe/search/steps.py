"""A search in steps: what a step asked for is told before the next one is decided."""

from abc import abstractmethod
from collections.abc import Sequence

from gemmpipe.data import Trial
from gemmpipe.search import Hunt, Request
from gemmpipe.search.looks import Ladder


class StepHunt(Hunt):
    """Asks for `first`, then for what `_next` decides."""

    def __init__(self, first: Sequence[Request]) -> None:
        self._requests = list(first)
        self._open = len(first)
        self._ended = False

    def ask(self) -> Sequence[Request]:
        requests, self._requests = self._requests, []
        return requests

    def tell(self, trials: Sequence[Trial]) -> None:
        self._open -= len(trials)
        self._heard(trials)
        self._go_on()

    def end(self, dropped: int) -> None:
        self._ended = True
        self._open -= dropped + len(self._requests)
        self._requests = []
        self._go_on()

    def _go_on(self) -> None:
        if self._open == 0:
            self._requests = list(self._next())
            self._open = len(self._requests)

    @property
    def over(self) -> bool:
        return self._open == 0

    @abstractmethod
    def _heard(self, trials: Sequence[Trial]) -> None:
        """Results of the current step, in any number of portions."""

    @abstractmethod
    def _next(self) -> Sequence[Request]:
        """The next step; nothing when it is over. After `end` no candidate that was not timed yet."""


class GlanceHunt(StepHunt):
    """A glance at some candidates, then closer looks at the fastest of them."""

    def __init__(self, glances: Sequence[Request], ladder: Ladder) -> None:
        super().__init__(glances)
        self._ladder = ladder

    def _heard(self, trials: Sequence[Trial]) -> None:
        self._ladder.take(trials)

    def _next(self) -> Sequence[Request]:
        return self._ladder.climb()
