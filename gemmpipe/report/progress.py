"""The progress of a run from its events: the stage, the work done, what runs now, and the time left.

Time is passed in by the caller, in seconds on any monotonic clock.
"""

from gemmpipe.core.events import Event
from gemmpipe.core.units import count_text, percent_text, rough_duration_text

_MIN_GAIN = 0.02  # of a stage's work that must be done before its rate is known
_TRUSTED = 0.5  # of a stage's work, after which the estimate from before the stage no longer counts


class RemainingTime:
    """The time left in a stage, from the share of its work that is done at some moment.

    The rate counts from the first result on: before that, processes start.
    """

    def __init__(self, now: float) -> None:
        self._start = now
        self._last: tuple[float, float] | None = None
        """(time, share) of the last progress."""

    def take(self, share: float, now: float) -> None:
        """Take the share of the work that is done now, in [0, 1]."""
        if self._last is None and share <= 0:
            self._start = now
            return
        if self._last is None or share != self._last[1]:
            self._last = now, share

    def left_s(self, now: float) -> float | None:
        """The seconds left, counted down since the last result; None while too little is done to tell."""
        if self._last is None:
            return None
        at, share = self._last
        if share < _MIN_GAIN or at <= self._start:
            return None
        return max(0.0, (1 - share) * (at - self._start) / share - (now - at))


class RunProgress:
    """The state of a run, as its events tell it."""

    def __init__(self, now: float) -> None:
        self.step, self.steps = 0, 0
        """The number of the stage in the chain, and the length of the chain."""
        self.stage = ""
        self.note = ""
        """What runs now."""
        self.done, self.total, self.unit = 0, 0, ""
        self.share: float | None = None
        self.stopping = False
        self.began = self.stage_began = now
        self._rest_s = self._later = 0.0
        self._batch_began = now
        self._expected_end: float | None = None
        """When the run ends, as estimated when the stage began."""
        self._remaining: RemainingTime | None = None
        self._budget_ends: float | None = None
        """When a budget ends the run; None where the work decides."""

    def take(self, event: Event, now: float) -> None:
        """Take an event; kinds without progress change nothing."""
        if event.kind == "step":
            self._begin(event.text, now)
            if event.done <= self.step or not self._later:  # stages before the first batch are not repeated
                self._batch_began = now
            self.step, self.steps, self._rest_s, self._later = event.done, event.total, event.rest_s, event.later
        elif event.kind == "stage":
            self._begin(event.text, now)
            self.total, self.unit = event.total, event.unit
            self._remaining = RemainingTime(now)
        elif event.kind == "progress":
            self.done, self.total = event.done, event.total or self.total
            self.note = event.text
            self._budget_ends = now + event.left_s if event.left_s is not None else None
            self.share = event.share if event.share is not None else self.done / self.total if self.total else None
            if self._remaining is not None and self.share is not None:
                self._remaining.take(self.share, now)
        elif event.kind == "stopping":
            self.stopping = True

    def _begin(self, stage: str, now: float) -> None:
        left_s = self.left_s(now)
        self._expected_end = now + left_s if left_s is not None else None
        self.stage, self.stage_began = stage, now
        self.done, self.total, self.unit, self.share, self.note = 0, 0, "", None, ""
        self._remaining = self._budget_ends = None

    def left_s(self, now: float) -> float | None:
        """The seconds until the end of the run; None while they are not known."""
        if self.stopping:
            return None
        if self._budget_ends is not None:
            return max(0.0, self._budget_ends - now)
        stage_s = self._remaining.left_s(now) if self._remaining is not None else None
        before_s = max(0.0, self._expected_end - now) if self._expected_end is not None else None
        if stage_s is None or self.share is None:
            return before_s
        batch_s = stage_s + self._rest_s
        left_s = batch_s + self._later * (now - self._batch_began + batch_s)
        if before_s is None:
            return left_s
        trust = min(1.0, self.share / _TRUSTED)
        return trust * left_s + (1 - trust) * before_s

    @property
    def title(self) -> str:
        """The stage with its place in the chain: `2 of 6: screen`."""
        return f"{self.step} of {self.steps}: {self.stage}" if self.step else self.stage

    @property
    def work(self) -> str:
        """The work done: `1,203 of about 2,870 trials`; empty before any is known."""
        if not self.total or not self.unit:
            return ""
        about = "about " if self.unit == "trials" else ""
        return f"{count_text(self.done)} of {about}{count_text(self.total)} {self.unit}"

    def left_text(self, now: float) -> str:
        """`about 25 s left`; empty while it is not known."""
        left_s = self.left_s(now)
        return f"about {rough_duration_text(left_s)} left" if left_s is not None else ""

    def line(self, now: float) -> str:
        """All of it in one line, without a terminal: `2 of 6: screen, 42 %, ..., 18 s, about 25 s left; ...`."""
        share = percent_text(self.share) if self.share is not None else ""
        spent = f"{now - self.began:.0f} s"
        parts = [self.title, share, self.work, spent, self.left_text(now)]
        return ", ".join(part for part in parts if part) + (f"; {self.note}" if self.note else "")
