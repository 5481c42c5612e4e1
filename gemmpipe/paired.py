"""Comparing two candidates round by round, so that what slows the machine for a while slows both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gemmpipe.data import median


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRatio:
    """The median of a / b over common rounds, and the 95 % interval of that median."""

    median: float
    low: float
    high: float

    @property
    def noise_pct(self) -> float:
        """Half the width of the interval, in percent of the median."""
        return 50 * (self.high - self.low) / self.median

    @property
    def undecided(self) -> bool:
        """Whether the interval holds 1."""
        return self.low <= 1.0 <= self.high


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """Ratio of a to b over the rounds that both ran.

    The interval is that of the sign test (order statistics n/2 -+ 1.96 sqrt(n)/2; Hahn and Meeker, 1991): it assumes
    nothing about the noise. With fewer than six rounds it is the whole range.
    """
    ratios = sorted(x / y for x, y in zip(a, b, strict=False))
    n = len(ratios)
    below = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return PairedRatio(median=median(ratios), low=ratios[below], high=ratios[n - 1 - below])
