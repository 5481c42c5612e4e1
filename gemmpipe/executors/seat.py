"""What runs on the nodes of a Ray cluster: a seat (a device and its desk), and a compiler that survives its builds."""

import functools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from gemmpipe.backends import Backend
from gemmpipe.data import Build, Device
from gemmpipe.device import cpu_device, gpu_device
from gemmpipe.events import Event, Events
from gemmpipe.executors import Built, Finished, Usage
from gemmpipe.executors.compiling import Compilers
from gemmpipe.executors.desk import Desk
from gemmpipe.executors.holding import locked_device
from gemmpipe.executors.ledger import Ledger
from gemmpipe.executors.whereabouts import Whereabouts, here
from gemmpipe.jobs import Job
from gemmpipe.worker import Post


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a seat is set up with."""

    family: str
    backends: tuple[Backend, ...]
    python_path: tuple[str, ...]
    timeout_s: float | None
    memory_pct: float
    gpu: bool
    shared: bool
    """Whether other work runs on the device meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What came out of a seat since it was last asked."""

    messages: list[Finished]
    events: list[Event]
    backlog: int
    usage: Usage


class Seat:
    """One device of a node, and the desk of the process that works on it. Lives in a Ray actor."""

    def __init__(self, lease: Lease, place: str) -> None:
        # Processes started here would import the script of Ray's worker as their own main module: a second each.
        vars(sys.modules["__main__"]).pop("__file__", None)
        device = gpu_device(0) if lease.gpu else replace(cpu_device(), uuid=place)
        self._device = replace(device, shared=lease.shared)
        self._events: list[Event] = []
        events = Events(listeners=[self._events.append])
        self._held = ExitStack()
        self._python_path = lease.python_path
        if lease.gpu:  # runs outside Ray must not time on it either; a CPU's cores are Ray's to give
            self._held.enter_context(locked_device(self._device, events, lambda: None))
        memory = lease.memory_pct / 100 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        post = Post(device=self._device, family=lease.family, backends=lease.backends, python_path=lease.python_path)
        self._desk = Desk(post, lease.timeout_s, int(memory), events, Ledger())

    def whereabouts(self) -> Whereabouts:
        """The device of this seat, its node, and the code that is there."""
        return here(self._device, self._python_path)

    def exchange(self, jobs: Sequence[Job], forget: bool, wait_s: float) -> Heard:
        """Take jobs, and give what is finished; waits for something, at most so long."""
        if forget:
            self._desk.forget_queued()
        for job in jobs:
            self._desk.submit(job)
        deadline = time.monotonic() + wait_s
        messages = self._desk.messages()
        while not messages and self._desk.backlog and (left := deadline - time.monotonic()) > 0:
            wait(list(self._desk.ears()), timeout=min(left, 0.5))
            messages = self._desk.messages()
        events, self._events[:] = list(self._events), []
        # Moments on this machine's clock mean nothing elsewhere.
        usage = replace(self._desk.usage(), idle=[], ready_at=None)
        return Heard(messages=messages, events=events, backlog=self._desk.backlog, usage=usage)


def compile_there(build: Build, device: Device, timeout_s: float, python_path: tuple[str, ...]) -> Built:
    """Compile into this node's Triton cache, in a process that may crash or hang."""
    compilers = _compilers(device, timeout_s, python_path)
    compilers.submit(build)
    compilers.bell.poll(None)
    [built] = compilers.done()
    return built


@functools.cache
def _compilers(device: Device, timeout_s: float, python_path: tuple[str, ...]) -> Compilers:
    return Compilers(device, 1, timeout_s, python_path)
