"""The time budget of a run on a CPU: the order of problems, and the decision which are left for the next run.

A call on a CPU takes up to seconds, and all problems of a model take minutes. A run makes passes of screening and
finals over the problems, in order, until the budget is spent.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemmpipe.core.data import Problem
from gemmpipe.core.events import counted
from gemmpipe.family import Family

_SCREEN_SHARE = 0.4  # of a pass: the finals check and repeat each candidate, and take longer
_LEAST_SHARE = 0.15  # of the budget: with less time left, no further pass begins
_SURE_SHARE = 0.6  # of the budget: with less left and no result, more than one pass is needed
_SEARCH_SHARE = 0.5  # of the time for the finals, which the last search of a screening may use
_FINALS_TRIALS = 8  # launches that take as long as the finals of one finalist: the reference, its check, samples
SHORT_S = 1.0  # shorter searches are not cut short, nor are shorter finals of the first problem
_JOB_S = 1.0  # of trials that a worker gets at once
_LATE_SHARE = 0.025  # of the budget, by which a run ends after it: what has begun is finished (0.02 to 0.07, 2026-11)
_AT_THE_END = 0.8  # of runs with another pass: those that end with the budget, not with a pass before
_LEAST_SCREENED = 0.1  # of a screening, from whose finals those of all its problems are estimated
_LEAST_PASS_S = 0.1
_EXPECTED_S = 3.0  # the expected time of finals counts like so many seconds of them
if TYPE_CHECKING:
    from gemmpipe.stages.screen.state import Bounds


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run with a budget, in seconds from now."""

    left_s: float
    range_s: tuple[float, float] | None = None
    """The least and the most seconds; None: they are not known."""


@dataclass(kw_only=True, eq=False)
class CpuBudget:
    """The budget of one session of a run, from its first stage on a device, as soon as a worker is ready."""

    limit_s: float
    began: float = field(default_factory=time.monotonic)
    ready_at: Callable[[], float | None] | None = None
    """When the first worker was ready, on the monotonic clock; None before that. Without it `began` counts."""
    left: set[str] = field(default_factory=set)
    """Ids of the problems that a stage of this pass left out because its time was over."""
    passes: int = 0
    """Passes that have begun."""
    _screening_began: float = 0.0
    """Of the latest screening, on the monotonic clock."""
    _screening_s: float = 0.0
    kept_share: float = 0.0
    """The share of the time for finals that is kept for a stage after them."""
    _finals_end: float = math.inf
    pace_s: float = math.inf
    """The best pace of this run's screening: seconds of a launch over the relative work of its problem."""
    _finals_expected_s: float = 0.0
    _finals_spent_s: float = 0.0
    """Of the finals of all passes that are done."""
    bounds: "Bounds | None" = None
    """The times of all passes: screening excludes candidates by their times at fewer rows."""

    @property
    def begins_at(self) -> float:
        """When its time begins, on the monotonic clock: on a busy machine a worker starts for half a minute."""
        if self.ready_at is None:
            return self.began
        ready = self.ready_at()
        if ready is None:
            return max(self.began, time.monotonic())
        self.began, self.ready_at = max(self.began, ready), None
        return self.began

    @property
    def remaining_s(self) -> float:
        """Seconds until the end of the budget; negative after it."""
        return self.ends_at - time.monotonic()

    @property
    def ends_at(self) -> float:
        """The end of the finals, on the monotonic clock."""
        return self.begins_at + self.limit_s

    def begin_finals(self) -> None:
        """Set the end of the finals that begin now; it leaves time for the stages after them."""
        self._finals_end = time.monotonic() + (1 - self.kept_share) * max(0.0, self.remaining_s)

    @property
    def finals_left_s(self) -> float:
        """Seconds until the latest finals must end; negative after it."""
        return min(self._finals_end, self.ends_at) - time.monotonic()

    def begin_screening(self) -> None:
        """Set the end of the screening that begins now; it leaves time for the finals."""
        self._screening_began = time.monotonic()
        self._screening_s = _SCREEN_SHARE * max(0.0, self.remaining_s)

    @property
    def screening_ends_at(self) -> float:
        """The end of the latest screening, on the monotonic clock."""
        return max(self._screening_began, self.begins_at) + self._screening_s

    def screened_share(self, left_s: float) -> float:
        """The share of the latest screening that is done, of which so much time is left; at least a tenth."""
        if self._screening_s <= 0:  # the budget is spent: the first problem alone is screened
            return 1.0
        return min(1.0, max(_LEAST_SCREENED, 1 - left_s / self._screening_s))

    @property
    def ends_without_result(self) -> bool:
        """True if so much of the budget is spent that a run which still has no result takes all of it."""
        return self.remaining_s < _SURE_SHARE * self.limit_s

    def cuts_search(self, trial_s: float, trials_left: int) -> bool:
        """True if a search with a result must end now: its next trial would take time that finals need.

        `trial_s` is the time of one of its trials. A search with less than a second of work left is not ended.
        """
        if trial_s * trials_left <= SHORT_S:
            return False
        latest = self.screening_ends_at + _SEARCH_SHARE * max(0.0, self.ends_at - self.screening_ends_at)
        return time.monotonic() + trial_s > min(latest, self.ends_at - _FINALS_TRIALS * trial_s)

    def has_time_for(self, trial_s: float) -> bool:
        """True if one candidate of a problem with trials of this length can be screened and timed in the finals."""
        return (1 + _FINALS_TRIALS) * trial_s <= self.remaining_s

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return self.limit_s - self.remaining_s

    @property
    def end_s(self) -> float:
        """Seconds until the end of the budget, as events state it; 0 after it."""
        return max(0.0, self.remaining_s)

    def take_finals(self, expected_s: float, spent_s: float) -> None:
        """Take the time of finals that are done."""
        self._finals_expected_s += expected_s
        self._finals_spent_s += spent_s

    @property
    def finals_pace(self) -> float:
        """The time of finals over the expected one, of those that are done; other processes make it longer."""
        return (_EXPECTED_S + self._finals_spent_s) / (_EXPECTED_S + self._finals_expected_s)

    @property
    def usually_late_s(self) -> float:
        """Seconds by which a run that uses all of its budget usually ends later."""
        return _LATE_SHARE * self.limit_s

    def run_end(self, pass_s: float, factor: float, later_s: float = math.inf) -> RunEnd:
        """The end of a run with problems left, whose pass is expected to end in `pass_s`, by `factor` more or less.

        `later_s`: of the passes after it. If the pass ends early enough, another one begins, and the run ends with the
        budget, or with a pass that leaves no time for another. The number is a mean of the earliest and the latest end,
        as close to each as it is probable.
        """
        pass_s = max(_LEAST_PASS_S, pass_s)
        most_s = max(pass_s, min(self.end_s + self.usually_late_s, pass_s + later_s))
        last_s = self.end_s - _LEAST_SHARE * self.limit_s  # a pass that ends later is the last one
        if most_s < last_s:
            return RunEnd(left_s=most_s)
        another = math.log(factor * last_s / pass_s) / (2 * math.log(factor)) if last_s > 0 else 0.0
        another = min(max(0.0, another), 1.0)
        late_s = most_s + self.usually_late_s
        # After this pass, another one takes at least the time for its screening.
        least_s = max(pass_s / factor, last_s, _SCREEN_SHARE * most_s if another == 1 else 0.0)
        ends_s, at_the_end = max(pass_s, last_s, least_s), _AT_THE_END * another
        return RunEnd(
            left_s=1 / ((1 - at_the_end) / ends_s + at_the_end / most_s),
            range_s=(least_s, late_s if another else min(factor * pass_s, late_s)),
        )

    @property
    def ends_run(self) -> bool:
        """True if the run continues until the budget is spent: a problem is left, with time for another pass."""
        return bool(self.left) and self.allows_pass

    @property
    def allows_pass(self) -> bool:
        """True if another pass can begin."""
        return self.remaining_s > _LEAST_SHARE * self.limit_s


