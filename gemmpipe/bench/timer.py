"""Timing of launches: the interface of clocks, that of a CPU, and paired comparison of samples.

Two candidates are compared round by round (`paired_ratio`), so that a temporary slowdown affects both.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemmpipe.core.data import median
from gemmpipe.core.errors import check_at_least
from gemmpipe.family import Family, GemmSpec
from gemmpipe.family.roofline import reaches_power_limit

TimedCall = Callable[[], object]

_REPLAY_US = 500.0  # shorter replays depend on preceding work: the clock rate, other kernels' data in the caches
_MAX_LAUNCHES = 64
_MAX_BLOCK_LAUNCHES = 8
LEAST_US = 0.01
"""The time of a launch that takes no longer than the variation of the spacer's time."""
_LEAST_SUSTAINED_MS, _MOST_SUSTAINED_MS = 100.0, 10_000.0  # an H200 lowers its clocks after 100 ms


class TimedReplay:
    """A fixed series of launches; this one runs each at once, as a CPU does."""

    def __init__(self, once: Callable[[], float]) -> None:
        self._once = once

    def __call__(self, load: TimedCall | None = None) -> float:
        """Run it once; returns the microseconds of one launch.

        `load` queues other work after it, before the host waits for its end: a GPU that is still busy with such work
        at the next replay has no pause.
        """
        time_us = self._once()
        if load is not None:
            load()
        return time_us

    def queue(self) -> None:
        """Run it untimed; a GPU is busy with it while the host goes on."""
        self._once()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """The timing effort of a stage per candidate: at most `budget_ms`, but at least three samples."""

    warmup: int
    iters: int
    """Total number of launches."""
    rounds: int
    """Minimum of interleaved rounds, at sustained clocks the maximum is 20; one gives a sample of every candidate."""
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
    """On a GPU, products that reach its power limit (`roofline.reaches_power_limit`) are timed at full clocks, then,
    after timed launches of this total time and as many others, at those that it keeps under load; a sample is the
    geometric mean of both. 0: no such launches, and whichever clocks the rounds have."""

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
        times = self.blocks([spaced(spacer, block) for block in blocks], least_us / 2)
        return [max(2 * t - spacer.block_us(len(b)), LEAST_US) for t, b in zip(times, blocks, strict=True)]

    def replay_of(self, launches: Sequence[TimedCall], *, separate: bool) -> TimedReplay:
        """As `replay`; with `separate` a spacer runs before each launch, and its time is subtracted."""
        spacer = self.spacer() if separate else None
        if spacer is None:
            return self.replay(launches)
        own_us = spacer.replay_us()  # also the first launch of its kernel, which must not be captured
        return _SpacedReplay(self.replay(spaced(spacer, launches)), own_us)

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

        return TimedReplay(once)

    def launches_per_sample(self, time_us: float, sets: int) -> int:
        return 1 if time_us * sets > _REPLAY_US else super().launches_per_sample(time_us, sets)


class _SpacedReplay(TimedReplay):
    """A replay of launches and spacers in turn; its time is that of a launch."""

    def __init__(self, both: TimedReplay, spacer_us: float) -> None:
        self._both, self._spacer_us = both, spacer_us

    def __call__(self, load: TimedCall | None = None) -> float:
        return max(2 * self._both(load) - self._spacer_us, LEAST_US)

    def queue(self) -> None:
        self._both.queue()


def spaced(spacer: Spacer, launches: Sequence[TimedCall]) -> list[TimedCall]:
    """These launches, each after a spacer."""
    return [call for launch in launches for call in (spacer.launch, launch)]


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
