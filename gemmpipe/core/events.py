"""Events of a run for its listeners (only the command line prints), and accounts of the time spent by purpose."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event.

    `kind` is one of `stage` (a stage began, with `total` units of work), `progress` (`done` of `total`),
    `line` (a line for the user), `detail` (a line for `verbose=true`), `warning`.
    """

    kind: str
    text: str = ""
    done: int = 0
    total: int = 0


@dataclass
class Events:
    """A list of listeners, which may be empty."""

    listeners: list[Callable[[Event], None]] = field(default_factory=list)

    def emit(self, kind: str, text: str = "", *, done: int = 0, total: int = 0) -> None:
        """Pass an event to every listener."""
        event = Event(kind=kind, text=text, done=done, total=total)
        for listener in self.listeners:
            listener(event)


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number with its noun: `1 problem`, `1,944 problems`; `nouns` is the plural if it is not noun + s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


IDLE = "idle"
"""The purpose of waiting for other processes."""


@dataclass(kw_only=True, eq=False)
class TimeAccount:
    """Time of one thread by purpose, in seconds; the time of a nested purpose does not count for the outer one."""

    spent_s: dict[str, float] = field(default_factory=dict)
    _within: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def timed(self, on: str) -> Iterator[None]:
        """Add the time of the block to the purpose `on`."""
        self._switch()
        self._within.append(on)
        try:
            yield
        finally:
            self._switch()
            self._within.pop()

    def _switch(self) -> None:
        now = time.monotonic()
        if self._within:
            purpose = self._within[-1]
            self.spent_s[purpose] = self.spent_s.get(purpose, 0.0) + now - self._since
        self._since = now
