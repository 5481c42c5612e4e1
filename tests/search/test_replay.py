"""Replays of recorded spaces: the range of the score, and requirements on the default search for held-out products."""

import json
import lzma
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from search_setup import LIMITS, default_search

from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped
from gemmpipe.search.gaussian_process import Gaussian
from gemmpipe.search.recorded import RecordedSpace, read
from gemmpipe.search.simple import Random
from gemmpipe.search.simulator import ReplaySearch, random_best, score
from gemmpipe.stages.replay import groups_of, lines, replay_group

RECORDED = Path(__file__).parent.parent / "data" / "recorded"
TUNED_ON = 1
"""The first (N, K) of each recording: on these the defaults were chosen; the others are reported."""


def _replay(of: object, seeds: int) -> ReplaySearch:
    return ReplaySearch(algorithm=of, recorded=(), seeds=seeds, compile_slots=15, rounds=30, transfer=False, **LIMITS)  # type: ignore[arg-type]


def _files() -> list[Path]:
    return sorted(RECORDED.glob("*.jsonl.xz"))


def test_the_default_search_is_the_one_tested_here() -> None:
    base = yaml.safe_load((shipped("pipelines") / "_base.yaml").read_text())
    assert {"search": "gaussian"} in base["defaults"]


def test_recordings_are_small_and_have_their_command() -> None:
    assert sum(path.stat().st_size for path in _files()) < 1_000_000
    assert len(_files()) >= 3
    for path in _files():
        with lzma.open(path, "rt") as stream:
            head = json.loads(stream.readline())
        assert head["command"].startswith("gemmpipe exhaustive kernel=")
        assert head["versions"]["triton"]


def test_random_best_agrees_with_sampling() -> None:
    times = [5.0, 1.0, 3.0, 9.0]
    rng = np.random.default_rng(0)
    for drawn, expected in enumerate(random_best(times), 1):
        found = np.mean([min(rng.choice(times, drawn, replace=False)) for _ in range(4000)])
        assert expected == pytest.approx(found, rel=0.05)


def test_the_score_is_one_at_the_optimum_and_zero_for_random() -> None:
    times = list(np.random.default_rng(1).uniform(10, 100, 300))
    assert score(times, 1.0, [([0.0], [min(times)])]) == pytest.approx(1.0)
    expected = list(random_best(times))
    moments = [float(i) for i in range(1, len(times) + 1)]
    assert abs(score(times, 1.0, [(moments, expected)])) < 0.05


@pytest.fixture(scope="module")
def recordings() -> dict[str, RecordedSpace]:
    return {path.name.split(".")[0]: read(path) for path in _files()}


def _at_a_tenth() -> Gaussian:
    """The default search, with its default fraction of small spaces too, where `min_trials` is more."""
    return replace(default_search(), min_trials=24)


def _held_out(recording: RecordedSpace) -> list[object]:
    return list(groups_of(recording)[TUNED_ON:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "products"), [(3, 1), *(pytest.param(seeds, None, marks=pytest.mark.slow) for seeds in (3, 20))]
)
def test_within_one_percent_at_a_tenth_of_the_evaluations(
    recordings: dict[str, RecordedSpace],
    record_property: Callable[[str, object], None],
    seeds: int,
    products: int | None,
) -> None:
    """Problems that differ only in M run together, as in a run; without results of other (N, K)."""
    rows = []
    for recording in recordings.values():
        for group in _held_out(recording)[:products]:
            rows += replay_group(_replay(_at_a_tenth(), seeds), recording, group, seeds)  # type: ignore[arg-type]
    near = sum(float(str(row["ratio"])) <= 1.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: float(str(row["worst"])))
    found = f"{near:.1%} of {len(rows)} problems within 1 % (median of {seeds} seeds)"
    record_property("measured", f"{found}; worst {worst['worst']:.3f}, seed {worst['worst_seed']}, {worst['problem']}")
    assert all(float(str(r["evaluations"])) <= max(24, round(0.1 * int(str(r["candidates"])))) for r in rows)
    assert near >= 0.95
    assert float(str(worst["worst"])) < 1.25, "no seed of any problem goes far astray"
    assert float(np.mean([float(str(row["score"])) for row in rows])) > 0.5


