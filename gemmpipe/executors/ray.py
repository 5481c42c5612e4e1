"""The driver's part of the Ray executor: a supervised worker on each GPU of a cluster.

A lost node loses no work: its unfinished jobs go to a new actor, or to another worker. `ray_worker` runs on the nodes,
`ray_builds` compiles on their cores.
"""

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from gemmpipe.backends import Backend
from gemmpipe.bench.jobs import Job
from gemmpipe.core.data import Build, Candidate, Device
from gemmpipe.core.device import DeviceChoice
from gemmpipe.core.errors import MAX_PROCESSES, EnvironmentProblem, UserError, check_at_least, check_at_most
from gemmpipe.core.events import Events
from gemmpipe.executors import BuildResult, Executor, JobResult, Pool, Usage
from gemmpipe.executors.ray_builds import BuildTasks
from gemmpipe.executors.ray_worker import (
    NodeInfo,
    RayWorker,
    RayWorkerConfig,
    WorkerReport,
    code_hashes,
    mismatch,
)

_EXCHANGE_S = 2.0
_POLL_S = 0.5
_BUSY_POLL_S = 0.02
_MAX_LOSSES = 5  # consecutive losses of a worker without a result, after which the run fails
_CONNECT_TIMEOUT_S = 10.0


@dataclass(kw_only=True)
class RayWorkerHandle:
    """One worker of the run, as successive actors on possibly different nodes."""

    name: str
    actor: Any = None
    address: str = ""
    """The address of its node; "" until the actor has reported it, and no jobs are sent before."""
    reply: Any = None
    """Ray's reference of the pending `exchange` or `node_info` call."""
    outbox: deque[Job] = field(default_factory=deque)
    sent: list[tuple[Job, set[Candidate]]] = field(default_factory=list)
    """Jobs sent, each with its candidates without a trial."""
    backlog: int = 0
    cancel: bool = False
    losses: int = 0
    lost_at: float | None = None
    """When it was lost, while it waits for a new actor; else None."""
    replacement: "RayWorkerHandle | None" = None
    usage: Usage = field(default_factory=lambda: Usage(name=""))

    def mark_finished(self, message: JobResult) -> None:
        """Remove the candidates with a result in `message` from the sent jobs."""
        finished = {trial.candidate for trial in message.trials}
        if message.complete:
            finished |= set(message.job.candidates)
        same = (message.job.stage, message.job.problem.id)
        for job, open_ in self.sent:
            if (job.stage, job.problem.id) == same:
                open_ -= finished
        self.sent = [(job, open_) for job, open_ in self.sent if open_]

    def unfinished(self) -> list[Job]:
        """The unfinished parts of the sent jobs, which are no longer counted as sent."""
        left = [job.without(set(job.candidates) - open_) for job, open_ in self.sent]
        self.sent, self.backlog = [], 0
        return left


