"""Importance of knobs: a forest finds the knob that decides the times, and says when it knows nothing."""

import itertools
from collections.abc import Callable

import pytest

from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.report.data import TimedTrial
from gemmpipe.report.knob_importance import forest_importances, ranked
from gemmpipe.report.trial_frame import ProblemTrials

Time = Callable[[int, int, int], float]


def _part(problem: str, time_us: Time) -> ProblemTrials:
    """All 4 x 3 x 6 values of three knobs, with times in us."""
    trials = []
    for number, (tile, warps, other) in enumerate(itertools.product((16, 32, 64, 128), (2, 4, 8), range(6))):
        candidate = Candidate.of("triton", {"tile": tile, "warps": warps, "other": other})
        us = time_us(tile, warps, other)
        trial = Trial(stage="screen", problem=problem, candidate=candidate, status=Status.OK, samples_us=(us,))
        trials.append(TimedTrial(trial=trial, t_s=float(number)))
    return ProblemTrials(problem=problem, search=trials, finals=[])


def test_the_knob_that_decides_the_times_is_the_most_important() -> None:
    parts = [_part(f"k M={m} N=64", lambda tile, warps, _: 5 + tile / 8 + warps / 4) for m in (1, 64)]
    found = forest_importances(parts)
    assert found is not None
    assert ranked(["other", "warps", "tile"], found) == ["tile", "warps", "other"]
    assert found.share["tile"] > 0.7
    assert found.share["other"] < 0.05
    assert sum(found.share.values()) == pytest.approx(1)
    assert found.explained > 0.8
    assert "backend" not in found.share, "a knob with one value decides nothing"


def test_a_knob_that_decides_at_one_size_alone_is_found() -> None:
    small = _part("k M=1 N=64", lambda tile, warps, _: float(tile))
    large = _part("k M=4096 N=64", lambda tile, warps, _: float(warps))
    found = forest_importances([small, large])
    assert found is not None
    assert ranked(["other", "tile", "warps"], found)[2] == "other"


def test_times_without_a_pattern_and_few_candidates_give_no_importance() -> None:
    noise = iter(range(10_000))
    random = _part("k M=1 N=64", lambda *_: 10 + (next(noise) * 7919) % 101)
    assert forest_importances([random]) is None
    few = ProblemTrials(problem="k M=1", search=random.search[:20], finals=[])
    assert forest_importances([few]) is None
    assert forest_importances([_part("k M=1 N=64", lambda *_: 5.0)]) is None
    assert ranked(["b", "a"], None) == ["b", "a"]
