"""The default search: a Gaussian process over knobs, derived features and problems (Rasmussen and Williams, 2006)."""

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

_SIGNAL_STD = 0.4  # of log time over candidates, after the analytic model is subtracted
_PROBLEM_STD = 0.5  # of a problem's level relative to its neighbors'
_NOISE_STD = 0.015
_PROBLEM_LENGTH = 2.5  # doublings over which the correlation of problems falls to 1 / e
_SLOPE = 0.7  # of log time against the analytic model's
_SLOPE_STD = 0.15  # of the slope


@dataclass(frozen=True, kw_only=True)
class Gaussian(SurrogateSearch):
    """Times next the candidates with the least lower confidence bound: mean - `exploration` * deviation of log time."""

    exploration: float
    stop_margin: float
    """In log time: candidates with a bound above the best by more are not timed; the search may end early."""

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
        """True for candidates with a lower confidence bound above the best by more than `stop_margin`."""
        return scores > math.log(best_us) + self.stop_margin


def predict(data: TrainingSet, pool: FeatureMatrix, columns: int) -> tuple[Array, Array]:
    """(mean, standard deviation) of log(us) for each row of `pool`, candidates of problem 0."""
    import torch

    nearness = np.exp(-data.distances / _PROBLEM_LENGTH)
    problem, center = data.problem_index, float(pool.estimate.mean())
    rest = data.y - _SLOPE * data.estimate
    level = float(rest.mean())
    slopes, pool_slopes = _SLOPE_STD * (data.estimate - center), _SLOPE_STD * (pool.estimate - center)
    near = nearness[np.ix_(problem, problem)]
    same = problem[:, None] == problem[None]
    to_near = nearness[0, problem]
    with _one_thread():
        x, candidates = _float32(data.x), _float32(pool.padded(columns))
        between = (_SIGNAL_STD**2 * _matern(x, x).double().numpy() + np.outer(slopes, slopes)) * near
        between += _PROBLEM_STD**2 * 0.5 * (same + near) + (_NOISE_STD**2 + 1e-6) * np.eye(len(rest))
        to_pool = (_SIGNAL_STD**2 * _matern(candidates, x).double().numpy() + np.outer(pool_slopes, slopes)) * to_near
        to_pool += _PROBLEM_STD**2 * 0.5 * ((problem == 0) + to_near)
        root = torch.linalg.cholesky(torch.from_numpy(between))
        # One triangular solve serves both sides of K_pool^T K^-1 K_pool, and the mean.
        wanted = torch.from_numpy(np.column_stack([to_pool.T, rest - level]))
        halves = torch.linalg.solve_triangular(root, wanted, upper=False).numpy()
    weights, solved = halves[:, :-1], halves[:, -1]
    mean = solved @ weights + level + _SLOPE * pool.estimate
    variance = _SIGNAL_STD**2 + pool_slopes**2 + _PROBLEM_STD**2 - (weights**2).sum(axis=0)
    return mean, np.sqrt(np.maximum(variance, 1e-8))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: the other cores compile."""
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
    """Matern 5/2 kernel of rows in units of their length scales."""
    import torch

    far = torch.cdist(a, b) * math.sqrt(5)
    return ((far / 3 + 1) * far + 1) * torch.exp(-far)
