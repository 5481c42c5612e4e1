"""Where things lie: the shipped configuration, the shipped tables, the user's data folder, atomic writes."""

import contextlib
import os
import platform
import re
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
RUNS = Path("outputs/runs")
TABLES_PREFIX = "GEMMPIPE_CONFIG_"
"""Where runs lie, and are looked for."""
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


def is_among_runs(run_dir: Path) -> bool:
    """Whether a run lies where they are looked for: there its words are the user's own."""
    return run_dir.resolve().is_relative_to(RUNS.resolve())


def no_link(name: str, flags: int) -> int:
    """`opener` of a file that is ours: raises OSError where somebody put a link to another one in its place."""
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


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


def unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder; empty where it can.

    A folder that is not there is tried where it would be made: a run that is refused must leave none.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if _stands(path))
        with tempfile.TemporaryFile(dir=there):  # nameless: another run may try at this very moment
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _stands(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old or the new file, never half of one.

    Raises OSError (disk full, read-only) with the old file untouched. A folder that somebody deletes meanwhile is made
    again.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            _write(path, text)
            return
    _write(path, text)


def _write(path: Path, text: str) -> None:
    make_folder(path.parent)
    _clear_after_the_killed(path)
    prefix = f".{path.name}.{platform.node()}-{os.getpid()}-"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say whose write it refused
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _clear_after_the_killed(path: Path) -> None:
    """Remove what processes of this machine that are no more were writing to `path` when they were killed."""
    mine = re.compile(re.escape(f".{path.name}.{platform.node()}-") + r"(\d+)-.*\.tmp")
    for left in path.parent.iterdir():
        found = mine.fullmatch(left.name)
        if found and not _runs(int(found[1])):
            left.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
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
