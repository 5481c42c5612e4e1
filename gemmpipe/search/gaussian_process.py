"""The default search: a Gaussian process over knobs, their meaning and problems (Rasmussen and Williams, 2006)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gemmpipe.core.errors import check_at_least
from gemmpipe.search.features import Array, FeatureMatrix
from gemmpipe.search.surrogate import SurrogateSearch, TrainingSet

if TYPE_CHECKING:
    import torch

_SIGNAL_STD = 0.4  # of log time over candidates, once the analytic model is taken off
_PROBLEM_STD = 0.5  # how far a problem's level may be from its neighbours'
_NOISE_STD = 0.015
_PROBLEM_LENGTH = 2.5  # doublings over which what is known of a problem fades to 1 / e
_SLOPE = 0.7  # of log time over the analytic model's
_SLOPE_STD = 0.15  # how far the slope may differ


@dataclass(frozen=True, kw_only=True)
class Gaussian(SurrogateSearch):
    """Times next what has the least mean - `exploration` * deviation of log time, given all that is known."""

    exploration: float
    stop_margin: float
    """Of log time: who is hoped to be slower than the best by more is not timed; a search may end before its share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, stop_margin=self.stop_margin)

    def acquisition(self, data: TrainingSet, pool: FeatureMatrix, columns: int) -> Array:
        if not len(data.y):
            return pool.estimate
        mean, deviation = predict(data, pool, columns)
        scores: Array = mean - self.exploration * deviation
        return scores

    def prunable(self, scores: Array, best_us: float) -> npt.NDArray[np.bool_]:
        """Who is slower even so."""
        return scores > math.log(best_us) + self.stop_margin


def predict(data: TrainingSet, pool: FeatureMatrix, columns: int) -> tuple[Array, Array]:
    """(mean, standard deviation) of log(us) of each row of the pool, which belongs to owner 0."""
    import torch

    nearness = np.exp(-data.distances / _PROBLEM_LENGTH)
    owner, centre = data.problem_index, float(pool.estimate.mean())
    rest = data.y - _SLOPE * data.estimate
    level = float(rest.mean())
    bends, pool_bends = _SLOPE_STD * (data.estimate - centre), _SLOPE_STD * (pool.estimate - centre)
    near = nearness[np.ix_(owner, owner)]
    same = owner[:, None] == owner[None]
    to_near = nearness[0, owner]
    with _one_thread():
        x, candidates = _float32(data.x), _float32(pool.padded(columns))
        between = (_SIGNAL_STD**2 * _matern(x, x).double().numpy() + np.outer(bends, bends)) * near
        between += _PROBLEM_STD**2 * 0.5 * (same + near) + (_NOISE_STD**2 + 1e-6) * np.eye(len(rest))
        to_pool = (_SIGNAL_STD**2 * _matern(candidates, x).double().numpy() + np.outer(pool_bends, bends)) * to_near
        to_pool += _PROBLEM_STD**2 * 0.5 * ((owner == 0) + to_near)
        root = torch.linalg.cholesky(torch.from_numpy(between))
        # Both sides of K_pool^T K^-1 K_pool are the same half solve, and the mean needs no more than that.
        wanted = torch.from_numpy(np.column_stack([to_pool.T, rest - level]))
        halves = torch.linalg.solve_triangular(root, wanted, upper=False).numpy()
    weights, solved = halves[:, :-1], halves[:, -1]
    mean = solved @ weights + level + _SLOPE * pool.estimate
    variance = _SIGNAL_STD**2 + pool_bends**2 + _PROBLEM_STD**2 - (weights**2).sum(axis=0)
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


def _float32(rows: Array) -> "torch.Tensor":
    import torch

    return torch.from_numpy(rows).float()


def _matern(a: "torch.Tensor", b: "torch.Tensor") -> "torch.Tensor":
    """Matern 5/2 of rows that are divided by their lengths."""
    import torch

    far = torch.cdist(a, b) * math.sqrt(5)
    return ((far / 3 + 1) * far + 1) * torch.exp(-far)
