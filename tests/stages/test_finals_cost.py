"""The expected seconds of finals: what they grow with, and the times of problems that nothing was timed of."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Device, Problem
from gemmpipe.family import Family
from gemmpipe.stages.engine.expected import compile_seconds, compiled_share
from gemmpipe.stages.finals_cost import ExpectedFinal, FinalsCost, between_us, expected_s, expected_times_us

TIMER = Timer(warmup=5, iters=101, rounds=30, budget_ms=250)


def _problem(family: Family, m: int, n: int = 4096) -> Problem:
    key = {"M": m, "N": n, "K": 4096, "dtype": "float8_e4m3fn", "outdtype": "bfloat16", "x_scale": None}
    return family.problem(tuple(key.items()))


@pytest.fixture
def cost(blockscale: Family, h200: Device) -> FinalsCost:
    return FinalsCost(family=blockscale, spec=blockscale.spec(_problem(blockscale, 64)), timer=TIMER, device=h200)


def test_a_finalist_costs_more_with_longer_launches_up_to_its_budget(cost: FinalsCost) -> None:
    times = [cost.finalist_s(us) for us in (5.0, 500.0, 1000.0)]
    assert times == sorted(times)
    every = replace(cost, all_rounds=True)
    assert every.finalist_s(50.0) > cost.finalist_s(50.0), "no race is decided early"
    assert every.finalist_s(2e4) < 2 * 2 * TIMER.budget_ms / 1e3, "two memory orders"


def test_rounds_at_both_clocks_cost_pauses_and_untimed_replays(
    cost: FinalsCost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a launch of 1 ms: 5 rounds with pauses of twice their time, then 11 or 20 rounds and what runs untimed."""
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    both = replace(cost, timer=replace(TIMER, sustained_ms=150))
    assert both.setup_s - cost.setup_s == pytest.approx(2 * 0.150)
    for all_rounds, plain, sustained in ((False, 11, 11 * 2), (True, 30, 20 * 3)):
        each = [replace(c, all_rounds=all_rounds) for c in (cost, both)]
        short, long = ([c.finalist_s(us) for c in each] for us in (100.0, 110.0))
        less, more = (b - a for a, b in zip(short, long, strict=True))
        assert more / less == pytest.approx((5 * 3 + sustained) / plain, rel=0.02)


def test_a_finalist_without_a_time_takes_as_long_as_usual_for_its_product(cost: FinalsCost) -> None:
    assert cost.finalist_s(None) == cost.finalist_s(cost.typical_us)
    large = replace(cost, spec=replace(cost.spec, m=65536))
    assert large.typical_us > 100 * cost.typical_us / 5


def test_on_a_cpu_finals_cost_their_launches_and_the_reference(blockscale: Family) -> None:
    cpu = Device(
        kind="cpu", index=0, name="AMD EPYC", gfx="cpu_avx2", cu_num=2, shared_bytes=0, cache_bytes=0, warp_size=1
    )
    small, large = (
        FinalsCost(family=blockscale, spec=blockscale.spec(_problem(blockscale, m)), timer=TIMER, device=cpu)
        for m in (1, 2048)
    )
    assert 2 * small.setup_s < large.setup_s, "34e9 multiplications in the reference"
    orders = len(small.spec.x_scale_orders)
    assert 2 < small.finalist_s(1e6) / orders < 3, "the check is one of three rounds; slower candidates leave early"
    assert small.finalist_s(1000.0) < 0.1
    assert small.finalist_s(15e3) > 0.6 * small.finalist_s(25e3), "a short launch is repeated before its rounds"
    assert replace(small, all_rounds=True).finalist_s(1000.0) > 2 * small.finalist_s(1000.0), "an entry of a comparison"
    assert large.finalist_s(None) > 10 * small.finalist_s(None)
    assert large.call_s(1e6) == pytest.approx(large.setup_s + len(large.spec.x_scale_orders) * 11), (
        "three rounds of call and launch, a check before"
    )


def test_problems_without_a_time_count_as_the_others(cost: FinalsCost) -> None:
    finals = [ExpectedFinal(screened=name, finalists=10, cost=cost) for name in ("a", "b", "c")]
    one = expected_s(finals[:1], {"a": 20.0}, 0.5)
    assert expected_s(finals, {"a": 20.0}, 0.5) == pytest.approx(3 * one)
    assert expected_s(finals, {"a": 20.0, "b": math.inf}, 0.5) == pytest.approx(2 * one), "no candidate of it runs"
    assert expected_s(finals, {}, 0.5) == pytest.approx(1.5)


def test_the_time_between_two_ms_is_between_theirs() -> None:
    known = [(1, 10.0), (64, 20.0), (4096, 800.0)]
    assert between_us(known, 8) == pytest.approx(math.sqrt(200))
    assert between_us(known, 64) == 20
    assert between_us(known, 9999) == 800
    assert between_us([(16, 5.0)], 1) == 5


def test_expected_times_are_those_of_neighbours_or_of_the_table(blockscale: Family) -> None:
    screened, between, other = (_problem(blockscale, m, n) for m, n in ((16, 4096), (64, 4096), (16, 512)))
    ids = [screened.id, screened.id, other.id]
    trials = pd.DataFrame({"problem": ids, "us": [7.0, 9.0, None]})
    tables = {"trials": trials, "selections": pd.DataFrame({"problem": [other.id] * 2, "us": [3.0, 4.0]})}
    found = expected_times_us(tables, [screened, between, other])
    assert found == {screened.id: 7.0, between.id: 7.0, other.id: 4.0}


def test_compiling_ends_as_expected_until_it_is_late() -> None:
    """16 processes with equal work: the first ends after most of the time."""
    expected = compile_seconds(34)
    for spent in (1.0, 10.0, 20.0):
        assert spent / compiled_share(spent, expected, 1.0) == pytest.approx(expected)
    late = [spent / compiled_share(spent, expected, 1.0) - spent for spent in (40.0, 80.0)]
    assert late == pytest.approx([4.0, 8.0]), "a tenth of the time so far"
    assert compiled_share(20.0, expected, 0.5) > compiled_share(20.0, expected, 1.0)
    assert compiled_share(20.0, expected, 0.0) == 1
