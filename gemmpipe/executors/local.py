"""The executor for the devices of this machine: one killable worker process per device and a shared compile pool.

Each device is locked for one run at a time, and the devices of a run must have equal properties.
"""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gemmpipe.backends import Backend
from gemmpipe.bench.jobs import Job
from gemmpipe.bench.worker import WorkerConfig, WorkerContextFactory, make_worker_context
from gemmpipe.core.data import Build, Device
from gemmpipe.core.device import usable_cores
from gemmpipe.core.errors import MAX_PROCESSES, EnvironmentProblem, check_at_least, check_at_most
from gemmpipe.core.events import IDLE, Events
from gemmpipe.core.nvml import limits
from gemmpipe.core.paths import owner, user_name, while_deleted
from gemmpipe.executors import BuildResult, Executor, JobResult, Pool, T, Usage
from gemmpipe.executors.compile_pool import CompileFn, CompilePool, compile_into_cache
from gemmpipe.executors.supervisor import CrashHistory, WorkerSupervisor, memory_limit_bytes

_POLL_S = 0.2
_HEALTH_CHECK_S = 0.5


def lock_path(device: Device) -> Path:
    """The lock file of a device: named by UUID, so that it does not depend on the numbering in a process."""
    name = device.uuid or device.torch_name.replace(":", "-")
    return Path(tempfile.gettempdir()) / f"gemmpipe-{name}.lock"


@contextmanager
def device_lock(device: Device, events: Events, check: Callable[[], None]) -> Iterator[float]:
    """Hold the device exclusively among all users: a second timing process on it would falsify both runs.

    Waits while another run holds it, and reports this run's owner; `check` is called meanwhile and may raise. Gives the
    seconds that it waited. Raises EnvironmentProblem if the lock cannot be opened.
    """
    path = lock_path(device)
    handle = _open_lock(path, device)
    began, waits = time.monotonic(), False
    try:
        while not _try_lock(handle):
            if not waits:
                text = f"waiting for {device.name}: {_holder(handle)} is timing on it"
                events.emit("line", text)
                events.emit("progress", text)
            waits = True
            check()
            time.sleep(_POLL_S)
        if waits:
            events.emit("progress", "starting workers")
        yield time.monotonic() - began if waits else 0.0
    finally:
        os.close(handle)  # which releases the lock


def _open_lock(path: Path, device: Device) -> int:
    """The open lock file; any user may open it, and read access suffices for locking."""
    try:
        # Another process may make it in between, and a cleaner of temporary files delete it.
        return while_deleted(partial(_open_or_make, path), FileExistsError)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}: the lock of {device.name} {_open_failure(path, error)}; TMPDIR names another folder for it"
        ) from None


