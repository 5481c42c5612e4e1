"""A worker's tools for the family whose candidates fail on purpose, on this machine's CPU."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs_at_hand import Cells

from gemmpipe.conditions import Neighbours
from gemmpipe.data import Candidate
from gemmpipe.device import DeviceChoice
from gemmpipe.family import Launch, load_family
from gemmpipe.jobs import Flight, Tools
from gemmpipe.timer import Call, CpuClock, Replay
from gemmpipe.workbench import Setup, Workbench


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    folder = str(Path(__file__).parents[1] / "faulty")
    sys.path.insert(0, folder)
    family = load_family("faulty")
    yield Workbench(
        family, {"faulty": family.implementations[0]}, DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
    )
    sys.path.remove(folder)


@pytest.fixture
def cells() -> Cells:
    return Cells()


@pytest.fixture
def tools(bench: Workbench, cells: Cells) -> Tools:
    bench.launched.clear()
    bench.once_us.clear()
    bench.library_us.clear()
    return Tools(bench=bench, clock=CpuClock(), flight=Flight(cells), neighbours=Neighbours(bench.device))


class Paced:
    """A launch of which its clock knows how long it takes."""

    def __init__(self, launch: Launch, time_us: float) -> None:
        self._launch, self.time_us = launch, time_us

    def __call__(self) -> torch.Tensor:
        return self._launch()


class PacedClock(CpuClock):
    """Tells of each launch the time that it is said to take: no machine is too busy for that."""

    overlaps = True

    def blocks(self, blocks: Sequence[Sequence[Call]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[Call]) -> Replay:
        def once() -> float:
            for launch in launches:
                launch()
            return sum(getattr(launch, "time_us", 1.0) for launch in launches) / len(launches)

        return once


@pytest.fixture
def paced(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Tools with which a candidate takes its PACE_MS, without anybody waiting for it."""
    binder = Setup.binder

    def to(setup: Setup, candidate: Candidate) -> Callable[[int], Paced]:
        knobs = candidate.knobs
        bind = binder(setup, Candidate.of("faulty", {**knobs, "PACE_MS": 0}))
        return lambda index: Paced(bind(index), 1000 * float(str(knobs["PACE_MS"])) or 1.0)

    monkeypatch.setattr(Setup, "binder", to)
    return replace(tools, clock=PacedClock())
