"""The clock of the CPU, and the timing effort per candidate."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.bench.gpu_clock import GpuClock, head_start_us
from gemmpipe.bench.timer import CpuClock, Spacer, Timer
from gemmpipe.core.data import median
from gemmpipe.core.device import DeviceChoice

TIMER = Timer(warmup=5, iters=101, rounds=15, budget_ms=250)


@given(st.floats(0.001, 1e8), st.integers(1, 32))
def test_rounds_are_enough_for_a_median_and_affordable(time_us: float, launches: int) -> None:
    rounds = TIMER.rounds_for(time_us, launches)
    assert rounds >= 3
    assert rounds <= max(TIMER.rounds, -(-TIMER.iters // launches))
    assert rounds == 3 or rounds * launches * time_us <= TIMER.budget_ms * 1000 * 1.001


@given(st.floats(0.0, 1e7), st.integers(1, 32))
def test_a_sample_uses_all_operand_sets_equally(time_us: float, sets: int) -> None:
    launches = CpuClock().launches_per_sample(time_us, sets)
    assert launches == 1 or launches % sets == 0
    assert 1 <= launches <= 127


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], None]]:
    """Makes a launch of a number of microseconds, with a clock that advances only in launches."""
    now_us = [0]

    def of(time_us: int) -> Callable[[], None]:
        def run() -> None:
            now_us[0] += time_us

        return run

    monkeypatch.setattr("gemmpipe.bench.timer.time", SimpleNamespace(perf_counter_ns=lambda: now_us[0] * 1000))
    return of


Launch = Callable[[int], Callable[[], None]]


def test_each_launch_is_timed_in_order(launch: Launch) -> None:
    assert CpuClock().sequence([launch(n) for n in (1, 5, 2)]) == [1, 5, 2]


def test_a_block_gives_the_time_of_one_of_its_launches(launch: Launch) -> None:
    assert CpuClock().blocks([[launch(2), launch(3), launch(4)], [launch(40)]]) == [3, 40]


@given(st.floats(0.1, 1e6), st.floats(0, 1000))
def test_short_launches_are_timed_together(time_us: float, block_us: float) -> None:
    together = replace(TIMER, block_us=block_us).launches_per_block(time_us)
    assert 1 <= together <= 8
    assert together == 1 or (together - 1) * time_us < block_us
    assert together == 8 or together * max(time_us, 1.0) >= block_us


def test_a_replay_gives_the_time_of_one_launch(launch: Launch) -> None:
    calls: list[int] = []
    replay = CpuClock().replay([launch(3), launch(4), launch(5), lambda: calls.append(1)])
    assert calls == [], "nothing runs before the replay"
    assert replay() == 3
    assert calls == [1]


def test_a_launch_takes_time() -> None:
    [time_us] = CpuClock().sequence([lambda: time.sleep(0.002)])
    assert time_us >= 2000


BLOCKS = st.lists(st.integers(1, 8), min_size=1, max_size=64)


@given(BLOCKS, st.floats(1, 50), st.floats(0, 500))
def test_no_block_begins_before_it_is_queued(blocks: list[int], host_us: float, least_us: float) -> None:
    """For launches of at least two thirds of the expected time, and a host up to half slower than measured."""
    lead_us = head_start_us(blocks, host_us, least_us)
    queued_us, free_us = 0.0, lead_us
    for length in blocks:
        queued_us += length * host_us * 1.5
        assert queued_us <= free_us * (1 + 1e-9)
        free_us += length * least_us / 1.5
    whole = sum(blocks) * host_us * 1.5
    assert lead_us <= whole * (1 + 1e-9)
    assert least_us > 0 or lead_us >= whole * (1 - 1e-9), "without a known time all launches are queued before"


def test_long_launches_need_no_more_than_the_first_block_queued() -> None:
    assert head_start_us([4] * 60, host_us=10, least_us=400) == 4 * 10 * 1.5


class _Spaced(CpuClock):
    """A clock with a spacer of 7 us; records what runs."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.ran: list[str] = []
        self._run = run

    def spacer(self) -> Spacer:
        clock, run = self, self._run

        class _Fixed(Spacer):
            def launch(self) -> object:
                clock.ran.append("spacer")
                return run()

            def replay_us(self) -> float:
                return 7.0

            def block_us(self, launches: int) -> float:
                return 7.0

        return _Fixed()


def test_separate_launches_have_a_spacer_before_each_and_its_time_is_subtracted(launch: Launch) -> None:
    clock = _Spaced(launch(7))
    product = launch(20)

    def timed() -> None:
        clock.ran.append("launch")
        product()

    assert clock.replay_of([timed, timed], separate=True)() == 20
    assert clock.ran == ["spacer", "launch", "spacer", "launch"]
    assert clock.blocks_of([[timed], [timed] * 3], separate=True) == [20, 20]
    clock.ran.clear()
    assert clock.replay_of([timed, timed], separate=False)() == 20
    assert clock.blocks_of([[timed]]) == [20]
    assert clock.ran == ["launch"] * 3


def test_a_launch_shorter_than_the_spacers_variation_keeps_a_positive_time(launch: Launch) -> None:
    assert _Spaced(launch(7)).replay_of([launch(0)], separate=True)() > 0
    assert _Spaced(launch(6)).blocks_of([[launch(0)]], separate=True)[0] > 0


def test_a_cpu_has_no_spacer(launch: Launch) -> None:
    assert CpuClock().spacer() is None
    assert CpuClock().replay_of([launch(3), launch(5)], separate=True)() == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_separate_launch_on_a_gpu_takes_its_own_time() -> None:
    clock = GpuClock(DeviceChoice(kind="cuda", index=0, shared=False).find()[0])
    x = torch.zeros(64 << 20, device="cuda")  # 256 MB: about 0.1 ms to read and write
    launches = [lambda: x.add_(1.0)] * 8
    alone = [clock.replay(launches)() for _ in range(9)]
    separate = [clock.replay_of(launches, separate=True)() for _ in range(9)]
    assert median(separate) == pytest.approx(median(alone), rel=0.1)
    block = clock.blocks_of([launches[:4]] * 9, separate=True)
    assert median(block) == pytest.approx(median(alone), rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_under_load_has_no_pause_between_replays() -> None:
    """The device is busy when a replay returns, and none of the replays after the first waits in a sleep."""
    clock = GpuClock(DeviceChoice(kind="cuda", index=0, shared=False).find()[0])
    x, y = (torch.zeros(64 << 20, device="cuda") for _ in range(2))
    timed, load = (clock.replay_of([lambda t=t: t.add_(1.0)] * 8, separate=True) for t in (x, y))
    alone = median([timed() for _ in range(9)])
    with patch("torch.cuda._sleep", side_effect=torch.cuda._sleep) as sleep:
        loaded, busy = [], []
        for _ in range(20):
            loaded.append(timed(load.queue))
            busy.append(not torch.cuda.current_stream().query())
    clock.synchronize()
    assert all(busy)
    assert sleep.call_count <= 4  # the first replay, and those for which a busy host came too late
    assert median(loaded) == pytest.approx(alone, rel=0.1)
    assert float(y[0]) >= 8 * 20


@pytest.mark.parametrize("value", [-1.0, 1.0, 1e9, math.nan, math.inf])
def test_launches_before_the_rounds_are_none_or_enough_to_lower_the_clocks(value: float) -> None:
    with pytest.raises(ValueError, match="sustained_ms"):
        Timer(warmup=1, iters=2, rounds=3, budget_ms=1, sustained_ms=value)
