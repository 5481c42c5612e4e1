"""Giving jobs of a stage to the workers: each problem to the one on whose device it is timed.

What the devices go through while they are timed: clocks, temperature, power and processes, every few seconds.
"""

import time
from collections.abc import MutableSequence

from gemmpipe.bench.jobs import Job
from gemmpipe.core.data import Device
from gemmpipe.core.nvml import conditions
from gemmpipe.journal import Journal
from gemmpipe.stages import Context

_QUEUE_DEPTH = 2  # jobs a worker has: the one in hand, and the next so that it need not wait


def dispatch_jobs(queue: MutableSequence[Job], context: Context) -> None:
    """Give the next jobs to who has these problems, or to whoever has room where nobody does; they leave the queue."""
    for worker in range(len(context.pool.devices)):
        while context.pool.backlog(worker) < _QUEUE_DEPTH:
            job = next((j for j in queue if context.worker_of(j.problem.id) in (worker, None)), None)
            if job is None:
                break
            queue.remove(job)
            if context.worker_of(job.problem.id) is None:
                context.assign(job.problem.id, worker)
            context.journal.launch(job.stage, job.problem.id, list(job.candidates))
            context.pool.submit(job, worker)


_SAMPLE_S = 5.0


class DeviceMonitor:
    """Writes `conditions` rows into the journal; nothing for devices of which nothing is known."""

    def __init__(self, journal: Journal, devices: tuple[Device, ...]) -> None:
        self._journal = journal
        self._devices = tuple(device for device in devices if device.kind == "cuda")
        self._sampled = -_SAMPLE_S

    def sample(self) -> None:
        """Look, unless that was done just now."""
        if not self._devices or time.monotonic() - self._sampled < _SAMPLE_S:
            return
        self._sampled = time.monotonic()
        for device in self._devices:
            state = conditions(device)
            if any(value is not None for value in state.values()):
                self._journal.write("conditions", device=device.uuid or device.torch_name, **state)
