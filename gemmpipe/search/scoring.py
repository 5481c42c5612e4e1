"""Kernel Tuner's score of a search: 0 is random search, 1 the optimum at once (Willemsen et al., FGCS 2024)."""

from collections.abc import Sequence

import numpy as np

from gemmpipe.search.features import Array

_CUTOFF = 0.95  # of the way from the median to the optimum: when random search is there, time is up
_POINTS = 50


def random_best(times: Sequence[float]) -> Array:
    """Expected least of n candidates drawn without replacement, for n = 1 ... all of them."""
    ordered = np.sort(np.asarray(times, dtype=np.float64))
    count = len(ordered)
    steps = np.diff(ordered)
    behind = np.arange(count - 1, 0, -1, dtype=np.float64)  # candidates slower than each but the last
    beyond = np.ones(count - 1)  # the chance that all drawn are slower than it
    expected = np.empty(count)
    for drawn in range(count):
        beyond = beyond * np.maximum(behind - drawn, 0) / (count - drawn)
        expected[drawn] = ordered[0] + float(beyond @ steps)
    return expected


def score(
    times: Sequence[float], seconds_each: float, curves: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> float:
    """The mean over time of (random's best - found) / (random's best - optimum); can be below 0.

    `times` of every valid candidate; a random candidate costs `seconds_each`; each curve is (moments in seconds, time
    of what seemed best then), one a seed. Time runs to where random search is at 95 % of its way.
    """
    expected = random_best(times)
    optimum, middle = min(times), float(np.median(times))
    enough = np.flatnonzero(expected <= middle - _CUTOFF * (middle - optimum))
    end_s = (int(enough[0]) + 1 if len(enough) else len(expected)) * seconds_each
    total = 0.0
    for moment in np.linspace(end_s / _POINTS, end_s, _POINTS):
        drawn = min(len(expected), max(1, int(moment / seconds_each)))
        found = float(np.mean([_at(curve, moment, middle) for curve in curves]))
        gap = float(expected[drawn - 1]) - optimum
        total += (float(expected[drawn - 1]) - found) / gap if gap > 0 else float(found <= optimum)
    return total / _POINTS


def _at(curve: tuple[Sequence[float], Sequence[float]], moment: float, before: float) -> float:
    """What seemed best at a moment; before the first answer, a candidate like any other."""
    place = int(np.searchsorted(curve[0], moment, side="right"))
    return curve[1][place - 1] if place else before
