"""Quantities as text: the unit fits the size, rounding never shows 1000 of a unit, missing values are a dash."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core import units


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (5.912, "5.91 us"),
        (59.12, "59.1 us"),
        (591.2, "591 us"),
        (999.4, "999 us"),
        (999.6, "1.00 ms"),
        (1302.87, "1.30 ms"),
        (999_600.0, "1.0 s"),
        (1_302_878.14, "1.3 s"),
        (203_045_883.0, "3 min 23 s"),
        (0.0156, "15.6 ns"),
        (0, "0 us"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_the_time_of_a_call(time_us: float | None, text: str) -> None:
    assert units.time_text(time_us) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (47.52, "47.5 s"),
        (99.97, "1 min 40 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (24 * 3600 * 3 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_the_duration_of_work(seconds: float, text: str) -> None:
    assert units.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (7.1, "7 s"), (12.4, "12 s"), (43.0, "45 s"), (130, "2 min"), (5000, "1 h 20 min")],
)
def test_an_estimate_is_rounded_to_what_it_can_be_trusted_to(seconds: float, text: str) -> None:
    assert units.rough_duration_text(seconds) == text


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (14.2, 41.0, "14 to 40 s"),
        (48, 130, "50 s to 2 min"),
        (41, 42, "40 s"),
        (4000, 9000, "1 h 10 min to 2 h 30 min"),
    ],
)
def test_both_ends_of_an_estimate(least: float, most: float, text: str) -> None:
    assert units.rough_range_text(least, most) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (512, "512 B"), (1023.7, "1.00 KiB"), (1.5 * 2**20, "1.50 MiB"), (2**47, "128 TiB")],
)
def test_bytes(number: float, text: str) -> None:
    assert units.bytes_text(number) == text


def test_rates() -> None:
    assert units.flops_text(999.7e9) == "1.00 TFLOP/s"
    assert units.flops_text(54.24e12) == "54.2 TFLOP/s"
    assert units.flops_text(3.1e9) == "3.10 GFLOP/s"
    assert units.flops_text(12.0) == "12.0 FLOP/s"
    assert units.flops_text(None) == "-"


@pytest.mark.parametrize(
    ("speedup", "text"),
    [
        (1.77, "1.77x"),
        (17.06, "17.1x"),
        (171.4, "171x"),
        (0.94, "0.94x"),
        (0.062, "0.062x"),
        (0.997, "1.00x"),
        (None, "-"),
    ],
)
def test_speed_ups(speedup: float | None, text: str) -> None:
    assert units.speedup_text(speedup) == text


@pytest.mark.parametrize(
    ("speedup", "text"),
    [
        (1.77, "1.8x"),
        (9.96, "10x"),
        (17.06, "17x"),
        (167.4, "170x"),
        (1674.0, "1,700x"),
        (0.94, "0.94x"),
        (1.0, "1.0x"),
        (None, "-"),
    ],
)
def test_rough_speed_ups(speedup: float | None, text: str) -> None:
    assert units.rough_speedup_text(speedup) == text


def test_shares_counts_and_ranges() -> None:
    assert [units.percent_text(s) for s in (0.53, 0.042, 0.0035, 0, None)] == ["53 %", "4.2 %", "0.35 %", "0 %", "-"]
    assert units.count_text(1944) == "1,944"
    assert units.ranges_text([4, 1, 2, 2]) == "1, 2, 4"
    assert units.ranges_text([2**n for n in range(13)]) == "1 to 4,096"


@given(st.floats(min_value=1e-3, max_value=1e12))
def test_a_time_keeps_its_value_and_at_most_three_digits_of_a_unit(time_us: float) -> None:
    text = units.time_text(time_us)
    if " min " in text or " h " in text or " d " in text:
        return
    number, unit = text.split(" ")
    assert float(number) * {"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6}[unit] == pytest.approx(time_us, rel=0.06)
    assert float(number) < 1000
