"""Estimates of the analytic model before facts of builds are known."""

import math

import pytest

from gemmpipe.core.data import Candidate
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec
from gemmpipe.search.features import FeatureCache, FeatureEncoder

SM_90 = arch_device("sm_90")
TILE = {"kernel_type": "warp_specialised", "BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 64, "NUM_KSPLIT": 1, "num_stages": 4}


def _estimates(m: int, n: int, k: int, columns: tuple[int, ...]) -> dict[int, float]:
    """us by columns of a warp-specialised tile; its knobs have no number of warps."""
    spec = GemmSpec(m=m, n=n, k=k, x_dtype="bfloat16", w_dtype="bfloat16", out_dtype="bfloat16")
    candidates = [Candidate.of("gluon", {**TILE, "BLOCK_SIZE_N": each}) for each in columns]
    estimate = FeatureCache(FeatureEncoder(), spec, SM_90, candidates, {}).features({}).estimate
    return dict(zip(columns, map(math.exp, estimate), strict=True))


@pytest.mark.parametrize(
    ("m", "n", "best"), [(2048, 1280, 160), (512, 7168, 224), (2048, 7168, 224), (4096, 1280, 160)]
)
def test_tiles_that_fill_the_device_are_estimated_fastest(m: int, n: int, best: int) -> None:
    """As timed on an H200 (docs/explanation/kernels.md)."""
    found = _estimates(m, n, 8192, (64, 128, 160, 192, 224, 256))
    assert min(found, key=found.__getitem__) == best


def test_a_wide_tile_is_not_estimated_to_spill() -> None:
    found = _estimates(4096, 8192, 8192, (128, 256))
    assert found[256] < 1.1 * found[128]
