"""The clock of GPUs on a modelled device: times never include waiting for the host."""

import gc
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.bench import gpu_clock
from gemmpipe.bench.gpu_clock import GpuClock
from gemmpipe.core.data import Device

H200 = Device(kind="cuda", index=0, name="", gfx="sm_90", cu_num=132, shared_bytes=0, cache_bytes=0, warp_size=32)


CAPACITY = 1024
"""Entries of the queue: kernels, events."""


class Modelled:
    """A host and a device that executes the host's queue; microseconds."""

    def __init__(self) -> None:
        self.now_us = self.free_us = 0.0
        self.ends_us: deque[float] = deque(maxlen=CAPACITY)
        """When the last entries of the queue are done."""
        self.slept_us = self.idle_us = 0.0
        self.kernels: list[float] = []
        """The microseconds of all kernels and graphs outside of a capture."""
        self.hiccups: list[float] = []
        """Additional host time of the next launches, of kernels or of graphs."""
        self.graph_start_us = self.graph_upload_us = 0.0
        self.captured: list[float] | None = None
        """The kernels of the graph that is captured."""
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: Event(self),
            Stream=lambda device: None,
            stream=nullcontext,
            CUDAGraph=lambda: Graph(self),
            _sleep=lambda cycles: self.work(cycles / 2000, sleep=True),
            synchronize=lambda device: self.wait(),
            current_stream=lambda: SimpleNamespace(query=lambda: self.free_us <= self.now_us),
            get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132),
        )

    def zeros(self, elements: int, device: str) -> SimpleNamespace:
        """The buffer of the spacer, whose kernel takes 2 us."""
        add = self.launch(2.0, 5.0)
        return SimpleNamespace(add_=lambda value: add())

    def device(self, name: str) -> str:
        return name

    def work(self, time_us: float, *, sleep: bool = False) -> None:
        if self.captured is not None:
            self.captured.append(time_us)
            return
        self.now_us += 1
        if len(self.ends_us) == CAPACITY:
            self.now_us = max(self.now_us, self.ends_us[0])
        self.idle_us += max(0.0, self.now_us - self.free_us)
        self.free_us = max(self.free_us, self.now_us) + time_us
        self.kernels.append(time_us)
        self.ends_us.append(self.free_us)
        self.slept_us += time_us * sleep

    def wait(self) -> None:
        self.now_us = max(self.now_us, self.free_us)

    def launch(
        self, time_us: float, host_us: float = 10.0, kernels: int = 1, *, outside_us: float = 0.0
    ) -> Callable[[], None]:
        """A launch that takes `outside_us` more outside of graphs."""

        def run() -> None:
            self.now_us += self.hiccups.pop() if self.hiccups else 0.0
            for _ in range(kernels):
                self.now_us += host_us / kernels
                self.work((time_us + outside_us * (self.captured is None)) / kernels)

        return run


class Graph:
    """Kernels that one launch queues; the first launch takes the host longer."""

    def __init__(self, model: Modelled) -> None:
        self._model = model
        self._times_us: list[float] = []
        self.host_us, self.first_host_us = 50.0, 900.0
        self.start_us = model.graph_start_us

    def capture_begin(self, capture_error_mode: str) -> None:
        self._model.captured = self._times_us

    def capture_end(self) -> None:
        self._model.captured = None

    def replay(self) -> None:
        model, first_us = self._model, self.first_host_us
        self.first_host_us = 0.0
        model.now_us += self.host_us + first_us + (model.hiccups.pop() if model.hiccups else 0.0)
        model.work(self.start_us + sum(self._times_us) + (model.graph_upload_us if first_us else 0.0))


class Event:
    """An event in the queue."""

    def __init__(self, model: Modelled) -> None:
        self._model = model
        self.at_us = 0.0

    def record(self) -> None:
        self._model.work(0.0)
        self.at_us = self._model.free_us

    def synchronize(self) -> None:
        self._model.now_us = max(self._model.now_us, self.at_us)

    def query(self) -> bool:
        return self.at_us <= self._model.now_us

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_us - self.at_us) / 1e3


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Modelled:
    return _modelled(monkeypatch)


def _modelled(monkeypatch: pytest.MonkeyPatch) -> Modelled:
    found = Modelled()
    monkeypatch.setitem(__import__("sys").modules, "torch", found)
    monkeypatch.setattr(gpu_clock, "time", SimpleNamespace(perf_counter_ns=lambda: found.now_us * 1e3))
    monkeypatch.setattr(gpu_clock, "dependent_launch", lambda device: found.launch(1.0, 3.0))
    return found


