"""Where things lie: the shipped configuration, the shipped tables, the user's data folder, atomic writes."""

import contextlib
import errno
import os
import platform
import pwd
import re
import stat
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
RUNS = Path("outputs/runs")
TABLES_PREFIX = "GEMMPIPE_CONFIG_"
"""Where runs lie, and are looked for."""
PRIVATE_MODE = 0o600
"""The mode of a file that is the user's alone."""
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO would wait for a reader
_TRIES = 100  # to write into a folder that is being deleted


def shipped(folder: str) -> Path:
    """A shipped folder (`conf`, `pipelines`): the checkout's when run from one, else the copy in the wheel."""
    return (CHECKOUT or PACKAGE) / folder


def shipped_tables() -> Path:
    """The folder of shipped tuned tables, the last layer of look-up."""
    return CHECKOUT / "outputs" / "tuned" if CHECKOUT else PACKAGE / "tuned"


def user_data() -> Path:
    """The user's data folder (XDG base directory specification)."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "gemmpipe"


def user_tables() -> Path:
    """The user's folder of tuned tables."""
    return user_data() / "tuned"


def tables_variable(family: str) -> str:
    """The environment variable that names a family's tables, before all other folders."""
    return f"{TABLES_PREFIX}{family.upper()}"


def is_in_runs_folder(run_dir: Path) -> bool:
    """Whether a run lies where they are looked for: there its words are the user's own."""
    return run_dir.resolve().is_relative_to(RUNS.resolve())


def open_no_link(name: str, flags: int) -> int:
    """`opener` of a file that is ours: raises OSError where somebody put a link, a FIFO or a device in its place."""
    return _open(name, flags, 0o666)


def open_private(name: str, flags: int) -> int:
    """`opener` as `open_no_link`, of a file that only the user may read or write."""
    return _open(name, flags, PRIVATE_MODE)


def _open(name: str, flags: int, mode: int) -> int:
    handle = os.open(name, flags | _OPEN_FLAGS, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no regular file", name)
    return handle


def make_private_folder(folder: Path) -> None:
    """The folder is there and the user's alone (0700), with what lies in it, also where it was open to others before.

    Raises OSError: as `make_folder`, and where it is a link, or belongs to another user.
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
    """The user whom a file or a folder belongs to: the name, or `uid 1234` where there is none. Raises OSError."""
    return user_name(path.stat().st_uid)


def user_name(uid: int) -> str:
    """The name of a user, or `uid 1234` where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def make_folder(folder: Path) -> None:
    """The folder and those above it are there, also where somebody deletes them at that very moment.

    Raises OSError, FileExistsError where a file lies in the way.
    """
    for _ in range(_TRIES - 1):
        # What exists when it is made may be gone when mkdir looks whether it is a folder; so may the one above it.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def unwritable_reason(folder: Path) -> str:
    """Why nothing can be written to a folder; empty where it can.

    A folder that is not there is tried where it would be made: a run that is refused must leave none.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if _exists(path))
        with tempfile.TemporaryFile(dir=there):  # nameless: another run may try at this very moment
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
    """Write `text` to `path` so that a reader sees the old or the new file, never half of one.

    A new file has `mode` (None: what the umask leaves), one that was there keeps its own.

    Raises OSError (disk full, read-only) with the old file untouched. A folder that somebody deletes meanwhile is made
    again.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            _write(path, text, mode)
            return
    _write(path, text, mode)


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
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say whose write it refused
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _remove_stale_temporaries(path: Path) -> None:
    """Remove what processes of this machine that are no more were writing to `path` when they were killed."""
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
