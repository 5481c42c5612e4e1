"""One killable process a device: takes jobs, gives back trials, and dies when a candidate kills it."""

import gc
import sys
import time
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from gemmpipe.backends import Backend
from gemmpipe.conditions import Neighbours
from gemmpipe.data import Device, Trial
from gemmpipe.family import load_family
from gemmpipe.interrupt import end_with_the_driver
from gemmpipe.jobs import Flight, Job, Poisoned, Tools
from gemmpipe.timer import clock_for
from gemmpipe.workbench import Workbench

Equip = Callable[["Post", MutableSequence[float]], Tools]
"""What a worker process does first: its tools for this post; the cells say which candidate is in the air."""


def ready_tools(post: "Post", cells: MutableSequence[float]) -> Tools:
    """Tools on this process's device."""
    if post.device.kind == "cpu":
        torch.ones(512, 512).mm(torch.ones(512, 512))  # starts the threads: tens of ms that no candidate should pay
    else:
        torch.cuda.set_device(post.device.index)
    family = load_family(post.family)
    # The family's own are there whatever was chosen: a table that is verified may hold rows of theirs.
    chosen = (i for backend in post.backends for i in backend.implementations(family))
    implementations = {i.label: i for i in (*family.implementations, *chosen)}
    bench = Workbench(family, implementations, post.device)
    return Tools(bench=bench, clock=clock_for(post.device), flight=Flight(cells), neighbours=Neighbours(post.device))


@dataclass(frozen=True, kw_only=True)
class Post:
    """What a worker is set up with: where it works, on which family, with which backends."""

    device: Device
    family: str
    backends: tuple[Backend, ...]
    python_path: tuple[str, ...]
    """Folders for `sys.path`: where the user's own families and backends lie."""
    equip: Equip = ready_tools


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a job: its trials, the seconds by purpose, and why the worker gave up, if it did."""

    trials: list[Trial]
    spent_s: dict[str, float]
    waited: tuple[float, float] = (0.0, 0.0)
    """From when to when the worker had nothing to do before this job, on the monotonic clock."""
    ended: float = 0.0
    """When it was done, on the same clock."""
    lost: str = ""


def main(post: Post, pipe: Connection, cells: MutableSequence[float]) -> None:
    """Serve jobs until told None, or until the device is lost."""
    end_with_the_driver()
    try:
        sys.path[:0] = [p for p in post.python_path if p not in sys.path]
        tools = post.equip(post, cells)
    except Exception as error:  # noqa: BLE001 - told in one line by the driver instead of a traceback a start
        pipe.send(Answer(trials=[], spent_s={}, lost=_text(error)))
        return
    # Collections would fall into measurements; what must go is freed by reference counts.
    gc.collect()
    gc.freeze()
    gc.disable()
    ended = time.monotonic()
    try:
        pipe.send(Answer(trials=[], spent_s={}, ended=ended))
    except BrokenPipeError:  # the driver took it for dead, and has another one
        return
    while (job := _next(pipe)) is not None:
        begun = time.monotonic()
        tools.spent_s.clear()
        answer = replace(_serve(job, tools), waited=(ended, begun))
        gc.collect(0)
        ended = time.monotonic()
        answer.spent_s["between"] = ended - begun - sum(answer.spent_s.values())
        pipe.send(replace(answer, ended=ended))
        if answer.lost:
            break


def _next(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except EOFError:  # the driver is gone, and with it whoever could use the result
        return None
    return job


def _serve(job: Job, tools: Tools) -> Answer:
    try:
        return Answer(trials=job.run(tools), spent_s=dict(tools.spent_s))
    except Poisoned as poisoned:
        return Answer(trials=poisoned.trials, spent_s=dict(tools.spent_s), lost=str(poisoned))
    except torch.OutOfMemoryError as error:
        return Answer(trials=[], spent_s=dict(tools.spent_s), lost=f"out of memory: {error}"[:300])
    except Exception as error:  # noqa: BLE001 - a fault that surfaced after the first launch, whatever its type
        return Answer(trials=[], spent_s=dict(tools.spent_s), lost=tools.bench.set_up_in_words(error))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
