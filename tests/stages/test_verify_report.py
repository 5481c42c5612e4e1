"""Which recorded times verify compares with those of now."""

import pytest

from gemmpipe.bench.timer import PairedRatio
from gemmpipe.stages.verify_report import VerifyReport, why_not_compared

ALONE = "host interleaved"


@pytest.mark.parametrize(
    ("row", "own", "printed"),
    [
        ({"policy": ALONE, "device": "cpu"}, {"shared": False}, ""),
        ({"policy": ALONE, "device": None}, {"shared": float("nan")}, ""),
        ({"policy": f"{ALONE} shared_cpu", "device": "cpu"}, {"shared": False}, "(shared_cpu): retune=true on an idle"),
        ({"policy": f"{ALONE} shared_cpu", "device": "cpu"}, {"shared": True}, "(shared_cpu): retune=true on an idle"),
        ({"policy": ALONE, "device": "cpu"}, {"shared": True}, "other processes use the device now"),
        ({"policy": f"{ALONE} cut_short", "device": "cpu"}, {}, "its policy is 'host interleaved cut_short'"),
        ({"policy": "", "device": "cpu"}, {}, "its policy is 'unknown', this run's 'host interleaved'"),
        ({"policy": ALONE, "device": "other"}, {}, "its device is other, this one cpu"),
    ],
)
def test_times_are_compared_only_if_both_were_taken_alike(
    row: dict[str, object], own: dict[str, object], printed: str
) -> None:
    reason = why_not_compared(row, own, ALONE, "cpu")
    assert bool(reason) == bool(printed)
    assert printed in reason


@pytest.mark.parametrize(
    ("low", "median", "least", "is_behind"),
    [(1.2, 1.3, 1.0, True), (1.2, 1.3, 1.5, False), (1.6, 1.7, 1.5, True), (0.9, 1.3, 1.0, False)],
)
def test_a_library_is_ahead_on_a_shared_device_only_by_far(
    low: float, median: float, least: float, is_behind: bool
) -> None:
    report = VerifyReport(max_drift_pct=10, max_behind_pct=1, max_call_overhead_pct=None)
    ratio = PairedRatio(median=median, low=low, high=2.0)
    library = {"kernelName": "torch", "config": '{"method":"float32_convert","split":2}', "us": 23734.59}
    reason = report._behind(ratio, library, least)
    assert bool(reason) == is_behind
    if is_behind:
        assert reason.startswith("behind: torch float32_convert split=2 takes 23.7 ms, ")
