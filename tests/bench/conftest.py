"""A worker context on this machine's CPU, for the family with candidates that fail on purpose."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from failing_jobs import Cells, Paced, PacedClock

from gemmpipe.bench.jobs import InFlight, WorkerContext
from gemmpipe.bench.setup import ProblemSetup, WorkerBench
from gemmpipe.bench.timer import CpuClock
from gemmpipe.core.data import Candidate
from gemmpipe.core.device import DeviceChoice
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.family import load_family


@pytest.fixture(scope="module")
def bench() -> Iterator[WorkerBench]:
    folder = str(Path(__file__).parents[1] / "faulty")
    sys.path.insert(0, folder)
    family = load_family("faulty")
    yield WorkerBench(
        family, {"faulty": family.implementations[0]}, DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
    )
    sys.path.remove(folder)


@pytest.fixture
def cells() -> Cells:
    return Cells()


@pytest.fixture
def context(bench: WorkerBench, cells: Cells) -> WorkerContext:
    bench.launch_counts.clear()
    bench.single_launch_us.clear()
    bench.library_us.clear()
    return WorkerContext(
        bench=bench, clock=CpuClock(), in_flight=InFlight(cells), foreign_processes=ForeignProcesses(bench.device)
    )


@pytest.fixture
def paced(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> WorkerContext:
    """A context in which the time of a candidate is its PACE_MS, without real waiting."""
    binder = ProblemSetup.binder

    def to(setup: ProblemSetup, candidate: Candidate, order: str | None = None) -> Callable[[int], Paced]:
        knobs = candidate.knobs
        bind = binder(setup, Candidate.of("faulty", {**knobs, "PACE_MS": 0}), order)
        return lambda index: Paced(bind(index), 1000 * float(str(knobs["PACE_MS"])) or 1.0)

    monkeypatch.setattr(ProblemSetup, "binder", to)
    return replace(context, clock=PacedClock())
