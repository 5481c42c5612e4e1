"""Paths of the shipped configuration, the shipped tables and the user's data; safe opening and atomic writes."""

import contextlib
import errno
import os
import platform
import pwd
import re
import stat
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
RUNS = Path("outputs/runs")
"""The folder of runs, relative to the working directory."""
DEMOS = Path("outputs/demo")
"""The folder of replayed runs, apart from the others: `last` names none of them."""
MANIFEST, SELECTIONS, PROBLEMS, REPORT = "manifest.json", "selections.csv", "problems.csv", "report.html"
"""Files of a run's folder: facts of the run, choices, problems, page. The journal is `gemmpipe.journal.NAME`."""
TABLES_PREFIX = "GEMMPIPE_CONFIG_"
PRIVATE_MODE = 0o600
"""The mode of a file that only its owner may read and write."""
_TRIES = 10  # deleting 50 times a second made a sixth try necessary once in 2,900 (two cores, 2026-11-23)
T = TypeVar("T")
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO would wait for a reader


def shipped(folder: str) -> Path:
    """A shipped folder (`conf`, `pipelines`): of the checkout if there is one, else the copy in the wheel."""
    return (CHECKOUT or PACKAGE) / folder


def shipped_tables() -> Path:
    """The folder of shipped tuned tables, the last layer of the lookup."""
    return CHECKOUT / "outputs" / "tuned" if CHECKOUT else PACKAGE / "tuned"


def user_data() -> Path:
    """The user's data folder (XDG base directory specification)."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "gemmpipe"


def user_cache() -> Path:
    """The user's cache folder (XDG base directory specification): what it has can be found out again."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gemmpipe"


def user_tables() -> Path:
    """The user's folder of tuned tables."""
    return user_data() / "tuned"


def tables_variable(family: str) -> str:
    """The environment variable with the paths of a family's tables; they have priority over all folders."""
    return f"{TABLES_PREFIX}{family.upper()}"


def is_in_runs_folder(run_dir: Path) -> bool:
    """True if a run is in the folder of runs; the arguments recorded there are the user's own."""
    return run_dir.resolve().is_relative_to(RUNS.resolve())


def open_no_link(name: str, flags: int) -> int:
    """`opener` for gemmpipe's own files: raises OSError if the path is a link, a FIFO or a device."""
    return _open(name, flags, 0o666)


def open_private(name: str, flags: int) -> int:
    """`opener` like `open_no_link`, for a file with mode PRIVATE_MODE."""
    return _open(name, flags, PRIVATE_MODE)


def _open(name: str, flags: int, mode: int) -> int:
    handle = os.open(name, flags | _OPEN_FLAGS, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return handle


def make_private_folder(folder: Path) -> None:
    """Make a folder private to the user (mode 0700, its files 0600); it may exist with other modes.

    Raises OSError: like `make_folder`, and if it is a link or belongs to another user.
    """
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, f"belongs to {owner(folder)}, expected a folder of your own", str(folder)
            )
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o077:
            path.chmod(PRIVATE_MODE)


def owner(path: Path) -> str:
    """The name of the owner of a file or folder, or `uid 1234` if the user has no name. Raises OSError."""
    return user_name(path.stat().st_uid)


def user_name(uid: int) -> str:
    """The name of a user, or `uid 1234` if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def make_folder(folder: Path) -> None:
    """Make a folder and its parents if they do not exist, also while another process deletes them.

    Raises OSError; FileExistsError if the path is a file.
    """
    # A folder that exists at mkdir may be gone when mkdir checks that it is a folder; so may its parent.
    while_deleted(partial(folder.mkdir, parents=True, exist_ok=True), FileExistsError)


def while_deleted(action: Callable[[], T], *errors: type[OSError]) -> T:
    """The result of an action on files that another process may delete meanwhile; tried again after `errors` too."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError, *errors):
            return action()
    return action()


def unwritable_reason(folder: Path) -> str:
    """The reason why files cannot be created in a folder; empty if they can.

    For a missing folder its nearest existing parent is tested: a refused run must not leave a folder behind.
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if _exists(path))
        with tempfile.TemporaryFile(dir=existing):  # without a name: another run may test the folder as well
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_atomic(path: Path, text: str, mode: int | None = None) -> None:
    """Write `text` to `path` atomically: a reader sees the complete old or new file.

    A new file gets `mode` (None: 0666 minus the umask), an existing one keeps its mode. The folder is made, again if
    another process deletes it. What is no file (`/dev/stdout`, a named pipe) is written to, not replaced.

    Raises OSError (disk full, read-only) with the old file unchanged.
    """
    if _is_stream(path):
        path.write_text(text, encoding="utf-8", newline="")
    else:
        while_deleted(partial(_write, path, text, mode))


def _is_stream(path: Path) -> bool:
    """True for a device, a pipe, and a link to an open file such as /dev/stdout: root could replace them."""
    if path.is_symlink() and os.readlink(path).startswith("/proc/"):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _write(path: Path, text: str, mode: int | None) -> None:
    make_folder(path.parent)
    _remove_stale_temporaries(path)
    prefix = f".{path.name}.{platform.node()}-{os.getpid()}-"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh = 0o666 & ~_umask() if mode is None else mode
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else fresh)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # the error of a full disk has no file name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _remove_stale_temporaries(path: Path) -> None:
    """Remove temporary files for `path` from processes of this machine that were killed."""
    mine = re.compile(re.escape(f".{path.name}.{platform.node()}-") + r"(\d+)-.*\.tmp")
    for left in path.parent.iterdir():
        found = mine.fullmatch(left.name)
        if found and not _is_running(int(found[1])):
            left.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
