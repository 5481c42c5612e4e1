"""Events of a run for its listeners (only the command line prints), and accounts of the time spent by purpose."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event.

    `kind` is one of `step` (stage `done` of `total` of the chain began), `stage` (it has `total` units of work, counted
    in `unit`), `progress` (`done` of `total`; `text` is what runs now), `line` (a line for the user), `detail` (a line
    for `verbose=true`), `warning`, `rest` (a new estimate of what its step does after the stage, in `rest_s`),
    `stopping` (the user asked to stop; `text` is what is finished before).
    """

    kind: str
    text: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    """The plural of what is counted: `trials`, `problems`, `kernels`."""
    share: float | None = None
    """The share of the stage's work that is done, by time; None: `done` of `total`, units take about the same time."""
    spans: tuple[tuple[int, int, str], ...] = ()
    """With `line`: (start, end, style) of parts of the text; a terminal chooses their colours."""
    is_whole: bool = False
    """With `line`: True for a command to copy, which is not folded."""
    stage_s: float | None = None
    """With `progress`: the seconds left of the stage's work, if the stage knows them better than by its share."""
    stage_factor: float = 1.0
    """With `stage_s`: the factor by which the true time may be shorter or longer."""
    left_s: float | None = None
    """With `progress`: the seconds until the end of the run, where a budget ends it; None: as the work lets expect."""
    left_range_s: tuple[float, float] | None = None
    """With `left_s`: the least and the most seconds until the end of the run; None: `left_s` is sure."""
    most_s: float | None = None
    """With `progress`: the seconds until a budget ends the run, if its work does not end before; None: no budget."""
    rest_s: float = 0.0
    """With `step`: the expected seconds of the stages that follow with the same problems; with `stage` and `rest`: of
    those that follow in the same step, or how much more the stages that follow take than the step has said."""
    expected_s: float = 0.0
    """With `stage`: the seconds that its work is expected to take, before any of it is done; 0: not known."""
    later: float = 0.0
    """With `step`: the problems of later batches over those of this one."""
    number: int = 1
    """With `step`: the pass over the stages that time, of which a budget allows several."""


@dataclass
class Events:
    """A list of listeners, which may be empty."""

    listeners: list[Callable[[Event], None]] = field(default_factory=list)

    def emit(
        self,
        kind: str,
        text: str = "",
        *,
        done: int = 0,
        total: int = 0,
        unit: str = "",
        share: float | None = None,
        stage_s: float | None = None,
        stage_factor: float = 1.0,
        left_s: float | None = None,
        left_range_s: tuple[float, float] | None = None,
        most_s: float | None = None,
        rest_s: float = 0.0,
        expected_s: float = 0.0,
        later: float = 0.0,
        number: int = 1,
    ) -> None:
        """Pass an event to every listener."""
        event = Event(
            kind=kind,
            text=text,
            done=done,
            total=total,
            unit=unit,
            share=share,
            stage_s=stage_s,
            stage_factor=stage_factor,
            left_s=left_s,
            left_range_s=left_range_s,
            most_s=most_s,
            rest_s=rest_s,
            expected_s=expected_s,
            later=later,
            number=number,
        )
        self.send(event)

    def send(self, event: Event) -> None:
        """Pass this event to every listener."""
        for listener in self.listeners:
            listener(event)


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number with its noun: `1 problem`, `1,944 problems`; `nouns` is the plural if it is not noun + s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def verb(number: int, one: str, more: str) -> str:
    """The form of a verb for a number of subjects: `verb(1, "was", "were")` is `was`."""
    return one if number == 1 else more


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
