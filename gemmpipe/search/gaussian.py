"""The default search: a Gaussian process over knobs, their meaning and problems (Rasmussen and Williams, 2006)."""

import math
from dataclasses import dataclass

import numpy as np

from gemmpipe.search.evidence import Evidence
from gemmpipe.search.features import Array, Sight
from gemmpipe.search.guided import Guided

_SPREAD = 0.4  # of log time over candidates, once the analytic model is taken off
_OWN = 0.5  # how far a problem's level may be from its neighbours'
_NOISE = 0.015
_FAR = 2.5  # doublings over which what is known of a problem fades to 1 / e
_SLOPE = 0.7  # of log time over the analytic model's
_BENT = 0.15  # how far the slope may differ


@dataclass(frozen=True, kw_only=True)
class Gaussian(Guided):
    """Times next what has the least mean - `boldness` * deviation of log time, given all that is known."""

    boldness: float

    def order(self, evidence: Evidence, pool: Sight, columns: int) -> Array:
        if not len(evidence.y):
            return pool.estimate
        mean, deviation = predict(evidence, pool, columns)
        order: Array = mean - self.boldness * deviation
        return order


def predict(evidence: Evidence, pool: Sight, columns: int) -> tuple[Array, Array]:
    """(mean, standard deviation) of log(us) of each row of the pool, which belongs to owner 0."""
    nearness = np.exp(-evidence.far / _FAR)
    owner, centre = evidence.owner, float(pool.estimate.mean())
    rest = evidence.y - _SLOPE * evidence.estimate
    level = float(rest.mean())
    bends, pool_bends = _BENT * (evidence.estimate - centre), _BENT * (pool.estimate - centre)

    near = nearness[np.ix_(owner, owner)]
    same = owner[:, None] == owner[None]
    between = (_SPREAD**2 * _matern(evidence.x, evidence.x) + np.outer(bends, bends)) * near
    between += _OWN**2 * 0.5 * (same + near)
    between[np.diag_indices_from(between)] += _NOISE**2 + 1e-8
    to_pool = (_SPREAD**2 * _matern(pool.wide(columns), evidence.x) + np.outer(pool_bends, bends)) * nearness[0, owner]
    to_pool += _OWN**2 * 0.5 * ((owner == 0) + nearness[0, owner])

    inverse = np.linalg.inv(between)
    weights = to_pool @ inverse
    mean = weights @ (rest - level) + level + _SLOPE * pool.estimate
    variance = _SPREAD**2 + pool_bends**2 + _OWN**2 - (weights * to_pool).sum(axis=1)
    return mean, np.sqrt(np.maximum(variance, 1e-8))


def _matern(a: Array, b: Array) -> Array:
    """Matern 5/2 of rows that are divided by their lengths; single precision is enough and twice as fast."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    far = np.sqrt(np.maximum(squares, 0)) * np.float32(math.sqrt(5))
    kernel: Array = ((far * np.float32(1 / 3) + 1) * far + 1) * np.exp(-far)
    return kernel
