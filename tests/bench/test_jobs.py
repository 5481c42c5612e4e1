"""Jobs in a worker: the candidate in flight, failures as trials, and the operand cache."""

import pytest
import torch
from failing_jobs import PROBLEM, Cells, candidate, finals, screen

from gemmpipe.backends.aten import Torch
from gemmpipe.bench.jobs import SETTING_UP, DeviceContextLost, InFlight, ProbeJob, WorkerContext
from gemmpipe.bench.setup import OperandCache, WorkerBench
from gemmpipe.bench.timer import CpuClock
from gemmpipe.bench.worker import WorkerConfig, make_worker_context
from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.core.nvml import ForeignProcesses


class DeadClock(CpuClock):
    """A device that is lost after the first error."""

    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_lost_device_ends_the_job_and_keeps_its_trials(bench: WorkerBench, cells: Cells) -> None:
    dead = WorkerContext(
        bench=bench, clock=DeadClock(), in_flight=InFlight(cells), foreign_processes=ForeignProcesses(bench.device)
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dead.clock.synchronize()
    assert not dead.device_alive()
    trials: list[Trial] = []
    with pytest.raises(DeviceContextLost) as lost:
        _probe("raise_launch").attempt(dead, trials, 0, lambda _: dead.clock.synchronize())
    assert [t.status for t in lost.value.trials] == [Status.LAUNCH_ERROR]


def _probe(kind: str) -> ProbeJob:
    return ProbeJob(stage="screen", problem=PROBLEM, candidate=candidate(kind))


def test_a_probe_has_a_trial_only_if_it_fails(context: WorkerContext, cells: Cells) -> None:
    assert _probe("right").run(context) == []
    assert cells.positions == [SETTING_UP, 0]
    assert [t.status for t in _probe("raise_odd").run(context)] == [Status.LAUNCH_ERROR]


def test_jobs_without_some_candidates(context: WorkerContext) -> None:
    right, wrong = candidate("right"), candidate("kill")
    job = finals(right, wrong)
    assert job.without({wrong}).candidates == (right,)
    assert job.without({right, wrong}).run(context) == []
    assert screen("right", "kill").without({wrong}).candidates == (right,)


def test_operands_are_the_same_in_every_process(bench: WorkerBench) -> None:
    second = WorkerBench(bench.family, {}, bench.device)
    one, other = bench.set_up(PROBLEM), second.set_up(PROBLEM)
    assert one.inputs(0).x.equal(other.inputs(0).x)
    assert one.weights(1).w.equal(other.weights(1).w)
    assert not one.weights(0).w.equal(one.weights(1).w)


def test_a_worker_has_the_familys_own_kernels_with_any_backends(bench: WorkerBench, cells: Cells) -> None:
    config = WorkerConfig(device=bench.device, family="faulty", backends=(Torch(),), python_path=())
    found = make_worker_context(config, cells).bench  # type: ignore[arg-type]
    labels = [found.implementation(Candidate.of(label, {})).label for label in ("faulty", "torch")]
    assert labels == ["faulty", "torch"]


def test_the_cache_keeps_the_last_used_within_its_budget() -> None:
    cache, made = OperandCache(1000), []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.zeros(400, dtype=torch.int8)

    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name,), lambda name=name: make(name))  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]
