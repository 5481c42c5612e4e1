"""A Ray cluster: a seat (device, desk, killable worker) on each of its GPUs, builds on its cores, one driver here."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gemmpipe.backends import Backend
from gemmpipe.data import Device
from gemmpipe.device import DeviceChoice
from gemmpipe.errors import MOST_PROCESSES, EnvironmentProblem, UserError, at_least, at_most
from gemmpipe.events import Events
from gemmpipe.executors import Executor
from gemmpipe.executors.ray_pool import RayPool
from gemmpipe.executors.seat import Lease

_KNOCK_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ray(Executor):
    """Runs on a Ray cluster."""

    address: str | None
    """Of a running cluster; None: one on this machine, started for the run."""
    workers: int | None
    """Devices at most; None: all GPUs of the cluster, or one CPU worker a node."""
    compile_workers: int | None
    """Builds at a time; None: as many as the cluster has cores."""
    shared_cache: bool
    """Whether all nodes see one Triton cache: then a build is compiled once, else on every node that has a device."""
    timeout_s: float | None
    """One candidate's launch may take so long; None: no limit."""
    compile_timeout_s: float
    memory_pct: float
    """A worker that holds more of its machine's memory is stopped."""
    join_s: float
    """A lost worker's work waits so long for a new node."""

    def __post_init__(self) -> None:
        at_least(1, workers=self.workers, compile_workers=self.compile_workers, memory_pct=self.memory_pct)
        at_most(MOST_PROCESSES, workers=self.workers, compile_workers=self.compile_workers)
        at_least(0.1, timeout_s=self.timeout_s, compile_timeout_s=self.compile_timeout_s, join_s=self.join_s)

    def find(self, choice: DeviceChoice) -> tuple[Device, ...]:
        """One device of the cluster's, which the others must be like.

        Raises UserError without Ray, EnvironmentProblem when the cluster cannot be reached or has no such device.
        """
        if choice.index is not None:
            raise UserError(f"device.index={choice.named}: the Ray cluster gives the devices; use executor.workers")
        ray = self._join()
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if choice.kind == "cpu" or (choice.kind == "auto" and not gpus):
            return DeviceChoice(kind="cpu", index=None, shared=choice.shared).find()
        if not gpus:
            raise EnvironmentProblem(f"device.kind={choice.kind}: the Ray cluster has no GPU; use device.kind=auto")
        found: tuple[Device, ...] = ray.get(ray.remote(_find).options(num_gpus=1, num_cpus=0).remote(choice))
        return found

    def start(
        self,
        devices: tuple[Device, ...],
        family: str,
        backends: tuple[Backend, ...],
        python_path: tuple[str, ...],
        events: Events,
        check: Callable[[], None],
    ) -> RayPool:
        ray = self._join()
        gpu = devices[0].kind != "cpu"
        # A head is often started with no cores to give.
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
        if not gpu and not nodes:
            raise EnvironmentProblem("no node of the Ray cluster has a core to give (ray start --num-cpus)")
        most = int(ray.cluster_resources().get("GPU", 0)) if gpu else nodes
        if gpu and self.workers and self.workers > most:
            raise EnvironmentProblem(f"executor.workers={self.workers}: the Ray cluster has {most} GPUs")
        lease = Lease(
            family=family,
            backends=backends,
            python_path=tuple(map(os.path.abspath, python_path)),
            timeout_s=self.timeout_s,
            memory_pct=self.memory_pct,
            gpu=gpu,
            shared=devices[0].shared,
        )
        return RayPool(self, lease, self.workers or most, events, check)

    def _join(self) -> Any:
        """Ray, connected to the cluster."""
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("executor=ray needs the package 'ray': pip install 'gemmpipe[ray]'") from None
        if ray.is_initialized():
            return ray
        # A core more than the CPU workers hold, so that there is one to compile on.
        cores = max(os.cpu_count() or 1, (self.workers or 1) + 1)
        words: dict[str, Any] = {"address": self.address}
        if self.address is None:
            words = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        if self.address is not None:
            _knock(self.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a tuner tells nobody what it tunes
        with _signals_kept():
            try:
                ray.init(log_to_driver=False, configure_logging=False, **words)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise EnvironmentProblem(
                    f"executor.address={self.address}: no Ray cluster there: {error}{self._of_tokens()}"
                ) from None
        return ray

    def _of_tokens(self) -> str:
        """Ray (2.60) shows its token to a cluster at an address only where it is told to, and does not say so."""
        if self.address in (None, "auto") or "RAY_AUTH_MODE" in os.environ:
            return ""
        return " (something listens there; a cluster that asks for a token needs RAY_AUTH_MODE=token here)"


def _knock(address: str) -> None:
    """Find out within seconds whether anything listens at `host:port`: Ray itself tries for minutes.

    Raises EnvironmentProblem.
    """
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return  # `auto`, or what Ray shall judge
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S):
            pass
    except (OSError, OverflowError, UnicodeError) as error:
        raise EnvironmentProblem(f"executor.address={address}: no Ray cluster there: {error}") from None


def _find(choice: DeviceChoice) -> tuple[Device, ...]:
    return DeviceChoice(kind=choice.kind, index=0, shared=choice.shared).find()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and ends the process; stopping a run is ours."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in kept.items():
            try:
                signal.signal(number, handler)
            except ValueError:  # not in the main thread: nothing was taken
                return
