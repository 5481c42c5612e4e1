"""The clock of a GPU: device events around launches and graphs that the host queues before the device begins them."""

import logging
import time
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from gemmpipe.bench.timer import LEAST_US, Clock, CpuClock, Spacer, TimedCall, TimedReplay, spaced
from gemmpipe.core.data import Device, median
from gemmpipe.core.errors import one_line
from gemmpipe.launch.replays import dependent_launch

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("gemmpipe.timer")
_CYCLES_PER_US = 2000  # of the device's clock (1980 MHz at most on an H200)
_HOST_US = 30.0  # host time to queue a launch and two events, until it is measured
_GRAPH_HOST_US = 100.0  # the same for a graph, whose first replay takes longer than later ones
_FIRST_US = 40.0  # additional host time of the first launch after a wait
_TRIES = 3  # to have a block queued before the device reaches it
_HOST_MARGIN = 1.5  # the host may be slower than measured, and kernels faster than expected, by this factor
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
_SINGLE, _SEVERAL, _GRAPHS = "single launches", "several launches", "graphs"
"""What blocks are; the host's time per call is another for each."""


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
        self._host_us = {_SINGLE: _HOST_US, _SEVERAL: _HOST_US, _GRAPHS: _GRAPH_HOST_US}
        """Host time per call, by what blocks are: one launch, several, with fewer events per launch, or a graph."""
        self._side = torch.cuda.Stream(self._device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spacer: _GpuSpacer | None = None

    def spacer(self) -> "_GpuSpacer":
        """Made at the first use, with its times."""
        if self._spacer is None:
            self._spacer = _GpuSpacer(self, self._device)
        return self._spacer

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        return self._in_parts(blocks, least_us, graphs=False)

    def blocks_of(
        self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0, *, separate: bool = False
    ) -> list[float]:
        """As `Clock.blocks_of`, but separate blocks are replays of graphs, as in finals.

        Outside of a graph a kernel without programmatic dependent launch takes about 1.5 us longer than one with it,
        such as DeepGEMM's: of products of 3 us then no kernel of ours but one came to the finals (H200, 2026-11-29).
        """
        if not separate:
            return self.blocks(blocks, least_us)
        spacer, shortest = self.spacer(), min(map(len, blocks), default=0)
        graphs = [self._try_capture(spaced(spacer, block)) for block in blocks]
        whole_us = iter(self.times_of_graphs([graph for graph in graphs if graph], shortest * least_us))
        others = [block for block, graph in zip(blocks, graphs, strict=True) if graph is None]
        other_us = iter(super().blocks_of(others, least_us, separate=True))
        return [
            max(next(whole_us) / len(block) - spacer.graph_us(len(block)), LEAST_US) if graph else next(other_us)
            for block, graph in zip(blocks, graphs, strict=True)
        ]

    def times_of_graphs(self, graphs: "Sequence[torch.cuda.CUDAGraph]", least_us: float = 0.0) -> list[float]:
        """Microseconds of a replay of each graph, in order; each takes `least_us` or more."""
        return self._in_parts([[graph.replay] for graph in graphs], least_us, graphs=True)

    def _in_parts(self, blocks: Sequence[Sequence[TimedCall]], least_us: float, *, graphs: bool) -> list[float]:
        """Microseconds per call for each block, in parts that fit into the device's queue."""
        times: list[float] = []
        part: list[Sequence[TimedCall]] = []
        for block in blocks:
            if part and sum(map(len, part)) + len(block) > self._most_queued(_kind_of([*part, block], graphs)):
                times += self._queued(part, least_us, _kind_of(part, graphs))
                part = []
            part.append(block)
        return times + (self._queued(part, least_us, _kind_of(part, graphs)) if part else [])

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

    def _most_queued(self, kind: str) -> int:
        """Calls that fit into the device's queue.

        If the host waits for a full queue, its time per launch is measured too long. The next part is short then, and
        measured without a wait.
        """
        each_us = self._host_us[kind]
        return max(_MIN_QUEUED, int(_ENTRIES * _ENTRY_HOST_US / max(each_us, _ENTRY_HOST_US)))

    def _queued(self, blocks: Sequence[Sequence[TimedCall]], least_us: float, kind: str) -> list[float]:
        """Times of blocks that fit into the device's queue; blocks for which the device waited are timed again."""
        lengths = [len(block) for block in blocks]
        before = self._launch_before_replays() if kind == _GRAPHS else _nothing
        lead_us = head_start_us(lengths, self._host_us[kind], least_us)
        times, late, host_us = self._timed_in_queue(blocks, lead_us, before)
        if sum(lengths) >= _MIN_QUEUED:
            each_us = host_us / sum(lengths)
            self._host_us[kind] = max(each_us, (each_us + self._host_us[kind]) / 2)
        for _ in range(_TRIES):
            if not late:
                break
            # A torch operator may take the host ten times as long as a bound kernel; the host's time is known now.
            again, still_late, host_us = self._timed_in_queue([blocks[i] for i in late], 2 * host_us, before)
            for i, time_us in zip(late, again, strict=True):
                times[i] = time_us
            late = [late[i] for i in still_late]
        return times

    def _timed_in_queue(
        self, blocks: Sequence[Sequence[TimedCall]], lead_us: float, before: TimedCall
    ) -> tuple[list[float], list[int], float]:
        """(times of blocks, indices of blocks that the device reached too early, host time for queueing).

        `before` is launched before each block, outside of its time.
        """
        pairs, late = self._pairs(len(blocks)), []
        self._torch.cuda._sleep(int(_CYCLES_PER_US * (lead_us + _FIRST_US)))
        begun = time.perf_counter_ns()
        for index, ((start, end), block) in enumerate(zip(pairs, blocks, strict=True)):
            before()
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
        return _QueuedReplay(self._torch, self.capture(launches), launches, self._launch_before_replays())

    def _try_capture(self, launches: Sequence[TimedCall]) -> "torch.cuda.CUDAGraph | None":
        """A graph of these launches; None where one cannot be captured, for which finals give the reason."""
        try:
            return self.capture(launches)
        except Exception as error:  # noqa: BLE001 - of any library; those of the device are raised again by the next wait
            _LOG.debug("timed outside of a graph: %s", one_line(error))
            return None

    def capture(self, launches: Sequence[TimedCall]) -> "torch.cuda.CUDAGraph":
        """A graph of these launches, which must live as long: they keep the memory that it reads and writes."""
        graph: torch.cuda.CUDAGraph = self._torch.cuda.CUDAGraph()
        self.synchronize()
        # Not torch.cuda.graph(), which collects garbage and empties the allocator at every capture (about 0.1 s).
        with self._torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            finally:
                graph.capture_end()
        return graph


def _nothing() -> None:
    """What comes before a replay on a GPU without programmatic dependent launch."""


def _kind_of(blocks: Sequence[Sequence[TimedCall]], graphs: bool) -> str:
    """What these blocks are."""
    if graphs:
        return _GRAPHS
    return _SINGLE if sum(map(len, blocks)) == len(blocks) else _SEVERAL


class _QueuedReplay(TimedReplay):
    """Replays a graph that the host has queued before the device begins it.

    Else the host's time for the launch of a graph would be part of its time. A dependent launch comes before, else the
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

    def queue(self) -> None:
        self._before()
        self._graph.replay()

    def __call__(self, load: TimedCall | None = None) -> float:
        is_busy = load is not None and not self._torch.cuda.current_stream().query()
        for sleep in (*[False] * is_busy, *[True] * _TRIES):
            if self._is_queued_in_time(load, sleep=sleep):
                break
        return float(self._start.elapsed_time(self._end)) * 1e3 / len(self._launches)

    def _is_queued_in_time(self, load: TimedCall | None, *, sleep: bool) -> bool:
        """Replay once, after a sleep of the device or its earlier work; False if it may have waited for the host."""
        if sleep:
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
        if load is not None:
            load()
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
        self._graph_us: dict[int, float] = {}

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

    def graph_us(self, launches: int) -> float:
        """Microseconds per launch in the first replay of a graph of this many spacers, its start included."""
        if launches not in self._graph_us:
            self.replay_us()
            graphs = [self._clock.capture([self.launch] * launches) for _ in range(_SPACER_REPLAYS)]
            self._graph_us[launches] = median(self._clock.times_of_graphs(graphs)) / launches
        return self._graph_us[launches]


def clock_for(device: Device) -> Clock:
    """The clock for a device."""
    return CpuClock() if device.kind == "cpu" else GpuClock(device)
