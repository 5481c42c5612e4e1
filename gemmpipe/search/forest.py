"""Likelihood-free search (Song et al., 2022): a forest classifies the best candidates, and predicts no times."""

from dataclasses import dataclass

import numpy as np

from gemmpipe.core.errors import UserError, check_at_least
from gemmpipe.search.features import Array, FeatureMatrix
from gemmpipe.search.surrogate import SurrogateSearch, TrainingSet

_MIN_ROWS = 8  # with fewer, the analytic model orders the candidates


@dataclass(frozen=True, kw_only=True)
class Forest(SurrogateSearch):
    """Times next the candidates most likely in the best `good_fraction` of a problem; failures are not in it.

    Needs scikit-learn (`pip install 'gemmpipe[learned]'`).
    """

    good_fraction: float
    trees: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, trees=self.trees)
        if not 0 < self.good_fraction < 1:
            raise ValueError(f"good_fraction={self.good_fraction:g}, expected between 0 and 1")
        try:
            import sklearn.ensemble  # noqa: F401
        except ImportError:
            raise UserError("search=forest needs scikit-learn: pip install 'gemmpipe[learned]'") from None

    def acquisition(self, data: TrainingSet, pool: FeatureMatrix, columns: int) -> Array:
        from sklearn.ensemble import RandomForestClassifier

        good, weight = self._labels(data)
        if len(good) < _MIN_ROWS or good.all() or not good.any():
            return pool.estimate
        x = np.vstack([np.hstack([data.x, data.problem_sizes[data.problem_index]]), self._failures(data)])
        forest = RandomForestClassifier(
            n_estimators=self.trees, min_samples_leaf=2, max_features=0.5, random_state=self.seed, n_jobs=1
        )
        forest.fit(x, good, sample_weight=weight)
        sizes = np.broadcast_to(data.problem_sizes[0], (len(pool.estimate), data.problem_sizes.shape[1]))
        odds = forest.predict_proba(np.hstack([pool.padded(columns), sizes]))[:, 1]
        # The analytic model breaks ties of the trees.
        spread = float(np.ptp(pool.estimate)) or 1.0
        scores: Array = -odds + 0.05 * (pool.estimate - pool.estimate.min()) / spread
        return scores

    def _labels(self, data: TrainingSet) -> tuple[Array, Array]:
        """(1 for rows among their problem's best, weights): higher for faster rows, lower for distant problems."""
        good, weight = np.zeros(len(data.y)), np.ones(len(data.y))
        for problem in np.unique(data.problem_index):
            rows = data.problem_index == problem
            bound = np.quantile(data.y[rows], self.good_fraction)
            good[rows] = data.y[rows] <= bound
            gain = np.maximum(bound - data.y[rows], 0)
            weight[rows] = np.where(good[rows] > 0, 1 + gain / max(float(gain.mean()), 1e-9), 1.0)
            weight[rows] *= np.exp(-data.distances[0, problem] / 4)
        failures = len(data.failed)
        return np.concatenate([good, np.zeros(failures)]), np.concatenate([weight, np.ones(failures)])

    def _failures(self, data: TrainingSet) -> Array:
        sizes = np.broadcast_to(data.problem_sizes[0], (len(data.failed), data.problem_sizes.shape[1]))
        return np.hstack([data.failed, sizes])
