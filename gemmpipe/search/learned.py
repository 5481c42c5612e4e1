"""A likelihood-free search: a forest learns who is among the best, not how fast each is (Song et al., 2022)."""

from dataclasses import dataclass

import numpy as np

from gemmpipe.errors import UserError, at_least
from gemmpipe.search.evidence import Evidence
from gemmpipe.search.features import Array, Sight
from gemmpipe.search.guided import Guided

_LEAST_TOLD = 8  # rows below which a forest knows nothing


@dataclass(frozen=True, kw_only=True)
class Learned(Guided):
    """Times next who most probably is among the best `best` of a problem; failures are among the rest.

    Needs scikit-learn (`pip install 'gemmpipe[learned]'`).
    """

    best: float
    trees: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, trees=self.trees)
        if not 0 < self.best < 1:
            raise ValueError(f"best={self.best:g}, expected between 0 and 1")
        try:
            import sklearn.ensemble  # noqa: F401
        except ImportError:
            raise UserError("search=learned needs scikit-learn: pip install 'gemmpipe[learned]'") from None

    def order(self, evidence: Evidence, pool: Sight, columns: int) -> Array:
        from sklearn.ensemble import RandomForestClassifier

        good, weight = self._labels(evidence)
        if len(good) < _LEAST_TOLD or good.all() or not good.any():
            return pool.estimate
        x = np.vstack([np.hstack([evidence.x, evidence.places[evidence.owner]]), self._failures(evidence)])
        forest = RandomForestClassifier(
            n_estimators=self.trees, min_samples_leaf=2, max_features=0.5, random_state=self.seed, n_jobs=1
        )
        forest.fit(x, good, sample_weight=weight)
        here = np.broadcast_to(evidence.places[0], (len(pool.estimate), evidence.places.shape[1]))
        odds = forest.predict_proba(np.hstack([pool.wide(columns), here]))[:, 1]
        # The analytic model tells apart whom the trees do not.
        spread = float(np.ptp(pool.estimate)) or 1.0
        order: Array = -odds + 0.05 * (pool.estimate - pool.estimate.min()) / spread
        return order

    def _labels(self, evidence: Evidence) -> tuple[Array, Array]:
        """(1 where a row is among its problem's best, weight): the better, the heavier; far problems weigh less."""
        good, weight = np.zeros(len(evidence.y)), np.ones(len(evidence.y))
        for owner in np.unique(evidence.owner):
            rows = evidence.owner == owner
            bound = np.quantile(evidence.y[rows], self.best)
            good[rows] = evidence.y[rows] <= bound
            gain = np.maximum(bound - evidence.y[rows], 0)
            weight[rows] = np.where(good[rows] > 0, 1 + gain / max(float(gain.mean()), 1e-9), 1.0)
            weight[rows] *= np.exp(-evidence.far[0, owner] / 4)
        failures = len(evidence.failed)
        return np.concatenate([good, np.zeros(failures)]), np.concatenate([weight, np.ones(failures)])

    def _failures(self, evidence: Evidence) -> Array:
        places = np.broadcast_to(evidence.places[0], (len(evidence.failed), evidence.places.shape[1]))
        return np.hstack([evidence.failed, places])