def test_the_time_of_a_launch_is_the_devices_time(model: Modelled) -> None:
    clock = GpuClock(H200)
    times = [5.0, 80.0, 7.0, 2000.0] * 40
    assert clock.sequence([model.launch(t) for t in times]) == pytest.approx(times)
    blocks = [[model.launch(t)] * n for t, n in ((5.0, 8), (3.0, 4), (90.0, 1))] * 20
    assert clock.blocks(blocks, least_us=3.0) == pytest.approx([5.0, 3.0, 90.0] * 20)


@pytest.mark.parametrize("separate", [True, False])
def test_under_load_the_device_has_no_pause(model: Modelled, separate: bool) -> None:
    """Neither a sleep nor an idle time from the first replay on; the load is not timed."""
    clock = GpuClock(H200)
    timed = clock.replay_of([model.launch(60.0)] * 8, separate=separate)
    load = clock.replay_of([model.launch(90.0)] * 8, separate=separate)
    timed(load.queue), load.queue()  # the first launches of graphs take the host longer
    slept_us, idle_us = model.slept_us, model.idle_us
    model.kernels.clear()
    assert [timed(load.queue) for _ in range(20)] == pytest.approx([60.0] * 20)
    assert (model.slept_us, model.idle_us) == (slept_us, idle_us)
    graphs = [time_us for time_us in model.kernels if time_us > 10]
    assert graphs == pytest.approx([8 * (60 + 2 * separate), 8 * (90 + 2 * separate)] * 20)
    assert model.kernels.count(1.0) == len(graphs), "a dependent launch before each graph"
    model.wait()
    assert timed(load.queue) == pytest.approx(60.0)
    assert model.slept_us > slept_us, "the device was idle, so it sleeps while the host queues"


def test_under_load_a_replay_that_the_host_queues_too_late_is_timed_again(model: Modelled) -> None:
    clock = GpuClock(H200)
    timed, load = (clock.replay_of([model.launch(60.0)] * 8, separate=False) for _ in range(2))
    timed(load.queue), load.queue()
    model.hiccups = [5_000.0]
    slept_us = model.slept_us
    assert timed(load.queue) == pytest.approx(60.0)
    assert model.slept_us > slept_us


def test_launches_queued_too_late_are_timed_again(model: Modelled) -> None:
    clock = GpuClock(H200)
    model.hiccups = [0.0] * 5 + [30_000.0] + [0.0] * 20
    assert clock.sequence([model.launch(5.0) for _ in range(64)]) == pytest.approx([5.0] * 64)


def test_launches_with_much_host_time_are_timed_correctly(model: Modelled) -> None:
    """E.g. a torch operator among bound kernels."""
    clock = GpuClock(H200)
    kernel, operator = model.launch(5.0, 8.0), model.launch(6.0, 300.0)
    for _ in range(5):
        assert clock.sequence([kernel] * 30) == pytest.approx([5.0] * 30)
        assert clock.sequence([operator]) == pytest.approx([6.0])
        assert clock.sequence([*[kernel] * 20, operator, kernel, operator], 5.0) == pytest.approx(
            [5.0] * 20 + [6, 5, 6]
        )


def test_long_launches_need_little_head_start(model: Modelled) -> None:
    clock = GpuClock(H200)
    clock.blocks([[model.launch(400.0)] * 3] * 40)
    known, model.slept_us = model.slept_us, 0.0
    assert clock.blocks([[model.launch(400.0)] * 3] * 40, least_us=300.0) == pytest.approx([400.0] * 40)
    assert model.slept_us < known / 10


@pytest.mark.parametrize("host_us", [40.0, 120.0, 400.0])
def test_launches_of_many_kernels_do_not_fill_the_queue(model: Modelled, host_us: float) -> None:
    """The host would wait for the device, take this for its own time, and give the device longer pauses each time."""
    clock = GpuClock(H200)
    blocks = [[model.launch(3000.0, host_us, 12), model.launch(2.0, 6.0)]] * 192
    for _ in range(4):
        model.slept_us = 0.0
        assert clock.blocks(blocks, least_us=1000.0) == pytest.approx([1501.0] * 192)
        assert model.slept_us < 0.1 * 192 * 3002


def test_a_pause_of_the_host_is_forgotten(model: Modelled) -> None:
    """It is in the host's time per launch, which the head start is derived from, for a few parts of the queue alone."""
    clock, launches = GpuClock(H200), [model.launch(5.0)] * 64
    model.hiccups = [1e6]
    clock.sequence(launches)
    for _ in range(3):
        clock.sequence(launches)
    model.slept_us = 0.0
    clock.sequence(launches)
    assert model.slept_us < 64 * 40


