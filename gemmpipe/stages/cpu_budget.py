"""The time budget of a run on a CPU: which problems are timed first, and which are left for the next run.

A call on a CPU takes up to seconds, so that all problems of a model take minutes. A run goes through them in passes of
screening and finals, problem by problem, until its time is over.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemmpipe.core.data import Problem
from gemmpipe.core.events import counted
from gemmpipe.family import Family

_SCREEN_SHARE = 0.4  # of a pass: the finals check and repeat what screening timed once, and take longer
_LEAST_SHARE = 0.15  # of the budget: with less time left, no further pass begins
_SURE_SHARE = 0.6  # of the budget: with less left and no result, more than one pass is needed
if TYPE_CHECKING:
    from gemmpipe.stages.screen.state import Bounds


@dataclass(kw_only=True, eq=False)
class CpuBudget:
    """The budget of one run, from its first stage on a device."""

    limit_s: float
    began: float = field(default_factory=time.monotonic)
    left: set[str] = field(default_factory=set)
    """Ids of the problems that a stage of this pass has left out, because its time was over."""
    passes: int = 0
    """Passes that have begun."""
    _first_result: float = 0.0
    _screening_ends: float = 0.0
    """Of the screening that began last: when it had no result yet, and its end, on the monotonic clock."""
    bounds: "Bounds | None" = None
    """The times of all passes, from which screening knows candidates that are too slow for more rows."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the end of the budget; negative after it."""
        return self.began + self.limit_s - time.monotonic()

    @property
    def ends_at(self) -> float:
        """The end of the finals, on the monotonic clock."""
        return self.began + self.limit_s

    def screening_ends_at(self) -> float:
        """The end of a screening that begins now, on the monotonic clock: time for the finals is kept."""
        self._first_result = time.monotonic()
        self._screening_ends = self._first_result + _SCREEN_SHARE * max(0.0, self.remaining_s)
        return self._screening_ends

    def cuts_screening(self, share: float) -> bool:
        """True if the screening that began last will end before its work, of which this share is done.

        Its rate counts from the last call without a result: before that, workers start.
        """
        now = time.monotonic()
        if share > 0:
            return self._first_result + (now - self._first_result) / share > self._screening_ends
        self._first_result = now
        return self.remaining_s < _SURE_SHARE * self.limit_s

    @property
    def ends_run(self) -> bool:
        """True if the run goes on until the budget is spent: a problem is left, and there is time for another pass."""
        return bool(self.left) and self.allows_pass

    @property
    def allows_pass(self) -> bool:
        """True if another pass can begin."""
        return self.remaining_s > _LEAST_SHARE * self.limit_s


def in_order_of_use(problems: Iterable[Problem], family: Family) -> list[Problem]:
    """Fewest rows first; with equal rows, the product with the most calls times operations first.

    Few rows first, because a run is worth most when it ends early: the time of a problem, and so the cost of tuning it,
    grows with M, while the ratio of the best candidate to the others falls (on a CPU a decoding step multiplies few
    rows, and spends its time on reading and converting weights). Besides, the times of a product at few rows are lower
    bounds of those at many (`Bounds`), which excludes slow candidates without a launch. Rows before products, because
    a program calls all products with the same rows: each step of the list is useful as a whole.
    """
    return sorted(problems, key=lambda p: (p.rows, -p.weight * family.flops(family.spec(p)), p.id))


def left_line(total: int, left: Sequence[Problem], limit_s: float) -> str:
    """The line about problems that a run has left, and how to go on."""
    fewest, most = min(p.rows for p in left), max(p.rows for p in left)
    rows = f"M {fewest:,}" if fewest == most else f"M {fewest:,} to {most:,}"
    return (
        f"{total - len(left)} of {counted(total, 'problem')} tuned in cpu_budget_s={limit_s:g}, small M first; left: "
        f"{len(left)} with {rows}. The same command goes on, or gemmpipe resume=last; "
        "cpu_budget_s=null: no limit"
    )
