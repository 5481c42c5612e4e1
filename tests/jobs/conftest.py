"""A worker's tools for the family whose candidates fail on purpose, on this machine's CPU."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs_at_hand import Cells, Paced, PacedClock

from gemmpipe.conditions import Neighbours
from gemmpipe.data import Candidate
from gemmpipe.device import DeviceChoice
from gemmpipe.family import load_family
from gemmpipe.jobs import Flight, Tools
from gemmpipe.timer import CpuClock
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


@pytest.fixture
def paced(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Tools with which a candidate takes its PACE_MS, without anybody waiting for it."""
    binder = Setup.binder

    def to(setup: Setup, candidate: Candidate, order: str | None = None) -> Callable[[int], Paced]:
        knobs = candidate.knobs
        bind = binder(setup, Candidate.of("faulty", {**knobs, "PACE_MS": 0}), order)
        return lambda index: Paced(bind(index), 1000 * float(str(knobs["PACE_MS"])) or 1.0)

    monkeypatch.setattr(Setup, "binder", to)
    return replace(tools, clock=PacedClock())