class RayPool(Pool):
    """Workers on a cluster. The unfinished jobs of a lost worker are repeated on a new actor or by another worker."""

    def __init__(
        self, executor: "Ray", config: RayWorkerConfig, workers: int, events: Events, check: Callable[[], None]
    ) -> None:
        import ray

        self._ray: Any = ray
        self._executor = executor
        self._config = config
        self._events = events
        # Set before anything is unpickled: jobs and backends may use the user's own classes.
        folders = [*config.python_path, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}
        self._inbox: list[BuildResult | JobResult] = []
        self.builds_done = []
        self._began = time.monotonic()
        self._workers = [RayWorkerHandle(name=f"place-{number}") for number in range(workers)]
        for handle in self._workers:
            self._start_actor(handle)
        nodes_info = self._wait_for_nodes(check)
        self.devices = tuple(each.device for each in nodes_info)
        self._first, self._code = nodes_info[0], code_hashes(config.python_path)
        for handle, each in zip(self._workers, nodes_info, strict=True):
            if why := mismatch(each, self._first, self._code):
                raise EnvironmentProblem(why)
            handle.address = each.address
        nodes = [""] if executor.shared_cache else sorted({each.node for each in nodes_info})
        self._tasks = BuildTasks(
            slots=executor.compile_workers,
            timeout_s=executor.compile_timeout_s,
            device=self.devices[0],
            nodes=nodes,
            environment=self._environment,
            python_path=config.python_path,
            began=self._began,
        )

    def _start_actor(self, handle: RayWorkerHandle) -> None:
        """Start an actor, which waits for a device of the cluster."""
        handle.address = ""
        resources = (
            {"num_gpus": 1, "num_cpus": 0} if self._config.gpu else {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        )
        actor = self._ray.remote(RayWorker).options(max_restarts=0, runtime_env=self._environment, **resources)
        handle.actor = actor.remote(self._config, handle.name)

    def _wait_for_nodes(self, check: Callable[[], None]) -> Sequence[NodeInfo]:
        """The nodes of all workers, as soon as each has a device. Raises all errors of `check`."""
        found = [handle.actor.node_info.remote() for handle in self._workers]
        reported = False
        while True:
            _, waiting = self._ray.wait(found, num_returns=len(found), timeout=_POLL_S)
            if not waiting:
                break
            if not reported and time.monotonic() - self._began > 20:
                reported = True
                self._events.emit("line", f"waiting for {len(waiting)} of {len(found)} workers of the Ray cluster")
            check()
        try:
            nodes_info: Sequence[NodeInfo] = self._ray.get(found)
        except self._ray.exceptions.RayError as error:
            raise EnvironmentProblem(
                f"a worker cannot start on the Ray cluster: {_reason(error)}; gemmpipe ships no code: every node needs "
                "the same installation"
            ) from None
        return nodes_info

    def submit(self, job: Job, worker: int) -> None:
        if job.candidates:
            self._worker(worker).outbox.append(job)
        else:
            self._inbox.append(JobResult(job=job, trials=()))

    def _worker(self, worker: int) -> RayWorkerHandle:
        handle = self._workers[worker]
        while handle.replacement is not None:
            handle = handle.replacement
        return handle

    def backlog(self, worker: int) -> int:
        handle = self._worker(worker)
        return len(handle.outbox) + handle.backlog

    def cancel_pending(self, worker: int) -> None:
        handle = self._worker(worker)
        handle.outbox.clear()
        handle.cancel = True

    def poll(self, timeout_s: float, handles: Sequence[Connection | int] = ()) -> Sequence[BuildResult | JobResult]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._exchange()
            self._tasks.start_more()
            messages, self._inbox = self._inbox, []
            left = deadline - time.monotonic()
            if messages or left <= 0 or wait(handles, timeout=0):
                return messages
            pending = {handle.reply: handle for handle in self._workers if handle.reply is not None}
            references = [*pending, *self._tasks.running]
            if not references:
                time.sleep(min(left, 0.05))
                continue
            poll_s = _BUSY_POLL_S if handles else _POLL_S  # Ray cannot wait for other handles
            ready, _ = self._ray.wait(references, num_returns=1, timeout=min(left, poll_s))
            for reference in ready:
                if reference in pending:
                    self._take_reply(pending[reference])
                elif (built := self._tasks.take(reference)) is not None:
                    self.builds_done.append(time.monotonic())
                    self._inbox.append(built)

    def _exchange(self) -> None:
        """Send jobs to workers without a pending call; hand over the work of those without a node for too long."""
        for handle in self._workers:
            if handle.replacement is not None:
                continue
            if handle.reply is None and handle.outbox and not handle.address:
                handle.reply = handle.actor.node_info.remote()
            elif handle.reply is None and (handle.outbox or handle.backlog or handle.cancel):
                jobs = list(handle.outbox)
                handle.outbox.clear()
                handle.sent += [(job, set(job.candidates)) for job in jobs]
                handle.backlog += len(jobs)
                handle.reply = handle.actor.exchange.remote(jobs, handle.cancel, _EXCHANGE_S)
                handle.cancel = False
            if handle.lost_at is not None and time.monotonic() - handle.lost_at > self._executor.join_s:
                self._hand_over(handle, "no node within executor.join_s")

    def _take_reply(self, handle: RayWorkerHandle) -> None:
        reference, handle.reply = handle.reply, None
        try:
            report: WorkerReport | NodeInfo = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # an error of the supervisor, not of Ray
            raise EnvironmentProblem(f"{handle.name}: {error.cause}") from None
        except self._ray.exceptions.RayError as error:
            self._worker_lost(handle, _reason(error))
            return
        if isinstance(report, NodeInfo):
            self._node_ready(handle, report)
            return
        handle.losses, handle.lost_at = 0, None
        handle.backlog, handle.usage = report.backlog, replace(report.usage, name=f"{handle.name} {report.usage.name}")
        for event in report.events:
            self._events.emit(event.kind, event.text)
        for message in report.messages:
            handle.mark_finished(message)
        self._inbox += report.messages
        if not report.backlog:
            handle.sent.clear()

    def _worker_lost(self, handle: RayWorkerHandle, why: str) -> None:
        """Repeat the unfinished jobs of a lost actor or node on a new actor; no candidate is blamed."""
        handle.losses += 1
        handle.lost_at = handle.lost_at or time.monotonic()
        if handle.losses >= _MAX_LOSSES:
            self._give_up(handle, f"lost {handle.losses} times in a row on the Ray cluster: {why}")
            return
        label = f"{handle.name} on {handle.address}" if handle.address else handle.name
        self._events.emit("warning", f"{label} lost its node or its Ray worker; its work is repeated: {why}")
        handle.outbox.extendleft(reversed(handle.unfinished()))
        self._ray.kill(handle.actor)  # it may only be unreachable, and would keep its device
        self._start_actor(handle)

    def _node_ready(self, handle: RayWorkerHandle, node_info: NodeInfo) -> None:
        """Accept a new actor, unless it has another kind of device or other code."""
        why = mismatch(node_info, self._first, self._code)
        if why is None:
            handle.address = node_info.address
            return
        handle.lost_at = handle.lost_at or time.monotonic()
        self._give_up(handle, why)

    def _give_up(self, handle: RayWorkerHandle, why: str) -> None:
        """Replace a worker by another one at once. Raises EnvironmentProblem if there is none."""
        self._hand_over(handle, why)
        if handle.replacement is None:
            raise EnvironmentProblem(f"{handle.name}: {why}")

    def _hand_over(self, handle: RayWorkerHandle, why: str) -> None:
        """Move the work to another worker with a node, if there is one."""
        others = [p for p in self._workers if p is not handle and p.replacement is None and p.lost_at is None]
        if not others:
            handle.lost_at = time.monotonic()
            return
        handle.replacement = min(others, key=lambda p: len(p.outbox) + p.backlog)
        self._events.emit("warning", f"{handle.name}: {why}; replaced by {handle.replacement.name}")
        handle.replacement.outbox.extend([*handle.unfinished(), *handle.outbox])
        handle.outbox.clear()
        handle.reply = None
        self._ray.kill(handle.actor)

    def compile(self, build: Build) -> None:
        self._tasks.submit(build)

    def cancel_builds(self) -> Sequence[Build]:
        return self._tasks.cancel_pending()

    @property
    def compile_slots(self) -> int:
        return self._tasks.slots

    @property
    def open_builds(self) -> int:
        return self._tasks.pending

    def usage(self) -> list[Usage]:
        return [self._tasks.usage, *(handle.usage for handle in self._workers)]

    def close(self, *, kill: bool = False) -> None:
        for handle in self._workers:
            if handle.actor is not None:
                self._ray.kill(handle.actor)  # its worker process ends with it
                handle.actor = None
        self._ray.shutdown()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ray(Executor):
    """Runs on a Ray cluster."""

    address: str | None
    """Address of a running cluster; None: a cluster on this machine, started for the run."""
    workers: int | None
    """Maximum number of devices; None: all GPUs of the cluster, or one CPU worker per node."""
    compile_workers: int | None
    """Concurrent builds; None: as many as the cluster has cores."""
    shared_cache: bool
    """True if all nodes share a Triton cache: a build is compiled once, instead of on every node with a device."""
    timeout_s: float | None
    """Time limit of a candidate; None: no limit."""
    compile_timeout_s: float
    memory_pct: float
    """Memory limit of a worker, in percent of its machine's memory."""
    join_s: float
    """How long the work of a lost worker waits for a new node."""

    def __post_init__(self) -> None:
        check_at_least(1, workers=self.workers, compile_workers=self.compile_workers, memory_pct=self.memory_pct)
        check_at_most(MAX_PROCESSES, workers=self.workers, compile_workers=self.compile_workers)
        check_at_least(0.1, timeout_s=self.timeout_s, compile_timeout_s=self.compile_timeout_s, join_s=self.join_s)

    def find(self, choice: DeviceChoice) -> tuple[Device, ...]:
        """One device of the cluster; the others must have equal properties.

        Raises UserError without Ray, EnvironmentProblem if the cluster cannot be reached or has no such device.
        """
        if choice.index is not None:
            raise UserError(
                f"device.index={choice.index_text}: the Ray cluster gives the devices; use executor.workers"
            )
        ray = self._connect()
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if choice.kind == "cpu" or (choice.kind == "auto" and not gpus):
            return DeviceChoice(kind="cpu", index=None, shared=choice.shared).find()
        if not gpus:
            raise EnvironmentProblem(f"device.kind={choice.kind}: the Ray cluster has no GPU; use device=auto")
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
        ray = self._connect()
        gpu = devices[0].kind != "cpu"
        # A head node is often started without cores for tasks.
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
        if not gpu and not nodes:
            raise EnvironmentProblem("no node of the Ray cluster has a core for tasks (ray start --num-cpus)")
        most = int(ray.cluster_resources().get("GPU", 0)) if gpu else nodes
        if gpu and self.workers and self.workers > most:
            raise EnvironmentProblem(f"executor.workers={self.workers}: the Ray cluster has {most} GPUs")
        config = RayWorkerConfig(
            family=family,
            backends=backends,
            python_path=tuple(map(os.path.abspath, python_path)),
            timeout_s=self.timeout_s,
            memory_pct=self.memory_pct,
            gpu=gpu,
            shared=devices[0].shared,
        )
        return RayPool(self, config, self.workers or most, events, check)

    def _connect(self) -> Any:
        """Ray, connected to the cluster."""
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("executor=ray needs the package 'ray': pip install 'gemmpipe[ray]'") from None
        if ray.is_initialized():
            return ray
        # One core more than the CPU workers need, for builds.
        cores = max(os.cpu_count() or 1, (self.workers or 1) + 1)
        options: dict[str, Any] = {"address": self.address}
        if self.address is None:
            options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        if self.address is not None:
            _require_reachable(self.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
        with _keep_signal_handlers():
            try:
                ray.init(log_to_driver=False, configure_logging=False, **options)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise EnvironmentProblem(
                    f"executor.address={self.address}: no Ray cluster there: {error}{self._token_hint()}"
                ) from None
        return ray

    def _token_hint(self) -> str:
        """A hint for clusters with tokens: Ray (2.60) sends one to an address only with RAY_AUTH_MODE=token."""
        if self.address in (None, "auto") or "RAY_AUTH_MODE" in os.environ:
            return ""
        return " (a process listens there; a cluster that requires a token needs RAY_AUTH_MODE=token here)"


def _require_reachable(address: str) -> None:
    """Raise EnvironmentProblem within seconds if no process listens at `host:port`; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return  # `auto`, or a form that Ray checks
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            pass
    except (OSError, OverflowError, UnicodeError) as error:
        raise EnvironmentProblem(f"executor.address={address}: no Ray cluster there: {error}") from None


def _find(choice: DeviceChoice) -> tuple[Device, ...]:
    return DeviceChoice(kind=choice.kind, index=0, shared=choice.shared).find()


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after the block: Ray's own handler of SIGTERM ends the process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in kept.items():
            try:
                signal.signal(number, handler)
            except ValueError:  # not in the main thread: Ray has set no handler
                return
