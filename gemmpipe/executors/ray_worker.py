"""The part of the Ray executor that runs on the nodes: an actor with one supervised worker, and compile tasks.

A node reports its device, code and versions (NodeInfo), which must be equal on all nodes of a run.
"""

import functools
import hashlib
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
from gemmpipe.executors.supervisor import CrashHistory, WorkerSupervisor, memory_limit_bytes

_OWN_CODE = "gemmpipe"
_MAX_BYTES = 100_000_000
_COMPARED_VERSIONS = ("torch", "triton", "cuda", "hip")


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """The properties of a worker that the driver checks before it sends jobs."""

    device: Device
    facts: Mapping[str, Scalar]
    """Facts that must be equal on all nodes for comparable times."""
    node: str
    """Ray's node id."""
    address: str
    package: str
    """The folder from which gemmpipe was imported."""
    code: Mapping[str, str]
    """Hash of the Python files of each of the user's folders and of `gemmpipe`; "" for a missing folder."""


def node_info(device: Device, python_path: Sequence[str]) -> NodeInfo:
    """The properties of this process, which is a Ray worker."""
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
    """Hashes of a run's code on this node: gemmpipe's own files, and those at the top of the user's folders."""
    own = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")}  # rglob does not follow a link to kernels
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
    """The reason why a worker cannot take part (other code than the driver, incomparable times), or None."""
    for folder, digest in code.items():
        found = other.code.get(folder, "")
        path = other.package if folder == _OWN_CODE else folder
        if not found:
            return f"{other.address} has no {path}: expected on every node of the Ray cluster, under the same path"
        if found != digest:
            return f"{other.address} has other code in {path} than this machine; gemmpipe ships none: install the same"
    for name, value in first.facts.items():
        if other.facts.get(name) != value:
            return (
                f"{other.address} differs from {first.address}: {name} {other.facts.get(name)} instead of {value}; "
                "tune them separately"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class RayWorkerConfig:
    """Configuration of a Ray worker."""

    family: str
    backends: tuple[Backend, ...]
    python_path: tuple[str, ...]
    timeout_s: float | None
    memory_pct: float
    gpu: bool
    shared: bool
    """True if other work uses the device too."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """Results and events of a worker since the last exchange."""

    messages: list[JobResult]
    events: list[Event]
    backlog: int
    usage: Usage


class RayWorker:
    """A Ray actor with one device of a node and the supervisor of its worker process."""

    def __init__(self, config: RayWorkerConfig, name: str) -> None:
        # Child processes would import the script of Ray's worker as their main module, which takes a second each.
        vars(sys.modules["__main__"]).pop("__file__", None)
        device = gpu_device(0) if config.gpu else replace(cpu_device(), uuid=name)
        self._device = replace(device, shared=config.shared)
        self._events: list[Event] = []
        events = Events(listeners=[self._events.append])
        self._locks = ExitStack()
        self._python_path = config.python_path
        if config.gpu:  # excludes runs outside Ray as well; a CPU's cores are assigned by Ray
            self._locks.enter_context(device_lock(self._device, events, lambda: None))
        memory_bytes = memory_limit_bytes(config.memory_pct)
        worker_config = WorkerConfig(
            device=self._device, family=config.family, backends=config.backends, python_path=config.python_path
        )
        self._supervisor = WorkerSupervisor(worker_config, config.timeout_s, memory_bytes, events, CrashHistory())

    def node_info(self) -> NodeInfo:
        """The device of this worker, its node, and the code on it."""
        return node_info(self._device, self._python_path)

    def exchange(self, jobs: Sequence[Job], cancel: bool, wait_s: float) -> WorkerReport:
        """Accept jobs and return results; waits up to `wait_s` for a result."""
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
        # Times on this machine's monotonic clock have no meaning on another one.
        usage = replace(self._supervisor.usage(), idle=[], ready_at=None)
        return WorkerReport(messages=messages, events=events, backlog=self._supervisor.backlog, usage=usage)


def compile_on_node(build: Build, device: Device, timeout_s: float, python_path: tuple[str, ...]) -> BuildResult:
    """Compile into this node's Triton cache, in a separate process that may crash or hang."""
    pool = _compilers(device, timeout_s, python_path)
    pool.submit(build)
    pool.ready_pipe.poll(None)
    [built] = pool.done()
    return built


@functools.cache
def _compilers(device: Device, timeout_s: float, python_path: tuple[str, ...]) -> CompilePool:
    return CompilePool(device, 1, timeout_s, python_path)