@given(
    st.lists(st.tuples(st.floats(2, 500), st.integers(1, 8)), min_size=1, max_size=80),
    st.floats(1, 60),
    st.lists(st.sampled_from([0.0, 0.0, 0.0, 50.0, 4000.0]), max_size=40),
)
def test_no_time_includes_a_wait(blocks: list[tuple[float, int]], host_us: float, hiccups: list[float]) -> None:
    """For any delays of the host and any expected times of the launches."""
    with pytest.MonkeyPatch.context() as patch:
        model = _modelled(patch)
        clock = GpuClock(H200)
        clock.blocks([[model.launch(50.0, host_us)] * 2] * 40)
        clock.sequence([model.launch(50.0, host_us)] * 40)
        model.hiccups = list(hiccups)
        found = clock.blocks([[model.launch(t, host_us)] * n for t, n in blocks], min(t for t, _ in blocks))
    late = sum(h > 0 for h in hiccups) > 3
    assert late or found == pytest.approx([t for t, _ in blocks], rel=1e-6, abs=0.5)


@pytest.mark.parametrize("hiccups", [[], [0.0, 0.0, 3000.0], [800.0, 0.0, 0.0, 500.0]])
def test_a_replay_is_the_devices_time_from_the_first_one_on(model: Modelled, hiccups: list[float]) -> None:
    replay = GpuClock(H200).replay([model.launch(t) for t in (5.0, 7.0, 9.0)] * 20)
    model.hiccups = hiccups
    assert [replay() for _ in range(6)] == pytest.approx([7.0] * 6)


def test_without_a_compiler_replays_are_timed_all_the_same(
    model: Modelled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: Device) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(gpu_clock, "dependent_launch", fail)
    clock = GpuClock(H200)
    for _ in range(2):
        assert clock.replay([model.launch(5.0)] * 20)() == pytest.approx(5.0)
    (record,) = caplog.records
    assert record.getMessage().endswith("RuntimeError: no C compiler")
    assert clock.no_dependent_launch, "trials say so"
    assert not GpuClock(H200).no_dependent_launch


def test_a_replay_keeps_its_launches(model: Modelled) -> None:
    """They keep the tensors whose memory the graph reads and writes."""
    launch = model.launch(5.0)
    kept = weakref.ref(launch)
    replay = GpuClock(H200).replay([launch] * 3)
    del launch
    gc.collect()
    assert kept() is not None
    del replay
    gc.collect()
    assert kept() is None


def test_replays_need_little_head_start(model: Modelled) -> None:
    replay = GpuClock(H200).replay([model.launch(8.0)] * 64)
    for _ in range(8):
        replay()
    model.slept_us = 0.0
    for _ in range(10):
        replay()
    assert model.slept_us < 10 * 120


def test_separate_blocks_are_graphs_whose_start_does_not_count(model: Modelled) -> None:
    """As in finals: outside of graphs the launches of one kernel overlap with what is before them, of another not.

    The device's work of a first replay does not count either.
    """
    clock, model.graph_start_us, model.graph_upload_us = GpuClock(H200), 6.0, 4.0
    clock.blocks_of([[model.launch(3.0)] * 5] * 8, separate=True)  # the host's time for first replays is known then
    kernel, overlapping = model.launch(3.3, outside_us=1.5), model.launch(3.4)
    blocks = [[kernel] * 8, [overlapping] * 8, [kernel], [overlapping], [kernel] * 3]
    assert clock.blocks_of(blocks, 3.0, separate=True) == pytest.approx([3.3, 3.4, 3.3, 3.4, 3.3])
    assert clock.blocks_of(blocks, 3.0) == pytest.approx([4.8, 3.4, 4.8, 3.4, 4.8])


def test_a_block_that_cannot_be_captured_is_timed_outside_of_a_graph(model: Modelled) -> None:
    clock, launch = GpuClock(H200), model.launch(5.0)

    def waiting() -> None:
        if model.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        launch()

    assert clock.blocks_of([[waiting] * 4, [launch] * 4], separate=True) == pytest.approx([5.0, 5.0])


@pytest.mark.parametrize("hiccups", [[], [0.0] * 20 + [30_000.0] + [0.0] * 40])
def test_graphs_of_blocks_are_queued_before_the_device_begins_them(model: Modelled, hiccups: list[float]) -> None:
    clock, times = GpuClock(H200), [3.0 + 0.1 * i for i in range(64)]
    clock.blocks_of([[model.launch(3.0)] * 8] * 8, separate=True)
    blocks = [[model.launch(t)] * 8 for t in times]
    model.hiccups = hiccups
    assert clock.blocks_of(blocks, 3.0, separate=True) == pytest.approx(times)
