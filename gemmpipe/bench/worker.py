"""The worker process, one per device: it runs jobs and returns trials, and may be killed or crashed by a candidate."""

import gc
import sys
import time
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from gemmpipe.backends import Backend
from gemmpipe.bench.gpu_clock import clock_for
from gemmpipe.bench.jobs import DeviceContextLost, InFlight, Job, WorkerContext
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.core.cpu_load import ForeignProcessorTime
from gemmpipe.core.data import Device, Trial
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.core.signals import exit_with_driver
from gemmpipe.family import load_family

WorkerContextFactory = Callable[["WorkerConfig", MutableSequence[float]], WorkerContext]
"""Makes the context of a worker process; the cells are the shared memory of `InFlight`."""


def make_worker_context(config: "WorkerConfig", cells: MutableSequence[float]) -> WorkerContext:
    """The context of a worker process on its device."""
    import torch

    if config.device.kind == "cpu":
        torch.ones(512, 512).mm(torch.ones(512, 512))  # starts torch's threads: tens of ms, not part of a measurement
    else:
        torch.cuda.set_device(config.device.index)
    family = load_family(config.family)
    # The family's own implementations are always included: a table to verify may have rows of them.
    chosen = (i for backend in config.backends for i in backend.implementations(family))
    implementations = {i.label: i for i in (*family.implementations, *chosen)}
    bench = WorkerBench(family, implementations, config.device)
    return WorkerContext(
        bench=bench,
        clock=clock_for(config.device),
        in_flight=InFlight(cells),
        foreign_processes=ForeignProcessorTime() if config.device.kind == "cpu" else ForeignProcesses(config.device),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker."""

    device: Device
    family: str
    backends: tuple[Backend, ...]
    python_path: tuple[str, ...]
    """Folders for `sys.path`, with the user's own families and backends."""
    make_context: WorkerContextFactory = make_worker_context


@dataclass(frozen=True, kw_only=True)
class WorkerReply:
    """The result of a job: its trials, seconds by purpose, and the reason if the worker ends."""

    trials: list[Trial]
    spent_s: dict[str, float]
    idle_interval: tuple[float, float] = (0.0, 0.0)
    """The idle interval (start, end) before this job, on the monotonic clock."""
    ended: float = 0.0
    """When the job ended, on the same clock."""
    failure: str = ""


def main(config: WorkerConfig, pipe: Connection, cells: MutableSequence[float]) -> None:
    """Run jobs from `pipe` until None, or until the device is lost."""
    exit_with_driver()
    try:
        sys.path[:0] = [p for p in config.python_path if p not in sys.path]
        context = config.make_context(config, cells)
    except Exception as error:  # noqa: BLE001 - reported in one line by the driver, not as a traceback per start
        _send(pipe, WorkerReply(trials=[], spent_s={}, failure=_text(error)))
        return
    # Garbage collection would disturb measurements; memory is freed by reference counts.
    gc.collect()
    gc.freeze()
    gc.disable()
    ended = time.monotonic()
    if not _send(pipe, WorkerReply(trials=[], spent_s={}, ended=ended)):
        return
    while (job := _next(pipe)) is not None:
        begun = time.monotonic()
        context.spent_s.clear()
        reply = replace(_serve(job, context), idle_interval=(ended, begun))
        gc.collect(0)
        ended = time.monotonic()
        reply.spent_s["between"] = ended - begun - sum(reply.spent_s.values())
        if not _send(pipe, replace(reply, ended=ended)) or reply.failure:
            break


def _send(pipe: Connection, reply: WorkerReply) -> bool:
    """False if nothing receives it: the driver was killed, or has replaced this worker."""
    try:
        pipe.send(reply)
    except OSError:
        return False
    return True


def _next(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except (EOFError, OSError):  # the driver has ended
        return None
    return job


def _serve(job: Job, context: WorkerContext) -> WorkerReply:
    import torch

    try:
        return WorkerReply(trials=job.run(context), spent_s=dict(context.spent_s))
    except DeviceContextLost as lost:
        return WorkerReply(trials=lost.trials, spent_s=dict(context.spent_s), failure=str(lost))
    except torch.OutOfMemoryError as error:
        return WorkerReply(trials=[], spent_s=dict(context.spent_s), failure=f"out of memory: {error}"[:300])
    except Exception as error:  # noqa: BLE001 - any error outside the attempts on single candidates
        return WorkerReply(trials=[], spent_s=dict(context.spent_s), failure=context.bench.describe_setup_error(error))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
