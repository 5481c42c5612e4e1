"""The progress of a run from its events: the stage, the work done, what runs now, and the time left.

Time is passed in by the caller, in seconds on any monotonic clock.
"""

from gemmpipe.core.events import Event
from gemmpipe.core.units import count_text, percent_text, rough_duration_text, rough_range_text

_MIN_GAIN, _MIN_FIRST = 0.01, 0.1
"""Of a stage's work, the part after the first result from which on the rate is known, and that of a first result which
is a rate by itself, with the time in which processes start."""
_MOST_SLOWER = 3.0  # times the rate so far, as which the work that is left is taken while a result is late
_LEAST, _LATE = 0.15, 0.5
"""Where the times of results are expected: the share of what was left at the last one, that is left at least; and that
of the time by which the next one is late."""
_ALL_DONE = 0.99
_UNSURE = 1.75  # the most over the least time left, from which on both are stated: no number is within 30 % of both
_ENDING_S = 0.5  # an estimate below it says nothing
_EXPECTED_PART = 0.5  # of a stage's work: its expected time counts like so much of it
_TRUSTED = 0.5  # of a stage's work or expected time, after which the estimate from before it no longer counts


class RemainingTime:
    """The time left in a stage, from the share of its work that is done at some moment.

    The rate counts from the first result on, before which processes start and libraries load. An expected time counts
    as a part of the work that is done at its rate.
    """

    def __init__(self, now: float, expected_s: float = 0.0) -> None:
        """`expected_s`: the seconds that all of the work is expected to take; 0: not known."""
        self._began, self._expected_s = now, expected_s
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None
        """(time, share) of the first and of the last progress."""
        self._stated_s: float | None = None
        """The seconds left at the last progress, as the stage states them."""

    def take(self, share: float, now: float, stated_s: float | None = None) -> None:
        """Take the share of the work that is done now, in [0, 1], and the seconds left if the stage states them."""
        if self._last is None and share <= 0:
            return
        self._first = self._first or (now, share)
        if self._last is None or share != self._last[1]:
            self._last, self._stated_s = (now, share), stated_s

    @property
    def total_s(self) -> float | None:
        """The seconds that all of the work takes, as the last result lets expect; None while too little is done."""
        expected_s = self._expected_s
        if self._first is None or self._last is None:
            return expected_s or None
        (first, before), (at, share) = self._first, self._last
        if self._stated_s is not None:
            return self._stated_s / (1 - share) if share < 1 else at - self._began
        if expected_s:
            return (_EXPECTED_PART * expected_s + at - first) / (_EXPECTED_PART + share - before)
        if self.has_rate:
            return (at - first) / (share - before) if share - before >= _MIN_GAIN else None
        return (at - self._began) / share if share >= _MIN_FIRST and at > self._began else None

    @property
    def has_rate(self) -> bool:
        """True after two results at different times."""
        return self._first is not None and self._last is not None and self._last[0] > self._first[0]

    def left_s(self, now: float) -> float | None:
        """The seconds left, counted down since the last result; None while too little is done to tell."""
        total_s = self.total_s
        if total_s is None:
            return None
        at, share = self._last or (self._began, 0.0)
        if share >= 1:
            return 0.0
        # A result that takes longer than all that was left shows that the rate is of shorter work.
        stage_s, since_s = (1 - share) * total_s, now - at
        is_expected = self._stated_s is not None or self._expected_s > 0
        late_s = max(_LEAST * stage_s, _LATE * (since_s - stage_s)) if is_expected else since_s
        return max(stage_s - since_s, min(late_s, _MOST_SLOWER * stage_s))


