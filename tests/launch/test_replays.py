"""A dependent launch before replays of CUDA graphs."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from gemmpipe.core.device import arch_device
from gemmpipe.launch import replays
from gemmpipe.launch.replays import dependent_launch, restore_replays, shorten_replays


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
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, as far as this module asks torch for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    replays._launch_or_none.cache_clear()
    yield
    restore_replays()
    replays._launch_or_none.cache_clear()


def _answers(launch: Callable[[], None] | None) -> Callable[[int], Callable[[], None] | None]:
    return lambda index: launch


def test_a_launch_precedes_each_replay_until_it_is_undone(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(replays, "_launch_on", _answers(lambda: calls.append("launch")))
    original = Graph.replay
    assert shorten_replays() == shorten_replays() == ""  # the second call adds no second launch
    Graph(calls).replay()
    Graph(calls).replay()
    assert calls == ["launch", "replay"] * 2
    restore_replays()
    restore_replays()
    assert Graph.replay is original


def test_nothing_changes_without_such_launches(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Graph.replay
    monkeypatch.setattr(replays, "_launch_on", _answers(None))
    assert shorten_replays() == "GPUs before sm_90 have no programmatic dependent launch"

    def fail(index: int) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(replays, "_launch_on", fail)
    assert shorten_replays() == "RuntimeError: no compiler"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shorten_replays() == "torch finds no GPU"
    assert Graph.replay is original


def test_a_failure_on_a_further_gpu_is_one_warning(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def on(index: int) -> Callable[[], None]:
        if index:
            raise RuntimeError("no memory")
        return lambda: calls.append("launch")

    monkeypatch.setattr(replays, "_launch_on", on)
    assert shorten_replays() == ""
    for index in (1, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        Graph(calls).replay()
    assert calls == ["replay", "replay", "launch", "replay"]
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
        assert shorten_replays() == ""
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                given.add_(1)
                graph.replay()
                assert torch.equal(doubled, given * 2)
            torch.cuda.synchronize()
    finally:
        restore_replays()
