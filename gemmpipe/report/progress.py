"""The progress of a run from its events: the stage, the work done, what runs now, and the time left.

Time is passed in by the caller, in seconds on any monotonic clock.
"""

from gemmpipe.core.events import Event
from gemmpipe.core.units import count_text, percent_text, rough_duration_text

_MIN_GAIN = 0.02  # of a stage's work that must be done before its rate is known
_MOST_SLOWER = 3.0  # times the rate so far, as which the work that is left is taken while a result is late
_ALL_DONE = 0.99
_ENDING_S = 0.5  # an estimate below it says nothing
_TRUSTED = 0.5  # of a stage's work or expected time, after which the estimate from before it no longer counts


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

    @property
    def total_s(self) -> float | None:
        """The seconds that all of the work takes, as the last result lets expect; None while too little is done."""
        if self._last is None:
            return None
        at, share = self._last
        return (at - self._start) / share if share >= _MIN_GAIN and at > self._start else None

    def left_s(self, now: float) -> float | None:
        """The seconds left, counted down since the last result; None while too little is done to tell."""
        total_s = self.total_s
        if self._last is None or total_s is None:
            return None
        at, share = self._last
        if share >= 1:
            return 0.0
        # A result that takes longer than all that was left shows that the rate is of shorter work.
        return max((1 - share) * total_s - (now - at), min(now - at, (1 - share) * _MOST_SLOWER * total_s))


class RunProgress:
    """The state of a run, as its events tell it."""

    def __init__(self, now: float) -> None:
        self.step, self.steps, self.number = 0, 0, 1
        """The number of the stage in the chain, the length of the chain, and the number of the pass over its stages."""
        self.stage = ""
        self.note = ""
        """What runs now."""
        self.done, self.total, self.unit = 0, 0, ""
        self.share: float | None = None
        """Of the stage's work, by time; None before any is known."""
        self.of_run: float | None = None
        """The share of the run that is done, by time, for a bar: it never falls, in later stages and passes too.

        None before any work is known.
        """
        self._of_run_before = 0.0
        """Its value when the stage began."""
        self.stopping = False
        self.began = self.stage_began = now
        self._rest_s = self._step_rest_s = self._later = 0.0
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
            self.number, self._step_rest_s = event.number, 0.0
        elif event.kind == "rest":
            self._step_rest_s = event.rest_s
        elif event.kind == "stage":
            self._begin(event.text, now)
            self.total, self.unit, self._step_rest_s = event.total, event.unit, event.rest_s
            self._remaining = RemainingTime(now)
            if event.expected_s and self._expected_end is None:
                self._expected_end = now + self._with_later_s(event.expected_s, now)
        elif event.kind == "progress":
            self.done, self.total = event.done, event.total or self.total
            self.note = event.text
            self._budget_ends = now + event.left_s if event.left_s is not None else None
            self.share = event.share if event.share is not None else self.done / self.total if self.total else None
            if self._remaining is not None and self.share is not None:
                self._remaining.take(self.share, now)
                self.of_run = max(self.of_run or 0.0, self._of_run_now(now))
        elif event.kind == "stopping":
            self.stopping = True

    def _begin(self, stage: str, now: float) -> None:
        left_s = self.left_s(now)
        self._expected_end = now + left_s if left_s is not None else None
        self._of_run_before = self.of_run or 0.0
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
        left_s = self._with_later_s(stage_s, now)
        if not before_s:  # none, or the time is over
            return left_s
        trust = min(1.0, self.share / _TRUSTED)
        return trust * left_s + (1 - trust) * before_s

    def _with_later_s(self, stage_s: float, now: float) -> float:
        """The seconds left of a stage, with those of the stages after it and of later batches, each as long as this."""
        batch_s = stage_s + self._step_rest_s + self._rest_s
        return batch_s + self._later * (now - self._batch_began + batch_s)

    def _of_run_now(self, now: float) -> float:
        """The share of the run that is done: the stage adds its part of what was left when it began.

        From the work done, not from the time left alone, which runs out between two results and grows again.
        """
        if self._budget_ends is not None:
            spent_s = now - self.began
            return spent_s / (spent_s + self._budget_ends - now) if self._budget_ends > now else 1.0
        stage_s = self._remaining.total_s if self._remaining is not None else None
        if stage_s is None or self.share is None:
            return 0.0
        batch_s = stage_s + self._step_rest_s + self._rest_s
        # As in `left_s`: later batches take as long as this one, from its first stage on.
        run_s = batch_s + self._later * (self.stage_began - self._batch_began + batch_s)
        return self._of_run_before + (1 - self._of_run_before) * stage_s / run_s * min(1.0, self.share)

    @property
    def title(self) -> str:
        """The stage with its place in the chain: `2 of 6: screen`; after the first pass `2 of 6: screen, pass 2`."""
        again = f", pass {self.number}" if self.number > 1 else ""
        return f"{self.step} of {self.steps}: {self.stage}{again}" if self.step else self.stage

    @property
    def work(self) -> str:
        """The work done: `1,203 of about 2,870 trials`; empty before any is known."""
        if not self.total or not self.unit:
            return ""
        about = "about " if self.unit == "trials" else ""
        unit = self.unit.removesuffix("s") if self.total == 1 else self.unit
        return f"{count_text(self.done)} of {about}{count_text(self.total)} {unit}"

    def left_text(self, now: float) -> str:
        """`about 25 s left`; empty while it is not known, or over before the work is; then that the run finishes."""
        left_s = self.left_s(now)
        if self._budget_ends is not None and left_s == 0:
            return "budget spent, finishing"
        if left_s is not None and left_s < _ENDING_S:
            return "finishing" if (self.of_run or 0.0) >= _ALL_DONE else ""
        return f"about {rough_duration_text(left_s)} left" if left_s is not None else ""

    @property
    def share_text(self) -> str:
        """The share of the run that is done: `42 %`, or `42 % of the budget`, which ends the run before its work."""
        if self.of_run is None:
            return ""
        return percent_text(self.of_run) + (" of the budget" if self._budget_ends is not None else "")

    def line(self, now: float) -> str:
        """All of it in one line, without a terminal: `2 of 6: screen, 42 %, ..., 18 s, about 25 s left; ...`."""
        spent = f"{now - self.began:.0f} s"
        parts = [self.title, self.share_text, self.work, spent, self.left_text(now)]
        return ", ".join(part for part in parts if part) + (f"; {self.note}" if self.note else "")
