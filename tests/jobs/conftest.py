"""A worker's tools for the family whose candidates fail on purpose, on this machine's CPU."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmpipe.conditions import Neighbours
from gemmpipe.device import DeviceChoice
from gemmpipe.family import load_family
from gemmpipe.jobs import Flight, Tools
from gemmpipe.timer import CpuClock
from gemmpipe.workbench import Workbench


class Cells(list[float]):
    """Remembers every position."""

    def __init__(self) -> None:
        super().__init__([0.0, 0.0])
        self.positions: list[float] = []

    def __setitem__(self, index: object, value: object) -> None:
        super().__setitem__(index, value)  # type: ignore[index, assignment]
        if index == 0:
            self.positions.append(value)  # type: ignore[arg-type]


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