def _where_apart(least_s: float, most_s: float) -> tuple[float, float] | None:
    """Both ends of the time that is left, if no number is close to both."""
    return (max(0.0, least_s), most_s) if most_s > _UNSURE * max(least_s, _ENDING_S) else None


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
        self._is_expected = False
        """True if the stage has stated how long its work is expected to take."""
        self._budget_ends: float | None = None
        """When a budget ends the run; None where the work decides."""
        self._between: tuple[float, float] | None = None
        """The earliest and the latest end of a run with a budget, where the stage is not sure of it."""
        self._latest_end: float | None = None
        """When a budget ends the run if its work does not end before; None without a budget."""
        self._factor = 1.0
        """By which the time left of the stage may be shorter or longer."""
        self._budget_began: float | None = None
        """When the first stage within a budget began."""
        self._is_limited = False
        """True if a budget ends the run, as the last progress lets expect."""

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
            self._remaining = RemainingTime(now, self._expected_s(event.expected_s, now))
            self._is_expected = event.expected_s > 0
        elif event.kind == "progress":
            self.done, self.total = event.done, event.total or self.total
            self.note = event.text
            if self._budget_began is None and (event.left_s is not None or event.most_s is not None):
                self._budget_began = self.stage_began
            self._budget_ends = now + event.left_s if event.left_s is not None else None
            least_s, most_s = event.left_range_s or (0.0, 0.0)
            self._between = (now + least_s, now + most_s) if event.left_range_s is not None else None
            self._latest_end = now + event.most_s if event.most_s is not None else self._latest_end
            self.share = event.share if event.share is not None else self.done / self.total if self.total else None
            if self._remaining is not None and self.share is not None:
                self._remaining.take(self.share, now, event.stage_s)
                self._factor = event.stage_factor
                self._is_limited = self._ends_by_budget(now)
                self.of_run = max(self.of_run or 0.0, self._of_run_now(now))
        elif event.kind == "stopping":
            self.stopping = True

    def _begin(self, stage: str, now: float) -> None:
        left_s = self.left_s(now)
        self._expected_end = now + left_s if left_s is not None else None
        self._of_run_before = self.of_run or 0.0
        self.stage, self.stage_began = stage, now
        self.done, self.total, self.unit, self.share, self.note = 0, 0, "", None, ""
        self._remaining, self._budget_ends, self._between, self._factor = None, None, None, 1.0
        self._is_expected = False

    def left_s(self, now: float) -> float | None:
        """The seconds until the end of the run; None while they are not known, or after the end of a budget."""
        if self.stopping:
            return None
        ends = self._budget_ends
        if ends is None:
            work_s = self._work_s(now)
            if work_s is None or self._latest_end is None or work_s <= self._latest_end - now:
                return work_s
            ends = self._latest_end
        return ends - now if ends > now else None  # what has begun before the end of a budget is finished

    def range_s(self, now: float) -> tuple[float, float] | None:
        """The least and the most seconds until the end of the run; None while `left_s` is sure, or None itself."""
        left_s = self.left_s(now)
        stage_s = self._remaining.left_s(now) if self._remaining is not None else None
        if self._between is not None and left_s is not None:
            return _where_apart(self._between[0] - now, self._between[1] - now)
        if left_s is None or stage_s is None or self._budget_ends is not None:
            return None
        stage_s = min(stage_s, left_s) * (1 + self._later)
        return _where_apart(left_s - (1 - 1 / self._factor) * stage_s, left_s + (self._factor - 1) * stage_s)

    def _ends_by_budget(self, now: float) -> bool:
        if self._budget_ends is not None or self._latest_end is None:
            return self._budget_ends is not None
        return (self._work_s(now) or 0.0) > self._latest_end - now

    def _work_s(self, now: float) -> float | None:
        """The seconds until all of the work is done; None while they are not known."""
        remaining = self._remaining
        stage_s = remaining.left_s(now) if remaining is not None else None
        before_s = max(0.0, self._expected_end - now) if self._expected_end is not None else None
        if remaining is None or stage_s is None:
            return before_s
        left_s = self._with_later_s(stage_s, now)
        if not before_s or self._is_expected:  # none, or the time is over
            return left_s
        if self.share is None:
            return before_s
        trust = min(1.0, self.share / _TRUSTED)
        return trust * left_s + (1 - trust) * before_s

    def _expected_s(self, stated_s: float, now: float) -> float:
        """The seconds that a stage is expected to take: the mean of what it states and of what was expected before."""
        before_s = self._expected_end - now if self._expected_end is not None else 0.0
        if not stated_s or before_s <= 0 or self._is_limited:  # by a budget, which tells nothing of the work
            return stated_s
        return stated_s * (1 + before_s / self._with_later_s(stated_s, now)) / 2

    def _with_later_s(self, stage_s: float, now: float) -> float:
        """The seconds left of a stage, with those of the stages after it and of later batches, each as long as this."""
        batch_s = stage_s + self._step_rest_s + self._rest_s
        return batch_s + self._later * (now - self._batch_began + batch_s)

    def _of_run_now(self, now: float) -> float:
        """The share of the run that is done: the stage adds its part of what was left when it began.

        From the work done, not from the time left alone, which runs out between two results and grows again.
        """
        if self._is_limited:
            spent_s, left_s = now - (self._budget_began or self.began), self.left_s(now) or 0.0
            return spent_s / (spent_s + left_s) if left_s > 0 else 1.0
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
        left_s, latest = self.left_s(now), self._latest_end
        if self.stopping:
            return ""
        if left_s is None and self._is_limited:
            return "budget spent, finishing"
        if left_s is None:
            return f"at most {rough_duration_text(latest - now)} left" if latest is not None and latest > now else ""
        if left_s < _ENDING_S:
            return "finishing" if (self.of_run or 0.0) >= _ALL_DONE else ""
        between = self.range_s(now)
        return f"{rough_range_text(*between) if between else f'about {rough_duration_text(left_s)}'} left"

    @property
    def share_text(self) -> str:
        """The share of the run that is done: `42 %`, or `42 % of the budget`, which ends the run before its work."""
        if self.of_run is None:
            return ""
        return percent_text(self.of_run) + (" of the budget" if self._is_limited else "")

    def line(self, now: float) -> str:
        """All of it in one line, without a terminal: `2 of 6: screen, 42 %, ..., 18 s, about 25 s left; ...`."""
        spent = f"{now - self.began:.0f} s"
        parts = [self.title, self.share_text, self.work, spent, self.left_text(now)]
        return ", ".join(part for part in parts if part) + (f"; {self.note}" if self.note else "")
