"""Taking devices: each locked for one run at a time, and all of a run alike."""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gemmpipe.conditions import limits
from gemmpipe.data import Device
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events
from gemmpipe.paths import owner, user_name

_LOOK_S = 0.2
_TRIES = 100  # where a cleaner of temporary files is at work


def lock_path(device: Device) -> Path:
    """The file whose lock is the device's: by UUID, so that it is one file whatever a process calls the device."""
    name = device.uuid or device.torch_name.replace(":", "-")
    return Path(tempfile.gettempdir()) / f"gemmpipe-{name}.lock"


@contextmanager
def locked_device(device: Device, events: Events, check: Callable[[], None]) -> Iterator[None]:
    """Hold the device alone, against all users of the machine: a second timed process on it would spoil both runs.

    Waits as long as another holds it, and tells whose it is; `check` is called meanwhile and may raise. Raises
    EnvironmentProblem where the lock cannot be opened.
    """
    path = lock_path(device)
    handle = _opened(path, device)
    told = False
    try:
        while not _taken(handle):
            if not told:
                events.emit("line", f"waiting for {device.name}: {_holder(handle)} is timing on it")
            told = True
            check()
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(handle)  # which lets go of the lock


def _opened(path: Path, device: Device) -> int:
    """The open file of a lock, which any user may open: to read it is enough to take it."""
    for _ in range(_TRIES):
        try:
            with contextlib.suppress(FileNotFoundError):
                return _regular(path)
            with contextlib.suppress(FileExistsError):  # made by another at this moment
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
                os.fchmod(handle, 0o666)  # whatever the umask: another user waits for it too
                return handle
        except OSError as error:
            raise EnvironmentProblem(
                f"{path}: the lock of {device.name} {_why_not(path, error)}; TMPDIR names another folder for it"
            ) from None
    raise EnvironmentProblem(f"{path}: the lock of {device.name} is deleted again and again")


def _regular(path: Path) -> int:
    """Raises OSError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file")
    return handle


def _why_not(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link"
    if isinstance(error, PermissionError):
        with contextlib.suppress(OSError):
            return f"belongs to {owner(path)}, and nobody else may open it"
    return f"cannot be opened: {error.strerror}"


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(handle: int) -> str:
    """Whose run holds a lock: by name where it is another user's and the system (Linux) says so."""
    try:
        held = os.fstat(handle)
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        of_file = [cells for cells in lines if "FLOCK" in cells and cells[-3].rpartition(":")[2] == str(held.st_ino)]
        place = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
        exact = [cells for cells in of_file if cells[-3] == place]  # some file systems show another device
        pid = next(int(cells[-4]) for cells in exact or of_file if "->" not in cells)
        user = Path(f"/proc/{pid}").stat().st_uid
    except (OSError, ValueError, IndexError, StopIteration):
        return "another gemmpipe run"
    return "another gemmpipe run" if user == os.geteuid() else f"a gemmpipe run of {user_name(user)} (process {pid})"


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
