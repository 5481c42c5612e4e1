"""One killable process a device: takes jobs, gives back trials, and dies when a candidate kills it."""

import gc
import sys
import time
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from gemmpipe.backends import Backend
from gemmpipe.bench.jobs import DeviceContextLost, InFlight, Job, WorkerContext
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.bench.timer import clock_for
from gemmpipe.core.data import Device, Trial
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.core.signals import exit_with_driver
from gemmpipe.family import load_family

WorkerContextFactory = Callable[["WorkerConfig", MutableSequence[float]], WorkerContext]
"""What a worker process does first: its tools for this post; the cells say which candidate is in the air."""


def make_worker_context(config: "WorkerConfig", cells: MutableSequence[float]) -> WorkerContext:
    """Tools on this process's device."""
    if config.device.kind == "cpu":
        torch.ones(512, 512).mm(torch.ones(512, 512))  # starts the threads: tens of ms that no candidate should pay
    else:
        torch.cuda.set_device(config.device.index)
    family = load_family(config.family)
    # The family's own are there whatever was chosen: a table that is verified may hold rows of theirs.
    chosen = (i for backend in config.backends for i in backend.implementations(family))
    implementations = {i.label: i for i in (*family.implementations, *chosen)}
    bench = WorkerBench(family, implementations, config.device)
    return WorkerContext(
        bench=bench,
        clock=clock_for(config.device),
        in_flight=InFlight(cells),
        foreign_processes=ForeignProcesses(config.device),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker is set up with: where it works, on which family, with which backends."""

    device: Device
    family: str
    backends: tuple[Backend, ...]
    python_path: tuple[str, ...]
    """Folders for `sys.path`: where the user's own families and backends lie."""
    make_context: WorkerContextFactory = make_worker_context


@dataclass(frozen=True, kw_only=True)
class WorkerReply:
    """What became of a job: its trials, the seconds by purpose, and why the worker gave up, if it did."""

    trials: list[Trial]
    spent_s: dict[str, float]
    idle_interval: tuple[float, float] = (0.0, 0.0)
    """From when to when the worker had nothing to do before this job, on the monotonic clock."""
    ended: float = 0.0
    """When it was done, on the same clock."""
    failure: str = ""


def main(config: WorkerConfig, pipe: Connection, cells: MutableSequence[float]) -> None:
    """Serve jobs until told None, or until the device is lost."""
    exit_with_driver()
    try:
        sys.path[:0] = [p for p in config.python_path if p not in sys.path]
        context = config.make_context(config, cells)
    except Exception as error:  # noqa: BLE001 - told in one line by the driver instead of a traceback a start
        pipe.send(WorkerReply(trials=[], spent_s={}, failure=_text(error)))
        return
    # Collections would fall into measurements; what must go is freed by reference counts.
    gc.collect()
    gc.freeze()
    gc.disable()
    ended = time.monotonic()
    try:
        pipe.send(WorkerReply(trials=[], spent_s={}, ended=ended))
    except BrokenPipeError:  # the driver took it for dead, and has another one
        return
    while (job := _next(pipe)) is not None:
        begun = time.monotonic()
        context.spent_s.clear()
        reply = replace(_serve(job, context), idle_interval=(ended, begun))
        gc.collect(0)
        ended = time.monotonic()
        reply.spent_s["between"] = ended - begun - sum(reply.spent_s.values())
        pipe.send(replace(reply, ended=ended))
        if reply.failure:
            break


def _next(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except EOFError:  # the driver is gone, and with it whoever could use the result
        return None
    return job


def _serve(job: Job, context: WorkerContext) -> WorkerReply:
    try:
        return WorkerReply(trials=job.run(context), spent_s=dict(context.spent_s))
    except DeviceContextLost as poisoned:
        return WorkerReply(trials=poisoned.trials, spent_s=dict(context.spent_s), failure=str(poisoned))
    except torch.OutOfMemoryError as error:
        return WorkerReply(trials=[], spent_s=dict(context.spent_s), failure=f"out of memory: {error}"[:300])
    except Exception as error:  # noqa: BLE001 - a fault that surfaced after the first launch, whatever its type
        return WorkerReply(trials=[], spent_s=dict(context.spent_s), failure=context.bench.describe_setup_error(error))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
