"""Dispatch of a stage's jobs to workers, each problem to its own device, and monitoring of the devices meanwhile."""

import time
from collections.abc import MutableSequence

from gemmpipe.bench.jobs import Job
from gemmpipe.core.data import Device
from gemmpipe.core.nvml import conditions
from gemmpipe.journal import Journal
from gemmpipe.stages import Context

_QUEUE_DEPTH = 2  # jobs per worker: the running one, and the next so that it need not wait


def dispatch_jobs(queue: MutableSequence[Job], context: Context) -> None:
    """Submits the next jobs to the workers of their problems, or assigns a free worker; removes them from the queue."""
    depth = _QUEUE_DEPTH if context.cpu_budget is None else 1  # a job that is sent runs, also after the budget
    for worker in range(len(context.pool.devices)):
        while context.pool.backlog(worker) < depth:
            job = next((j for j in queue if context.worker_of(j.problem.id) in (worker, None)), None)
            if job is None:
                break
            queue.remove(job)
            if context.worker_of(job.problem.id) is None:
                context.assign(job.problem.id, worker)
            context.journal.launch(job.stage, job.problem.id, list(job.candidates))
            context.pool.submit(job, worker)


_SAMPLE_S = 5.0  # the least time between two samples


class DeviceMonitor:
    """Writes `conditions` rows (clocks, temperature, power, processes) of CUDA devices into the journal, if known."""

    def __init__(self, journal: Journal, devices: tuple[Device, ...]) -> None:
        self._journal = journal
        self._devices = tuple(device for device in devices if device.kind == "cuda")
        self._sampled = -_SAMPLE_S

    def sample(self) -> None:
        """Takes a sample, at most one per `_SAMPLE_S`."""
        if not self._devices or time.monotonic() - self._sampled < _SAMPLE_S:
            return
        self._sampled = time.monotonic()
        for device in self._devices:
            state = conditions(device)
            if any(value is not None for value in state.values()):
                self._journal.write("conditions", device=device.uuid or device.torch_name, **state)
