"""What runs on the nodes of a Ray cluster: a seat (a device and its desk), and a compiler that survives its builds.

Where a worker of a Ray cluster sits: its device, its node, and the code and versions that it finds there.
"""

import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from gemmpipe.backends import Backend
from gemmpipe.bench.jobs import Job
from gemmpipe.bench.worker import WorkerConfig
from gemmpipe.core.data import Build, Device, Scalar
from gemmpipe.core.device import cpu_device, gpu_device, versions
from gemmpipe.core.events import Event, Events
from gemmpipe.core.files import read_regular
from gemmpipe.core.nvml import limits
from gemmpipe.core.paths import PACKAGE
from gemmpipe.executors import BuildResult, JobResult, Usage
from gemmpipe.executors.compile_pool import CompilePool
from gemmpipe.executors.local import device_lock
from gemmpipe.executors.supervisor import CrashHistory, WorkerSupervisor

_OWN_CODE = "gemmpipe"
_MAX_BYTES = 100_000_000
_COMPARED_VERSIONS = ("torch", "triton", "cuda", "hip")


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What the driver must know of a worker before it gives it work."""

    device: Device
    facts: Mapping[str, Scalar]
    """What must be equal on all nodes for their times to be comparable."""
    node: str
    """Ray's name of it."""
    address: str
    package: str
    """The folder that gemmpipe was imported from."""
    code: Mapping[str, str]
    """By folder of the user's, and `gemmpipe`: a hash of its Python files; nothing for a folder that is not there."""


def node_info(device: Device, python_path: Sequence[str]) -> NodeInfo:
    """Those of this process, which is a Ray worker."""
    import ray

    known, util = versions(), vars(ray)["util"]
    return NodeInfo(
        device=device,
        facts={**limits(device), **{name: known.get(name) for name in _COMPARED_VERSIONS}},
        node=ray.get_runtime_context().get_node_id(),
        address=util.get_node_ip_address(),
        package=str(PACKAGE),
        code=code_hashes(tuple(python_path)),
    )


@functools.cache
def code_hashes(python_path: tuple[str, ...]) -> Mapping[str, str]:
    """What a run's code is here: gemmpipe's own files, and those at the top of the user's folders."""
    own = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")}  # where that is a link, it is not followed
    found = {_OWN_CODE: _hash(PACKAGE, own)}
    for folder in python_path:
        found[folder] = _hash(Path(folder), Path(folder).glob("*.py")) if Path(folder).is_dir() else ""
    return found


def _hash(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + read_regular(path, "a Python file", _MAX_BYTES))
    return digest.hexdigest()[:12]


def mismatch(other: NodeInfo, first: NodeInfo, code: Mapping[str, str]) -> str | None:
    """Why a worker may not take part: its code is not the driver's, or its times would not be those of the first."""
    for folder, digest in code.items():
        found = other.code.get(folder, "")
        place = other.package if folder == _OWN_CODE else folder
        if not found:
            return f"{other.address} has no {place}: expected on every node of the Ray cluster, under the same path"
        if found != digest:
            return f"{other.address} has other code in {place} than this machine; gemmpipe ships none: install the same"
    for name, value in first.facts.items():
        if other.facts.get(name) != value:
            return (
                f"{other.address} differs from {first.address}: {name} {other.facts.get(name)} instead of {value}; "
                "tune them apart"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class RayWorkerConfig:
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
class WorkerReport:
    """What came out of a seat since it was last asked."""

    messages: list[JobResult]
    events: list[Event]
    backlog: int
    usage: Usage


class RayWorker:
    """One device of a node, and the desk of the process that works on it. Lives in a Ray actor."""

    def __init__(self, config: RayWorkerConfig, name: str) -> None:
        # Processes started here would import the script of Ray's worker as their own main module: a second each.
        vars(sys.modules["__main__"]).pop("__file__", None)
        device = gpu_device(0) if config.gpu else replace(cpu_device(), uuid=name)
        self._device = replace(device, shared=config.shared)
        self._events: list[Event] = []
        events = Events(listeners=[self._events.append])
        self._locks = ExitStack()
        self._python_path = config.python_path
        if config.gpu:  # runs outside Ray must not time on it either; a CPU's cores are Ray's to give
            self._locks.enter_context(device_lock(self._device, events, lambda: None))
        memory = config.memory_pct / 100 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        worker_config = WorkerConfig(
            device=self._device, family=config.family, backends=config.backends, python_path=config.python_path
        )
        self._supervisor = WorkerSupervisor(worker_config, config.timeout_s, int(memory), events, CrashHistory())

    def node_info(self) -> NodeInfo:
        """The device of this seat, its node, and the code that is there."""
        return node_info(self._device, self._python_path)

    def exchange(self, jobs: Sequence[Job], cancel: bool, wait_s: float) -> WorkerReport:
        """Take jobs, and give what is finished; waits for something, at most so long."""
        if cancel:
            self._supervisor.cancel_pending()
        for job in jobs:
            self._supervisor.submit(job)
        deadline = time.monotonic() + wait_s
        messages = self._supervisor.messages()
        while not messages and self._supervisor.backlog and (left := deadline - time.monotonic()) > 0:
            wait(list(self._supervisor.wait_handles()), timeout=min(left, 0.5))
            messages = self._supervisor.messages()
        events, self._events[:] = list(self._events), []
        # Moments on this machine's clock mean nothing elsewhere.
        usage = replace(self._supervisor.usage(), idle=[], ready_at=None)
        return WorkerReport(messages=messages, events=events, backlog=self._supervisor.backlog, usage=usage)


def compile_on_node(build: Build, device: Device, timeout_s: float, python_path: tuple[str, ...]) -> BuildResult:
    """Compile into this node's Triton cache, in a process that may crash or hang."""
    pool = _compilers(device, timeout_s, python_path)
    pool.submit(build)
    pool.ready_pipe.poll(None)
    [built] = pool.done()
    return built


@functools.cache
def _compilers(device: Device, timeout_s: float, python_path: tuple[str, ...]) -> CompilePool:
    return CompilePool(device, 1, timeout_s, python_path)
