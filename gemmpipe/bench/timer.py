"""Timing of launches: clocks for GPUs and CPUs with one interface, and paired comparison of samples.

Two candidates are compared round by round (`paired_ratio`), so that a temporary slowdown affects both.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, median
from gemmpipe.core.errors import check_at_least, one_line
from gemmpipe.family import Family, GemmSpec
from gemmpipe.family.roofline import reaches_power_limit
from gemmpipe.launch.replays import dependent_launch

if TYPE_CHECKING:
    import torch


TimedCall = Callable[[], object]
TimedReplay = Callable[[], float]
"""Runs a fixed series of launches once and returns the microseconds of one launch."""

_LOG = logging.getLogger("gemmpipe.timer")
_CYCLES_PER_US = 2000  # of the device's clock (1980 MHz at most on an H200)
_HOST_US = 30.0  # host time to queue a launch and two events, until it is measured
_FIRST_US = 40.0  # additional host time of the first launch after a wait
_TRIES = 3  # to have a block queued before the device reaches it
_HOST_MARGIN = 1.5  # the host may be slower than measured, and kernels faster than expected, by this factor
_REPLAY_US = 500.0  # shorter replays depend on preceding work: the clock rate, other kernels' data in the caches
_MAX_LAUNCHES = 64
_MAX_BLOCK_LAUNCHES = 8
# Beyond 1,024 entries (kernels, events) the driver makes the host wait for the device. A launch can be several kernels:
# a mixture of experts has up to twelve. Their number follows from the host's time, since a kernel or an event takes it
# this time or more.
_ENTRIES = 768
_ENTRY_HOST_US = 3.0
_MIN_QUEUED = 8  # launches: the host's time is measured with as many
_SPACER_ELEMENTS_PER_UNIT = 1024  # of 4 bytes: a block of threads or two on each multiprocessor
_SPACERS, _SPACER_WARM_REPLAYS, _SPACER_REPLAYS = (
    128,
    60,
    15,
)  # 128 take 0.2 ms; a GPU needs some ms to leave idle clocks
_LEAST_US = 0.01
_LEAST_SUSTAINED_MS, _MOST_SUSTAINED_MS = 100.0, 10_000.0  # an H200 lowers its clocks after 100 ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """The timing effort of a stage per candidate: at most `budget_ms`, but at least three samples."""

    warmup: int
    iters: int
    """Total number of launches."""
    rounds: int
    """Minimum of interleaved rounds; each round gives one sample of every candidate."""
    budget_ms: float
    block_us: float = 0.0
    """Minimum duration of a sample: short launches are timed in blocks; 0: one by one."""
    separate: bool = True
    """On a GPU a small kernel runs before each launch, as other kernels do in a model; its time is subtracted.

    Back to back, launches of one kernel overlap if it uses programmatic dependent launch: an fp8 product of 4096 x 4096
    with M = 64 takes 7.8 us so, and 9.6 us after a quantiser, where DeepGEMM's, without overlap, takes 7.4 us (H200,
    2026-11-23).
    """

    sustained_ms: float = 0.0
    """On a GPU launches of this total time precede the rounds of products that reach its power limit
    (`roofline.reaches_power_limit`), so that the rounds have the clocks that it keeps under load; 0: none."""

    def __post_init__(self) -> None:
        check_at_least(0, warmup=self.warmup, budget_ms=self.budget_ms, block_us=self.block_us)
        check_at_least(0, sustained_ms=self.sustained_ms)
        if self.sustained_ms and not _LEAST_SUSTAINED_MS <= self.sustained_ms <= _MOST_SUSTAINED_MS:
            expected = f"0 or {_LEAST_SUSTAINED_MS:g} to {_MOST_SUSTAINED_MS:g}"
            raise ValueError(f"sustained_ms={self.sustained_ms:g}, expected {expected}")
        check_at_least(1, iters=self.iters, rounds=self.rounds)

    def sustained_ms_of(self, family: Family, spec: GemmSpec) -> float:
        """`sustained_ms` for a product that reaches the power limit of a GPU, else 0."""
        return self.sustained_ms if reaches_power_limit(family, spec) else 0.0

    def launches_per_block(self, time_us: float) -> int:
        """Launches of this time per sample in screening."""
        return max(1, min(_MAX_BLOCK_LAUNCHES, math.ceil(self.block_us / max(time_us, 1.0))))

    def rounds_for(self, time_us: float, launches: int) -> int:
        """Rounds for a candidate of this time whose samples are `launches` launches each."""
        wanted = max(self.rounds, -(-self.iters // launches))
        affordable = int(self.budget_ms * 1000 / max(time_us * launches, 1e-3))
        return max(3, min(wanted, affordable))


def head_start_us(blocks: Sequence[int], host_us: float, least_us: float) -> float:
    """The delay of the device after which the host has each block queued before the device reaches it.

    `blocks` are numbers of launches; a launch takes the host `host_us`, and the device `least_us` or more.
    """
    lead_us, launches = 0.0, 0
    for length in blocks:
        done_us = launches * least_us / _HOST_MARGIN
        launches += length
        lead_us = max(lead_us, launches * host_us * _HOST_MARGIN - done_us)
    return lead_us


class Spacer(ABC):
    """A small kernel between timed launches, and the time that it takes by itself."""

    @abstractmethod
    def launch(self) -> object:
        """Launch it. It does not let the next kernel start before its end."""

    @abstractmethod
    def replay_us(self) -> float:
        """Microseconds per launch in a replay of spacers alone."""

    @abstractmethod
    def block_us(self, launches: int) -> float:
        """Microseconds per launch in a block of this many spacers."""


class Clock(ABC):
    """Times launches on one device."""

    overlaps = False
    """True if start and end of launches back to back overlap."""
    no_dependent_launch = False
    """True once none could be made before a replay, though the device has such launches."""

    def spacer(self) -> Spacer | None:
        """The kernel between separate launches; None where launches never overlap."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work; raises asynchronous errors of launches."""

    def sequence(self, launches: Sequence[TimedCall], least_us: float = 0.0) -> list[float]:
        """Launch each once, in order and back to back; returns the microseconds of each."""
        return self.blocks([[launch] for launch in launches], least_us)

    @abstractmethod
    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        """Launch each block once, in order and back to back; returns the microseconds per launch for each block.

        Each launch is expected to take `least_us` or more: with longer launches, fewer must be queued in advance.
        """

    @abstractmethod
    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        """A replay of these launches; on a GPU captured as a graph, so that the host's time does not count."""

    def blocks_of(
        self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0, *, separate: bool = False
    ) -> list[float]:
        """As `blocks`; with `separate` a spacer runs before each launch, and its time is subtracted."""
        spacer = self.spacer() if separate else None
        if spacer is None:
            return self.blocks(blocks, least_us)
        pairs = [[call for launch in block for call in (spacer.launch, launch)] for block in blocks]
        times = self.blocks(pairs, least_us / 2)
        return [max(2 * t - spacer.block_us(len(b)), _LEAST_US) for t, b in zip(times, blocks, strict=True)]

    def replay_of(self, launches: Sequence[TimedCall], *, separate: bool) -> TimedReplay:
        """As `replay`; with `separate` a spacer runs before each launch, and its time is subtracted."""
        spacer = self.spacer() if separate else None
        if spacer is None:
            return self.replay(launches)
        own_us = spacer.replay_us()
        both = self.replay([call for launch in launches for call in (spacer.launch, launch)])
        return lambda: max(2 * both() - own_us, _LEAST_US)

    def launches_per_sample(self, time_us: float, sets: int) -> int:
        """Launches per sample: long enough for the clock, and over all operand sets, so that the cache is cold."""
        wanted = min(_MAX_LAUNCHES, max(sets, int(_REPLAY_US / max(time_us, 1.0)) + 1))
        return -(-wanted // sets) * sets


class CpuClock(Clock):
    """The clock of a CPU: `perf_counter` around each block."""

    def synchronize(self) -> None:
        """Does nothing: launches on a CPU are synchronous."""

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        def once() -> float:
            start = time.perf_counter_ns()
            for launch in launches:
                launch()
            return (time.perf_counter_ns() - start) / 1e3 / len(launches)

        return once

    def launches_per_sample(self, time_us: float, sets: int) -> int:
        return 1 if time_us * sets > _REPLAY_US else super().launches_per_sample(time_us, sets)


class GpuClock(Clock):
    """The clock of a GPU: device events, after a device sleep in which the host queues launches.

    So the device does not wait for the host within a measurement.
    """

    overlaps = True

    def __init__(self, device: Device) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device.torch_name)
        self._facts = device
        self._before_replay: TimedCall | None = None
        self._host_us = {True: _HOST_US, False: _HOST_US}
        """Host time per launch, for blocks of one launch (True) and longer ones, with fewer events per launch."""
        self._side = torch.cuda.Stream(self._device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spacer: _GpuSpacer | None = None

    def spacer(self) -> Spacer:
        """Made at the first use, with its times."""
        if self._spacer is None:
            self._spacer = _GpuSpacer(self, self._device)
        return self._spacer

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        times: list[float] = []
        part: list[Sequence[TimedCall]] = []
        for block in blocks:
            if part and sum(map(len, part)) + len(block) > self._most_queued([*part, block]):
                times += self._queued(part, least_us)
                part = []
            part.append(block)
        return times + (self._queued(part, least_us) if part else [])

    def _launch_before_replays(self) -> TimedCall:
        """Made at the first use; nothing, after a warning, if it cannot be made: libraries can be timed without it."""
        if self._before_replay is None:
            try:
                self._before_replay = dependent_launch(self._facts) or _nothing
            except Exception as error:  # noqa: BLE001 - any error of the compiler or the driver
                _LOG.warning("kernels of graphs may take longer by up to 0.7 us each: %s", one_line(error))
                self._before_replay = _nothing
                self.no_dependent_launch = True
        return self._before_replay

    def _most_queued(self, blocks: Sequence[Sequence[TimedCall]]) -> int:
        """Launches that fit into the device's queue.

        If the host waits for a full queue, its time per launch is measured too long. The next part is short then, and
        measured without a wait.
        """
        each_us = self._host_us[_are_single(blocks)]
        return max(_MIN_QUEUED, int(_ENTRIES * _ENTRY_HOST_US / max(each_us, _ENTRY_HOST_US)))

    def _queued(self, blocks: Sequence[Sequence[TimedCall]], least_us: float) -> list[float]:
        """Times of blocks that fit into the device's queue; blocks for which the device waited are timed again."""
        lengths = [len(block) for block in blocks]
        single = _are_single(blocks)
        times, late, host_us = self._timed_in_queue(blocks, head_start_us(lengths, self._host_us[single], least_us))
        if sum(lengths) >= _MIN_QUEUED:
            each_us = host_us / sum(lengths)
            self._host_us[single] = max(each_us, (each_us + self._host_us[single]) / 2)
        for _ in range(_TRIES):
            if not late:
                break
            # A torch operator may take the host ten times as long as a bound kernel; the host's time is known now.
            again, still_late, host_us = self._timed_in_queue([blocks[i] for i in late], 2 * host_us)
            for i, time_us in zip(late, again, strict=True):
                times[i] = time_us
            late = [late[i] for i in still_late]
        return times

    def _timed_in_queue(
        self, blocks: Sequence[Sequence[TimedCall]], lead_us: float
    ) -> tuple[list[float], list[int], float]:
        """(times of blocks, indices of blocks that the device reached too early, host time for queueing)."""
        pairs, late = self._pairs(len(blocks)), []
        self._torch.cuda._sleep(int(_CYCLES_PER_US * (lead_us + _FIRST_US)))
        begun = time.perf_counter_ns()
        for index, ((start, end), block) in enumerate(zip(pairs, blocks, strict=True)):
            start.record()
            for launch in block:
                launch()
            end.record()
            if start.query():  # the device may have waited for any of the calls above, including the last one
                late.append(index)
        host_us = (time.perf_counter_ns() - begun) / 1e3
        self.synchronize()
        times = [s.elapsed_time(e) * 1e3 / len(block) for (s, e), block in zip(pairs, blocks, strict=True)]
        return times, late, host_us

    def _pairs(self, count: int) -> "list[tuple[torch.cuda.Event, torch.cuda.Event]]":
        """Start and end events for `count` blocks; reused after they are read."""
        while len(self._events) < count:
            start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events.append((start, end))
        return self._events[:count]

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        # Not torch.cuda.graph(), which collects garbage and empties the allocator at every capture (about 0.1 s).
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            finally:
                graph.capture_end()
        return _QueuedReplay(torch, graph, launches, self._launch_before_replays())


def _nothing() -> None:
    """What comes before a replay on a GPU without programmatic dependent launch."""


def _are_single(blocks: Sequence[Sequence[TimedCall]]) -> bool:
    """True if each block is one launch."""
    return sum(map(len, blocks)) == len(blocks)


class _QueuedReplay:
    """Replays a graph that the host has queued before the device begins it; returns the microseconds of one launch.

    Else the host's time for the launch of a graph would be part of it. A dependent launch comes before, else the
    kernels of a graph take up to 0.7 us longer or not, by what was launched in the process before (launch/replays.py).
    """

    def __init__(
        self, torch: ModuleType, graph: "torch.cuda.CUDAGraph", launches: Sequence[TimedCall], before: TimedCall
    ) -> None:
        self._torch, self._graph, self._before = torch, graph, before
        self._launches = tuple(launches)
        """Kept, as they keep the memory that the graph reads and writes."""
        self._host_us = _FIRST_US
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        for _ in range(_TRIES):
            if self._is_queued_in_time():
                break
        return float(self._start.elapsed_time(self._end)) * 1e3 / len(self._launches)

    def _is_queued_in_time(self) -> bool:
        """Replay once; False if the device may have waited for the host."""
        self._torch.cuda._sleep(int(_CYCLES_PER_US * _HOST_MARGIN * self._host_us))
        begun = time.perf_counter_ns()
        self._before()
        self._start.record()
        self._graph.replay()
        self._end.record()
        late = self._start.query()
        took_us = (time.perf_counter_ns() - begun) / 1e3
        # The first launch of a graph takes the host much longer; a late one is repeated with twice its time.
        self._host_us = 2 * took_us if late else (took_us + self._host_us) / 2
        self._end.synchronize()
        return not late


class _GpuSpacer(Spacer):
    """Adds to a buffer with a thread block or two on each multiprocessor, by a kernel of torch."""

    def __init__(self, clock: GpuClock, device: "torch.device") -> None:
        import torch

        units = torch.cuda.get_device_properties(device).multi_processor_count
        self._clock = clock
        self._buffer = torch.zeros(units * _SPACER_ELEMENTS_PER_UNIT, device=device)
        self._replay_us = 0.0
        self._block_us: dict[int, float] = {}

    def launch(self) -> object:
        return self._buffer.add_(1.0)

    def replay_us(self) -> float:
        if not self._replay_us:
            self.launch()
            replay = self._clock.replay([self.launch] * _SPACERS)
            for _ in range(_SPACER_WARM_REPLAYS):
                replay()
            self._replay_us = median([replay() for _ in range(_SPACER_REPLAYS)])
        return self._replay_us

    def block_us(self, launches: int) -> float:
        if launches not in self._block_us:
            self.replay_us()  # the device leaves its idle clocks
            self._block_us[launches] = median(self._clock.blocks([[self.launch] * launches] * _SPACER_REPLAYS))
        return self._block_us[launches]


def clock_for(device: Device) -> Clock:
    """The clock for a device."""
    return CpuClock() if device.kind == "cpu" else GpuClock(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRatio:
    """The median of a / b over common rounds, and the 95 % interval of that median."""

    median: float
    low: float
    high: float

    @property
    def noise_pct(self) -> float:
        """Half the width of the interval, in percent of the median."""
        return 50 * (self.high - self.low) / self.median

    @property
    def undecided(self) -> bool:
        """True if the interval contains 1."""
        return self.low <= 1.0 <= self.high


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """The ratio of a to b over their common rounds.

    The interval is that of the sign test (order statistics n/2 -+ 1.96 sqrt(n)/2; Hahn and Meeker, 1991), which makes
    no assumption about the noise. With fewer than six rounds it is the whole range.
    """
    ratios = sorted(x / y for x, y in zip(a, b, strict=False))
    n = len(ratios)
    below = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return PairedRatio(median=median(ratios), low=ratios[below], high=ratios[n - 1 - below])
