"""Taking devices: each locked for one run at a time, and all of a run alike."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from gemmpipe.conditions import limits
from gemmpipe.data import Device
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events

_LOOK_S = 0.2


def lock_path(device: Device) -> Path:
    """The file whose lock is the device's: by UUID, so that it is one file whatever a process calls the device."""
    name = device.uuid or device.torch_name.replace(":", "-")
    return Path(tempfile.gettempdir()) / f"gemmpipe-{name}.lock"


@contextmanager
def locked_device(device: Device, events: Events, check: Callable[[], None]) -> Iterator[None]:
    """Hold the device alone: a second timed process on it would spoil both runs.

    Waits as long as another holds it; `check` is called meanwhile and may raise.
    """
    lock = FileLock(lock_path(device), mode=0o666)
    told = False
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_LOOK_S if told else 0)
        except Timeout:
            if not told:
                events.emit("line", f"waiting for {device.name}: another gemmpipe run is timing on it")
            told = True
            check()
    try:
        yield
    finally:
        lock.release()


def refuse_unlike(devices: Sequence[Device]) -> None:
    """Devices of one run share their tuned rows, so they must be alike. Raises EnvironmentProblem naming the first."""
    first, facts = devices[0], limits(devices[0])
    for device in devices[1:]:
        for name, value in limits(device).items():
            if value != facts[name]:
                raise EnvironmentProblem(
                    f"{device.torch_name} differs from {first.torch_name}: {name} {value} instead of {facts[name]}; "
                    f"tune them apart, such as device={first.kind} device.index={first.index}"
                )