def _open_or_make(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return _open_regular(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    os.fchmod(handle, 0o666)  # independent of the umask: other users need it too
    return handle


def _open_regular(path: Path) -> int:
    """An open regular file. Raises OSError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file")
    return handle


def _open_failure(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link"
    if isinstance(error, PermissionError):
        with contextlib.suppress(OSError):
            return f"belongs to {owner(path)}, and no other user may open it"
    return f"cannot be opened: {error.strerror}"


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(handle: int) -> str:
    """A description of the run that holds a lock, with its user if that is another one and known (Linux)."""
    try:
        lock = os.fstat(handle)
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        of_file = [cells for cells in lines if "FLOCK" in cells and cells[-3].rpartition(":")[2] == str(lock.st_ino)]
        file_id = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        exact = [cells for cells in of_file if cells[-3] == file_id]  # some file systems show another device
        pid = next(int(cells[-4]) for cells in exact or of_file if "->" not in cells)
        user = Path(f"/proc/{pid}").stat().st_uid
    except (OSError, ValueError, IndexError, StopIteration):
        return "another gemmpipe run"
    return "another gemmpipe run" if user == os.geteuid() else f"a gemmpipe run of {user_name(user)} (process {pid})"


def require_alike(devices: Sequence[Device]) -> None:
    """Raise EnvironmentProblem if devices differ: those of one run share their tuned rows."""
    first, facts = devices[0], limits(devices[0])
    for device in devices[1:]:
        for name, value in limits(device).items():
            if value != facts[name]:
                raise EnvironmentProblem(
                    f"{device.torch_name} differs from {first.torch_name}: {name} {value} instead of {facts[name]}; "
                    f"tune them separately, such as device={first.kind} device.index={first.index}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Executor):
    """Runs on this machine's devices."""

    workers: int | None
    """Maximum number of devices; None: all."""
    compile_workers: int | None
    """Compile processes; None: as many as there are cores minus workers."""
    timeout_s: float | None
    """Time limit of a candidate; None: no limit."""
    compile_timeout_s: float
    memory_pct: float
    """Memory limit of a worker, in percent of the machine's memory."""

    def __post_init__(self) -> None:
        check_at_least(1, workers=self.workers, compile_workers=self.compile_workers, memory_pct=self.memory_pct)
        check_at_most(MAX_PROCESSES, workers=self.workers, compile_workers=self.compile_workers)
        check_at_least(0.1, timeout_s=self.timeout_s, compile_timeout_s=self.compile_timeout_s)

    @property
    def make_context(self) -> WorkerContextFactory:
        """The function that sets up a worker process; picklable."""
        return make_worker_context

    @property
    def compiler(self) -> CompileFn:
        """The function that compiles a build in a compile process; picklable."""
        return compile_into_cache

    def start(
        self,
        devices: tuple[Device, ...],
        family: str,
        backends: tuple[Backend, ...],
        python_path: tuple[str, ...],
        events: Events,
        check: Callable[[], None],
    ) -> "LocalPool":
        devices = devices[: self.workers] if self.workers else devices
        require_alike(devices)
        same = WorkerConfig(
            device=devices[0], family=family, backends=backends, python_path=python_path, make_context=self.make_context
        )
        configs = [replace(same, device=device) for device in devices]
        with ExitStack() as stack:
            # In the same order in all runs, so that two runs cannot deadlock.
            waited = [
                stack.enter_context(device_lock(device, events, check)) for device in sorted(devices, key=lock_path)
            ]
            pool = LocalPool(self, configs, events, stack.pop_all())
        pool.waited_s = sum(waited)
        return pool


class LocalPool(Pool):
    """The supervisors of the workers, and a compile pool."""

    def __init__(self, executor: Local, configs: Sequence[WorkerConfig], events: Events, locks: ExitStack) -> None:
        self.devices = tuple(config.device for config in configs)
        self.builds_done: list[float] = []
        self._locks = locks
        slots = executor.compile_workers or max(1, usable_cores() - len(configs))
        self._compilers = CompilePool(
            self.devices[0], slots, executor.compile_timeout_s, configs[0].python_path, executor.compiler
        )
        memory_bytes = memory_limit_bytes(executor.memory_pct)
        self._submitted: set[WorkerSupervisor] = set()
        """Supervisors with jobs submitted since the last poll, which may have results at once."""
        self._health_checked = time.monotonic()
        crashes = CrashHistory()
        self._supervisors = [
            WorkerSupervisor(config, executor.timeout_s, memory_bytes, events, crashes) for config in configs
        ]

    def submit(self, job: Job, worker: int) -> None:
        self._submitted.add(self._supervisors[worker])
        self._supervisors[worker].submit(job)

    def backlog(self, worker: int) -> int:
        return self._supervisors[worker].backlog

    def cancel_pending(self, worker: int) -> None:
        self._supervisors[worker].cancel_pending()

    def compile(self, build: Build) -> None:
        self._compilers.submit(build)

    def cancel_builds(self) -> Sequence[Build]:
        return self._compilers.cancel_pending()

    @property
    def compile_slots(self) -> int:
        return self._compilers.slots

    @property
    def open_builds(self) -> int:
        return self._compilers.pending

    def submit_task(self, task: Callable[[], T]) -> "Future[T] | None":
        # On a CPU the cores are needed for the timed kernels.
        return None if self.devices[0].kind == "cpu" else self._compilers.submit_task(task)

    def poll(self, timeout_s: float, handles: Sequence[Connection | int] = ()) -> Sequence[BuildResult | JobResult]:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            own = {handle: supervisor for supervisor in self._supervisors for handle in supervisor.wait_handles()}
            with self.time_account.timed(IDLE):
                ready = wait(
                    [self._compilers.ready_pipe, *own, *handles],
                    timeout=0.0 if self._submitted else min(left, _HEALTH_CHECK_S),
                )
            messages = self._messages(ready, {own[handle] for handle in ready if handle in own})
            if messages or not left or not set(handles).isdisjoint(ready):
                return messages

    def _messages(self, ready: Collection[object], answered: set[WorkerSupervisor]) -> list[BuildResult | JobResult]:
        """Results of the compile pool and of workers; without events, workers are checked for deadlines and memory
        every _HEALTH_CHECK_S."""
        self._compilers.check()
        messages: list[BuildResult | JobResult] = (
            [*self._compilers.done()] if self._compilers.ready_pipe in ready else []
        )
        self.builds_done += [time.monotonic()] * len(messages)
        sweep = time.monotonic() - self._health_checked >= _HEALTH_CHECK_S
        for supervisor in self._supervisors:
            if sweep or supervisor in answered or supervisor in self._submitted:
                messages += supervisor.messages()
        self._health_checked = time.monotonic() if sweep else self._health_checked
        self._submitted.clear()
        return messages

    def usage(self) -> list[Usage]:
        return [self._compilers.usage(), *(supervisor.usage() for supervisor in self._supervisors)]

    def close(self, *, kill: bool = False) -> None:
        for supervisor in self._supervisors:
            supervisor.close(kill=kill)
        self._compilers.close(kill=kill)
        self._locks.close()