@pytest.mark.slow
def test_it_beats_random_search_and_learns_from_other_products(recordings: dict[str, RecordedSpace]) -> None:
    recording = recordings["h200_a8w8"]
    group = _held_out(recording)[0]
    default = _at_a_tenth()
    chance = Random(trial_fraction=0.1, min_trials=24, seed=0, rungs=default.rungs, **LIMITS)  # type: ignore[arg-type]
    ratios = {}
    for name, how in {
        "random": _replay(chance, 3),
        "cold": _replay(default, 3),
        "warm": replace(_replay(default, 3), transfer=True),
    }.items():
        ratios[name] = np.mean([float(str(r["ratio"])) for r in replay_group(how, recording, group, 20)])  # type: ignore[arg-type]
    assert ratios["cold"] < ratios["random"]
    assert ratios["warm"] <= ratios["cold"] + 0.005


def test_a_budget_ends_a_replayed_search_as_it_ends_a_run(recordings: dict[str, RecordedSpace]) -> None:
    recording = recordings["h200_a8w8"]
    group = _held_out(recording)[0]
    whole = replay_group(_replay(default_search(), 2), recording, group, 20)  # type: ignore[arg-type]
    few = replace(_replay(default_search(), 2), budget_trials=12)
    rows = replay_group(few, recording, group, 20)  # type: ignore[arg-type]
    assert [row["evaluations"] for row in rows] == [12.0] * len(rows)
    own = replace(few, algorithm=replace(default_search(), budget_trials=7))
    assert replay_group(own, recording, group, 20)[0]["evaluations"] == 7, "the search's own counts first"  # type: ignore[arg-type]
    spent = sum(float(str(row["seconds"])) for row in whole)
    short = replay_group(replace(_replay(default_search(), 2), budget_s=spent / 4), recording, group, 20)  # type: ignore[arg-type]
    seconds = [float(str(row["seconds"])) for row in short]
    assert spent / 4 <= sum(seconds) < spent / 2, "a step that was begun is finished"
    nothing = [{**row, "worst": None} for row in rows]  # all that was begun within the budget had failed
    assert "worst: nothing found" in lines(pd.DataFrame(nothing), few)[-1]


def test_a_replay_takes_no_journals() -> None:
    with pytest.raises(ValueError, match=r"search\.transfer=true"):
        replace(_replay(default_search(), 2), journals=("outputs/runs/tune/x",))


def test_an_invalid_recording_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_text("nothing")
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    for name in ("a.jsonl.xz", "b.csv", "missing.jsonl.xz"):
        with pytest.raises(UserError, match=r"search\.recorded"):
            read(tmp_path / name)


def test_a_record_without_times_is_refused_and_patterns_name_files(tmp_path: Path) -> None:
    text = lzma.decompress((RECORDED / "h200_batched_bf16.jsonl.xz").read_bytes())
    rows = [json.loads(line) for line in text.splitlines()]
    empty = [{**row, "results": []} if row["row"] == "problem" else row for row in rows]
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, empty)).encode()))
    with pytest.raises(UserError, match=r"none of 0 candidates of batched_bf16 .* has a time"):
        read(path)
    path.write_bytes(lzma.compress(json.dumps(rows[0]).encode()))
    with pytest.raises(UserError, match="it has no problems"):
        read(path)
    path.write_bytes(lzma.compress(json.dumps({**rows[0], "family": "antigravity"}).encode()))
    with pytest.raises(UserError, match="family 'antigravity'; expected a shipped one"):
        read(path)
    assert "antigravity" not in sys.modules
    found = replace(_replay(default_search(), 1), recorded=(str(RECORDED / "h200_b*.xz"),)).recordings()
    assert [recording.family for recording in found] == ["batched_bf16"]
    with pytest.raises(UserError, match="no file"):
        replace(_replay(default_search(), 1), recorded=(str(tmp_path / "*.gone"),)).recordings()
