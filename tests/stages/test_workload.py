"""The problems that make up a share of the time, and the saving of the whole workload."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.data import Problem
from gemmpipe.family import Family
from gemmpipe.family.roofline import shipped_rooflines
from gemmpipe.pipeline.summary import saving_lines
from gemmpipe.stages.capture import Capture
from gemmpipe.stages.workload import covering_problems, estimate_us, saving

H200 = shipped_rooflines()["h200"]


def problem(m: int, n: int, k: int, weight: float = 1.0) -> Problem:
    return Problem(family="smallblock", key=(("M", m), ("N", n), ("K", k)), weight=weight)


def test_estimates_depend_on_bytes_and_operations(blockscale: Family) -> None:
    small, wide, deep = problem(1, 128, 128), problem(1, 65536, 8192), problem(8192, 8192, 8192)
    assert estimate_us(blockscale, small, H200) == 5.0
    assert estimate_us(blockscale, wide, H200) == pytest.approx(65536 * 8193 / (H200.bytes_per_s / 1e6), rel=0.01)
    assert estimate_us(blockscale, deep, H200) == pytest.approx(2 * 8192**3 / (H200.flops_8_per_s / 1e6))


def test_calls_weight_the_times(blockscale: Family) -> None:
    rare, often = problem(1, 128, 128, 1), problem(2, 128, 128, 200)
    kept, pct = covering_problems([rare, often], blockscale, {}, 99, H200)
    assert kept == [often]
    assert pct == pytest.approx(100 * 200 / 201)
    assert covering_problems([rare, often], blockscale, {}, 99.9, H200)[0] == [rare, often]


def test_recorded_times_count_where_all_are_known(blockscale: Family) -> None:
    one, two = problem(1, 128, 128, 1), problem(2, 128, 128, 200)
    assert covering_problems([one, two], blockscale, {one.id: 1000.0, two.id: 1.0}, 99, H200)[0] == [one]
    assert covering_problems([one, two], blockscale, {one.id: 1000.0}, 99, H200)[0] == [two], "only with all times"


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0.5, 1e4)), min_size=1, max_size=9, unique_by=lambda t: t[0]))
def test_the_fewest_that_make_up_the_share(blockscale: Family, sizes: list[tuple[int, float]]) -> None:
    problems = [problem(m, 256, 256, weight) for m, weight in sizes]
    times = {p.id: p.weight * estimate_us(blockscale, p, H200) for p in problems}
    kept, pct = covering_problems(problems, blockscale, {}, 90, H200)
    assert pct >= 90 - 1e-6
    assert pct == pytest.approx(100 * sum(times[p.id] for p in kept) / sum(times.values()))
    least = min(times[p.id] for p in kept)
    assert all(times[p.id] <= least for p in problems if p not in kept)
    assert 100 * (sum(times[p.id] for p in kept) - least) / sum(times.values()) < 90
    assert covering_problems(problems, blockscale, {}, 100, H200)[0] == problems


def test_the_saving_weights_calls_and_prefers_incumbents() -> None:
    rows = [
        {"format": "", "us": 5.0, "baseline_us": 10.0, "incumbent_us": None, "weight": 80.0},
        {"format": "", "us": 9.0, "baseline_us": 20.0, "incumbent_us": 10.0, "weight": 10.0},
        {"format": "", "us": 7.0, "baseline_us": None, "incumbent_us": None, "weight": 1000.0},
        {"format": "triton_json", "us": 1.0, "baseline_us": 99.0, "incumbent_us": None, "weight": 1.0},
    ]
    found = saving(pd.DataFrame(rows))
    assert found is not None
    assert (found.before_us, found.after_us, found.problems) == (900.0, 490.0, 2)
    assert saving_lines(pd.DataFrame(rows)) == [
        "calls captured: 490 us instead of 900 us, 45.6 % less (2 problems, weighted by calls)"
    ]
    (shared,) = saving_lines(pd.DataFrame(rows).assign(policy="host interleaved shared_cpu"))
    assert ", ~46 % less" in shared
    assert saving(pd.DataFrame(rows[2:])) is None
    kept = pd.DataFrame(rows[:2]).assign(us=lambda frame: frame["baseline_us"], incumbent_us=None)
    assert saving_lines(kept) == ["calls captured: 1.00 ms, as before (2 problems, weighted by calls)"]


@pytest.mark.parametrize("pct", [0, -1, 101])
def test_a_share_is_a_share(pct: float) -> None:
    with pytest.raises(ValueError, match="expected above 0 and at most 100"):
        Capture(cover_pct=pct, include_tuned=False)
