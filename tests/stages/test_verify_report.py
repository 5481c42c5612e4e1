"""Which recorded times verify compares with those of now."""

import pytest

from gemmpipe.stages.verify_report import why_not_compared

ALONE = "host interleaved"


@pytest.mark.parametrize(
    ("row", "own", "said"),
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
    row: dict[str, object], own: dict[str, object], said: str
) -> None:
    reason = why_not_compared(row, own, ALONE, "cpu")
    assert bool(reason) == bool(said)
    assert said in reason
