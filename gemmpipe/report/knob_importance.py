"""How much each knob decides about a candidate's time, by a random forest over the timed candidates of a run.

The forest is written here: importing scikit-learn alone takes longer than the whole report.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemmpipe.core.data import Candidate
from gemmpipe.report.trial_frame import ProblemTrials, knob_items, value_order

Array = npt.NDArray[np.float64]
_TREES = 20
_MAX_ROWS = 1_500
_MIN_ROWS = 60
"""A forest of fewer candidates is not used."""
_MIN_LEAF = 6
_MAX_DEPTH = 12
_MIN_EXPLAINED = 0.2
"""A forest that explains a smaller share of unseen times is not used."""


@dataclass(frozen=True, kw_only=True)
class Importances:
    """The importance of the knobs of a run, from a forest."""

    share: Mapping[str, float]
    """By knob, of 1 for all: how much the forest errs more if the knob's values are exchanged among candidates."""
    explained: float
    """The share of the variance of log(time / best of the problem) that it predicts for candidates it has not seen."""
    candidates: int


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """Nodes in arrays: the feature (-1: a leaf) and threshold of a split, the two children, the mean of a leaf."""

    feature: npt.NDArray[np.intp]
    threshold: Array
    left: npt.NDArray[np.intp]
    right: npt.NDArray[np.intp]
    value: Array

    def predict(self, x: Array) -> Array:
        """The mean of the leaf of each row, x [rows, features]."""
        node = np.zeros(len(x), dtype=np.intp)
        rows = np.arange(len(x))
        for _ in range(_MAX_DEPTH):
            feature = self.feature[node]
            below = x[rows, np.maximum(feature, 0)] <= self.threshold[node]
            node = np.where(feature < 0, node, np.where(below, self.left[node], self.right[node]))
        return self.value[node]


def forest_importances(parts: Iterable[ProblemTrials]) -> Importances | None:
    """The importance of each knob; None with too few candidates, or where the forest predicts nothing.

    Half of the candidates train each tree, the others give its error.
    """
    knobs, x, y = _table(parts)
    if len(y) < _MIN_ROWS or not knobs or float(np.ptp(y)) == 0.0:
        return None
    random = np.random.default_rng(0)
    if len(y) > _MAX_ROWS:
        kept = random.choice(len(y), _MAX_ROWS, replace=False)
        x, y = x[kept], y[kept]
    error, variance = 0.0, 0.0
    more = np.zeros(len(knobs))
    for _ in range(_TREES):
        order = random.permutation(len(y))
        train, test = order[: len(y) // 2], order[len(y) // 2 :]
        tree = _grow(x[train], y[train], random)
        own = float(np.mean((tree.predict(x[test]) - y[test]) ** 2))
        error, variance = error + own, variance + float(np.var(y[test]))
        for index in range(len(knobs)):
            exchanged = x[test].copy()
            exchanged[:, index] = random.permutation(exchanged[:, index])
            more[index] += float(np.mean((tree.predict(exchanged) - y[test]) ** 2)) - own
    explained = 1 - error / variance
    more = np.maximum(more, 0.0)
    if explained < _MIN_EXPLAINED or not more.sum():
        return None
    share = {name: float(value) for name, value in zip(knobs, more / more.sum(), strict=True)}
    return Importances(share=share, explained=explained, candidates=len(y))


def _table(parts: Iterable[ProblemTrials]) -> tuple[list[str], Array, Array]:
    """(knobs, features [candidates, knobs and sizes], log of time over the problem's best [candidates])."""
    rows: list[tuple[dict[str, str], dict[str, float]]] = []
    slowdowns: list[float] = []
    for part in parts:
        times: Mapping[Candidate, float] = part.times_us()
        best = min(times.values())
        sizes = {name: math.log2(int(size)) for name, size in re.findall(r"\b(\w+)=([1-9]\d{0,8})\b", part.problem)}
        for candidate, us in times.items():
            rows.append((dict(knob_items(candidate)), sizes))
            slowdowns.append(math.log(us / best))
    knobs = list(dict.fromkeys(name for values, _ in rows for name in values))
    knobs = [name for name in knobs if len({values.get(name) for values, _ in rows}) > 1]
    codes = {name: _codes({values[name] for values, _ in rows if name in values}) for name in knobs}
    names = list(dict.fromkeys(name for _, sizes in rows for name in sizes))
    table = [
        [*(codes[k][v[k]] if k in v else -1.0 for k in knobs), *(sizes.get(name, -1.0) for name in names)]
        for v, sizes in rows
    ]
    return knobs, np.array(table, dtype=np.float64), np.array(slowdowns, dtype=np.float64)


def _codes(values: set[str]) -> dict[str, float]:
    """A number for each value, in the order of the numbers, or of the texts."""
    return {value: float(code) for code, value in enumerate(sorted(values, key=value_order))}


def _grow(x: Array, y: Array, random: np.random.Generator) -> _Tree:
    """A tree of random thresholds: at each node the best of one threshold per feature (Geurts et al., 2006)."""
    nodes: list[tuple[int, float, int, int, float]] = []

    def add(rows: npt.NDArray[np.intp], depth: int) -> int:
        """Append the node of these rows and those below it; its index."""
        place = len(nodes)
        nodes.append((-1, 0.0, place, place, float(y[rows].mean())))
        split = _split(x[rows], y[rows], random) if len(rows) >= 2 * _MIN_LEAF and depth < _MAX_DEPTH else None
        if split is not None:
            feature, threshold = split
            below = x[rows, feature] <= threshold
            left, right = add(rows[below], depth + 1), add(rows[~below], depth + 1)
            nodes[place] = (feature, threshold, left, right, 0.0)
        return place

    add(np.arange(len(y)), 0)
    feature, threshold, left, right, value = (np.array(column) for column in zip(*nodes, strict=True))
    return _Tree(feature=feature, threshold=threshold, left=left, right=right, value=value)


def _split(x: Array, y: Array, random: np.random.Generator) -> tuple[int, float] | None:
    """(feature, threshold) with the least squared error among a random threshold per feature; None without one."""
    low, high = x.min(axis=0), x.max(axis=0)
    thresholds = low + (high - low) * random.random(x.shape[1])
    below = x <= thresholds
    count = below.sum(axis=0)
    total, part = y.sum(), y @ below
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = part**2 / count + (total - part) ** 2 / (len(y) - count)
    gain[(count < _MIN_LEAF) | (len(y) - count < _MIN_LEAF)] = -math.inf
    best = int(np.argmax(gain))
    return (best, float(thresholds[best])) if gain[best] > -math.inf else None


def ranked(names: Sequence[str], found: Importances | None) -> list[str]:
    """The names by importance, largest first; in the given order without a forest."""
    return sorted(names, key=lambda name: -found.share.get(name, 0.0)) if found else list(names)
