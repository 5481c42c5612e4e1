"""Processes of others are seen by the processor time that is not the run's own, on the cores that it may use."""

from collections.abc import Sequence

import pytest

from gemmpipe.core import cpu_load
from gemmpipe.core.cpu_load import ForeignProcessorTime, ProcessorTime, read_processor_time

pytestmark = pytest.mark.unit


def used(moments: Sequence[tuple[float, float, float]], cores: int = 2) -> list[float]:
    """The percentages at each moment (at, busy, own seconds) after the first."""
    times = iter([ProcessorTime(at=at, busy_s=busy, own_s=own) for at, busy, own in moments])
    foreign = ForeignProcessorTime(lambda: next(times), cores)
    return [round(foreign.used_pct(), 6) for _ in moments[1:]]


@pytest.mark.parametrize(
    ("moment", "expected_pct"),
    [
        ((1.0, 2.0, 2.0), 0.0),  # both cores, all by the run
        ((1.0, 2.0, 1.0), 50.0),  # one core each
        ((1.0, 1.1, 1.0), 5.0),
        ((1.0, 1.0, 1.2), 0.0),  # own time is finer than that of the cores
    ],
)
def test_what_is_busy_and_not_own_is_used_by_others(moment: tuple[float, float, float], expected_pct: float) -> None:
    assert used([(0.0, 0.0, 0.0), moment]) == [expected_pct]


def test_a_short_race_is_judged_by_the_last_half_second() -> None:
    quiet, burst = (0.0, 0.0, 0.0), (1.0, 0.0, 0.0)
    race = (1.05, 0.02, 0.0)  # two ticks in 50 ms: 20 % of it, 1 % of the window
    assert used([quiet, burst, race]) == [0.0, pytest.approx(100 * 0.02 / 2.1)]
    assert used([quiet, burst, (2.0, 1.0, 0.0), (2.6, 1.0, 0.0)])[-1] == 0.0, "what ended before the window is over"


def test_without_counters_nothing_is_seen() -> None:
    assert ForeignProcessorTime(lambda: None, 2).used_pct() == 0.0


STAT = """cpu  100 0 50 900 10 5 5 30 40 0
cpu0 60 0 30 400 10 5 5 30 40 0
cpu1 40 0 20 500 0 0 0 0 0 0
intr 5
"""


@pytest.mark.parametrize(("cores", "ticks"), [({0}, 130), ({1}, 60), ({0, 1}, 190), ({0, 64}, 190)])
def test_only_usable_cores_count_unless_they_have_other_numbers(cores: set[int], ticks: int) -> None:
    assert cpu_load._busy_ticks(STAT, cores) == ticks


def test_the_time_of_a_process_with_an_odd_name() -> None:
    cells = " ".join(str(number) for number in range(4, 53))
    assert cpu_load._process_ticks(f"12 (a ) b) S {cells}") == 14 + 15


def test_counters_of_this_machine_grow() -> None:
    first = read_processor_time()
    if first is None:
        pytest.skip("no /proc/stat")
    sum(range(3_000_000))
    second = read_processor_time()
    assert second is not None
    assert second.own_s > first.own_s
    assert second.busy_s >= first.busy_s > 0
    assert second.at > first.at
