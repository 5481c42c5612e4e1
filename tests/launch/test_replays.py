"""A dependent launch before replays of CUDA graphs."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from gemmpipe.core.data import Device
from gemmpipe.core.device import arch_device
from gemmpipe.launch import replays
from gemmpipe.launch.build import compile_kernel
from gemmpipe.launch.replays import (
    dependent_build,
    dependent_launch,
    no_dependent_launch_reason,
    restore_replays,
    shorten_replays,
)


@pytest.mark.parametrize("gfx", ["sm_80", "sm_89", "gfx942"])
def test_other_gpus_have_no_dependent_launches(gfx: str) -> None:
    device = arch_device("gfx942") if gfx.startswith("gfx") else replace(arch_device("sm_90"), gfx=gfx)
    assert dependent_launch(device) is None


class Graph:
    """torch's class of graphs, whose replays are counted."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def replay(self) -> None:
        self._calls.append("replay")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches and replays, of GPU 0 unless a test sets another one; GPU 1 fails, GPU 2 has no dependent launches."""
    found: list[str] = []

    def on(device: Device) -> Callable[[], None] | None:
        if device.index == 1:
            raise RuntimeError("no memory")
        return None if device.index else lambda: found.append("launch")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "capture" in found)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(replays, "gpu_device", lambda index: replace(arch_device("sm_90"), index=index))
    monkeypatch.setattr(replays, "dependent_launch", on)
    replays._launch_on.cache_clear()
    yield found
    restore_replays()
    replays._launch_on.cache_clear()


def test_a_launch_precedes_each_replay_until_it_is_undone(calls: list[str]) -> None:
    original = Graph.replay
    shorten_replays()
    shorten_replays()  # adds no second launch
    assert calls == [], "CUDA is not initialised before a replay"
    Graph(calls).replay()
    Graph(calls).replay()
    assert calls == ["launch", "replay"] * 2
    calls[:] = ["capture"]
    Graph(calls).replay()
    assert calls == ["capture", "replay"]
    restore_replays()
    restore_replays()
    assert Graph.replay is original


def test_another_replacement_stays(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_replays()
    ours = Graph.replay
    with monkeypatch.context() as other:
        other.setattr(Graph, "replay", lambda self: ours(self))
        theirs = Graph.replay
        restore_replays()
        assert Graph.replay is theirs
    assert Graph.replay is ours


def test_the_kernel_waits_for_the_one_before_it() -> None:
    """Else a graph could begin before that one has written what the graph reads."""
    device = arch_device("sm_90")
    assert no_dependent_launch_reason(device) == ""
    build = dependent_build()
    assert "griddepcontrol.wait" in compile_kernel(build, device).asm["ptx"]
    assert ("launch_pdl", True) in build.options


def test_replays_work_without_the_launch(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shorten_replays()
    for index in (1, 1, 2, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        Graph(calls).replay()
    assert calls == ["replay", "replay", "replay", "launch", "replay"]
    assert [record.getMessage() for record in caplog.records] == [
        "no dependent launch before replays on GPU 1: RuntimeError: no memory"
    ]


@pytest.mark.gpu
def test_results_of_replays_stay() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with programmatic dependent launch")
    given, side = torch.arange(8, device="cuda", dtype=torch.float32), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = given * 2
    try:
        shorten_replays()
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                given.add_(1)
                graph.replay()
                assert torch.equal(doubled, given * 2)
            torch.cuda.synchronize()
    finally:
        restore_replays()
