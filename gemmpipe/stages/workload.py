"""The share of each product in a workload's time before tuning, and the time that tuning saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.core.data import Problem
from gemmpipe.family import Family
from gemmpipe.family.roofline import Roofline

if TYPE_CHECKING:
    import pandas as pd

_MIN_US = 5.0
"""The time of the smallest kernels of an H200: other devices hardly change the shares."""


def estimate_us(family: Family, problem: Problem, roofline: Roofline) -> float:
    """The time of one call in us by the roofline: bytes or operations at the peak rate, whichever takes longer."""
    return max(_MIN_US, roofline.bound_us(family, family.spec(problem)))


def covering_problems(
    problems: Sequence[Problem],
    family: Family,
    recorded_us: Mapping[str, float],
    cover_pct: float,
    roofline: Roofline,
) -> tuple[list[Problem], float]:
    """Returns the fewest problems that make up `cover_pct` of all calls' time, in their order, and their share in %.

    Times are the recorded ones where the source has them for every problem, else weight times estimate.
    """
    known = all(problem.id in recorded_us for problem in problems)
    times = {p.id: recorded_us[p.id] if known else p.weight * estimate_us(family, p, roofline) for p in problems}
    total = sum(times.values())
    kept: set[str] = set()
    sum_us = 0.0
    for name, time_us in sorted(times.items(), key=lambda item: (-item[1], item[0])):
        if sum_us >= total * cover_pct / 100 * (1 - 1e-12):
            break
        kept.add(name)
        sum_us += time_us
    return [problem for problem in problems if problem.id in kept], 100 * sum_us / total if total else 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """The time of a workload's calls before and after tuning, over the problems that have both."""

    before_us: float
    after_us: float
    problems: int

    @property
    def pct(self) -> float:
        """The saved share of the time before, in %."""
        return 100 * (1 - self.after_us / self.before_us)


def saving(selections: "pd.DataFrame") -> Saving | None:
    """Sums calls times time; before tuning: of the incumbent, else of the fastest library path. None without either.

    Both times are of the same run, so that the machine's state cancels out; rows read from tables have no such times.
    """
    if "incumbent_us" not in selections:
        return None
    own = selections[selections["format"] == ""]
    before = own["incumbent_us"].astype(float).fillna(own["baseline_us"].astype(float))
    timed = before.notna() & own["us"].notna()
    weight = own["weight"].astype(float)[timed]
    if not timed.any():
        return None
    return Saving(
        before_us=float((weight * before[timed]).sum()),
        after_us=float((weight * own["us"].astype(float)[timed]).sum()),
        problems=int(timed.sum()),
    )
