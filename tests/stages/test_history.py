"""Which journals of earlier runs have times that this run can reuse."""

from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe.core.data import Device
from gemmpipe.family import load_family
from gemmpipe.stages.history import PriorRuns

H200 = Device(kind="cuda", index=0, name="", gfx="sm_90", cu_num=132, shared_bytes=0, cache_bytes=0, warp_size=32)
VERSIONS = {"torch": "2.11", "triton": "3.6"}
SEPARATE = "graph cold interleaved separate"


def session(**changed: object) -> dict[str, object]:
    """A session row of a journal."""
    device = {"gfx": "sm_90", "cu_num": 132, "shared": False}
    return {"device": device, "versions": VERSIONS, "policy": SEPARATE, **changed}


@pytest.mark.parametrize(
    ("changed", "policy", "same"),
    [
        ({}, SEPARATE, True),
        ({}, "graph cold interleaved", False),
        ({"policy": None}, SEPARATE, False),
        ({"policy": None}, "graph cold interleaved", True),
        ({"policy": f"{SEPARATE} shared_gpu"}, SEPARATE, True),
        ({"versions": {**VERSIONS, "triton": "3.7"}}, SEPARATE, False),
    ],
)
def test_times_of_another_method_or_version_are_not_reused(changed: dict[str, object], policy: str, same: bool) -> None:
    record: Any = SimpleNamespace(sessions=[session(**changed)])
    prior = PriorRuns(family=load_family("a16w16"), device=H200, records=(record,))
    assert prior.comparable(VERSIONS, policy) == ((record,) if same else ())
