"""The facts about a run that its files state."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gemmpipe.core.device import arch_device
from gemmpipe.pipeline import manifest


@pytest.mark.parametrize(
    ("gfx", "words"),
    [
        ("sm_90", "graph cold interleaved separate dependent"),
        ("sm_80", "graph cold interleaved separate"),
        ("gfx942", "graph cold interleaved separate"),
    ],
)
def test_the_policy_names_how_replays_are_launched(gfx: str, words: str) -> None:
    """Times after a dependent launch are shorter: they are not compared with those of rows without it."""
    known = arch_device("gfx942") if gfx == "gfx942" else replace(arch_device("sm_90"), gfx=gfx)
    plan = SimpleNamespace(stages={"bench": SimpleNamespace(separate_launches=True)}, chain=("bench",))
    assert manifest.policy(plan, known) == words  # type: ignore[arg-type]
    assert manifest.policy(plan, replace(known, kind="cpu", gfx="cpu")) == "host interleaved"  # type: ignore[arg-type]