def trials_at_once(trial_s: float | None) -> int:
    """The number of trials in a worker's job, which always runs to its end; 1 while the time of a trial is unknown."""
    return 1 if trial_s is None else max(1, int(_JOB_S / max(trial_s, 1e-6)))


def tuning_order(problems: Iterable[Problem], family: Family, tuned: Container[str] = ()) -> list[Problem]:
    """The problems by ascending rows; of equal rows, by descending calls times operations.

    Problems in `tuned` (ids) come last: they have a choice already, for example one that a budget cut short.

    Few rows first, because they gain most per second of tuning: the time of a problem, and with it the cost of tuning,
    grows with M, while the advantage of the best candidate falls (on a CPU a decoding step multiplies few rows, and
    spends its time on reading and converting weights). In addition, times at few rows are lower bounds of times at many
    (`Bounds`), which excludes slow candidates without a launch. Rows before products, because a program calls all
    products with the same number of rows: a run that ends early has tuned all products of some M.
    """
    return sorted(problems, key=lambda p: (p.id in tuned, p.rows, -p.weight * family.flops(family.spec(p)), p.id))


def left_line(total: int, left: Sequence[Problem], limit_s: float, *, tunes: bool = True) -> str:
    """The line about problems that a run has left; the command that continues has a line of its own.

    `tunes`: False for a check of a table's rows.
    """
    fewest, most = min(p.rows for p in left), max(p.rows for p in left)
    rows = f"M {fewest:,}" if fewest == most else f"M {fewest:,} to {most:,}"
    return (
        f"{total - len(left)} of {counted(total, 'problem')} {'tuned' if tunes else 'timed'} in "
        f"cpu_budget_s={limit_s:g} (null: no limit), small M first; left: {len(left)} with {rows}"
    )
