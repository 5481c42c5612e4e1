"""The default search: a Gaussian process over knobs, their meaning and problems (Rasmussen and Williams, 2006)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gemmpipe.errors import at_least
from gemmpipe.search.evidence import Evidence
from gemmpipe.search.features import Array, Sight
from gemmpipe.search.guided import Guided

if TYPE_CHECKING:
    import torch

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
    patience: float
    """Of log time: who is hoped to be slower than the best by more is not timed; a search may end before its share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, patience=self.patience)

    def order(self, evidence: Evidence, pool: Sight, columns: int) -> Array:
        if not len(evidence.y):
            return pool.estimate
        mean, deviation = predict(evidence, pool, columns)
        order: Array = mean - self.boldness * deviation
        return order

    def hopeless(self, order: Array, best_us: float) -> npt.NDArray[np.bool_]:
        """Who is slower even so."""
        return order > math.log(best_us) + self.patience


def predict(evidence: Evidence, pool: Sight, columns: int) -> tuple[Array, Array]:
    """(mean, standard deviation) of log(us) of each row of the pool, which belongs to owner 0."""
    import torch

    nearness = np.exp(-evidence.far / _FAR)
    owner, centre = evidence.owner, float(pool.estimate.mean())
    rest = evidence.y - _SLOPE * evidence.estimate
    level = float(rest.mean())
    bends, pool_bends = _BENT * (evidence.estimate - centre), _BENT * (pool.estimate - centre)
    near = nearness[np.ix_(owner, owner)]
    same = owner[:, None] == owner[None]
    to_near = nearness[0, owner]
    with _one_thread():
        x, candidates = _single(evidence.x), _single(pool.wide(columns))
        between = (_SPREAD**2 * _matern(x, x).double().numpy() + np.outer(bends, bends)) * near
        between += _OWN**2 * 0.5 * (same + near) + (_NOISE**2 + 1e-6) * np.eye(len(rest))
        to_pool = (_SPREAD**2 * _matern(candidates, x).double().numpy() + np.outer(pool_bends, bends)) * to_near
        to_pool += _OWN**2 * 0.5 * ((owner == 0) + to_near)
        root = torch.linalg.cholesky(torch.from_numpy(between))
        # Both sides of K_pool^T K^-1 K_pool are the same half solve, and the mean needs no more than that.
        wanted = torch.from_numpy(np.column_stack([to_pool.T, rest - level]))
        halves = torch.linalg.solve_triangular(root, wanted, upper=False).numpy()
    weights, told = halves[:, :-1], halves[:, -1]
    mean = told @ weights + level + _SLOPE * pool.estimate
    variance = _SPREAD**2 + pool_bends**2 + _OWN**2 - (weights**2).sum(axis=0)
    return mean, np.sqrt(np.maximum(variance, 1e-8))


@contextmanager
def _one_thread() -> Iterator[None]:
    """The other cores compile: threads that wait for each other here would take them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _single(rows: Array) -> "torch.Tensor":
    import torch

    return torch.from_numpy(rows).float()


def _matern(a: "torch.Tensor", b: "torch.Tensor") -> "torch.Tensor":
    """Matern 5/2 of rows that are divided by their lengths."""
    import torch

    far = torch.cdist(a, b) * math.sqrt(5)
    return ((far / 3 + 1) * far + 1) * torch.exp(-far)
