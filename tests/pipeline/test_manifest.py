"""The facts about a run that its files state."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe.core.device import arch_device
from gemmpipe.core.errors import UserError
from gemmpipe.pipeline import manifest

OLD, NEW = "graph cold interleaved separate", "graph cold interleaved separate dependent"


def _plan(*, timed: bool, reuse: str | None = None) -> Any:
    bench, select = SimpleNamespace(separate_launches=True, uses_device=True), SimpleNamespace(uses_device=False)
    chain = ("bench", "select") if timed else ("select",)
    return SimpleNamespace(stages={"bench": bench, "select": select}, chain=chain, reuse=reuse)


def _record(*policies: str) -> Any:
    return SimpleNamespace(sessions=[{"policy": each} for each in policies], count=len(policies))


def test_rows_of_recorded_times_have_the_policy_of_these() -> None:
    device = arch_device("sm_90")
    assert manifest.policy_of_rows(_plan(timed=False, reuse="last"), device, _record(OLD)) == OLD
    assert manifest.policy_of_rows(_plan(timed=False, reuse="last"), device, _record(NEW)) == NEW
    assert manifest.policy_of_rows(_plan(timed=True), device, _record()) == NEW
    assert manifest.policy_of_rows(_plan(timed=True), device, _record(NEW, f"{NEW} shared_gpu")) == NEW


@pytest.mark.parametrize(("reuse", "key"), [(None, "resume"), ("last", "reuse")])
def test_times_of_two_methods_are_not_mixed_in_a_run(reuse: str | None, key: str) -> None:
    expected = f"{key}: its times are '{OLD}', new ones '{NEW}', which cannot be compared; expected a new run"
    with pytest.raises(UserError, match=f"^{expected}$"):
        manifest.policy_of_rows(_plan(timed=True, reuse=reuse), arch_device("sm_90"), _record(NEW, OLD))


@pytest.mark.parametrize(
    ("gfx", "words"),
    [
        ("sm_90", "graph cold interleaved separate{} dependent"),
        ("sm_80", "graph cold interleaved separate{}"),
        ("gfx942", "graph cold interleaved separate{}"),
    ],
)
def test_the_policy_names_how_replays_are_launched(gfx: str, words: str) -> None:
    """Times after a dependent launch are shorter: they are not compared with those of rows without it."""
    known = arch_device("gfx942") if gfx == "gfx942" else replace(arch_device("sm_90"), gfx=gfx)
    for both_clocks, word in ((False, ""), (True, " both_clocks")):
        bench = SimpleNamespace(separate_launches=True, both_clocks=both_clocks)
        plan: Any = SimpleNamespace(stages={"bench": bench}, chain=("bench",))
        assert manifest.policy(plan, known) == words.format(word)
        assert manifest.policy(plan, replace(known, kind="cpu", gfx="cpu")) == "host interleaved"
