"""`python -m gemmpipe.capture script.py args...`: run an unmodified PyTorch program and count its products."""

import logging
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.files import open_regular, read_cells
from gemmpipe.core.shell import shell_join
from gemmpipe.runtime.capture.recorder import capture_file, check_capture_file, recorder_for
from gemmpipe.runtime.capture.routing import routing_counter
from gemmpipe.runtime.capture.watcher import Watcher

_LOG = logging.getLogger("gemmpipe.runtime")
_USAGE = (
    "python -m gemmpipe.capture SCRIPT.py ARGS... (or -m MODULE ARGS..., or a command that is a Python script); "
    "GEMMPIPE_CAPTURE=FILE names the CSV"
)


def main(argv: Sequence[str]) -> None:
    """Run a script or `-m module` with its own arguments.

    Products of its threads, of processes of multiprocessing and of torchrun's ranks are counted too; in other programs
    that it starts only calls of our entry points are.

    Raises UserError, EnvironmentProblem if the products cannot be written, and the program's own exceptions.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        raise UserError(f"expected a program: {_USAGE}")
    script = "" if argv[0] == "-m" else _script_path(argv[0])
    path = capture_file(os.environ.get("GEMMPIPE_CAPTURE", ""))
    check_capture_file(path)  # a file of another kind is reported before the program runs
    os.environ["GEMMPIPE_CAPTURE"] = str(path)  # for the entry points, and processes that the program starts
    kept, before = recorder_for(path), _file_version(path)
    started = True
    try:
        with Watcher(kept):
            _execute(argv, script)
    except _NotStarted:
        started = False
        raise
    finally:
        kept.flush()
        routing_counter(path).flush()
        if started and os.environ.get("LOCAL_RANK", "0") == "0" and not kept.counts:
            _LOG.warning("gemmpipe: %s", _files_changed(path, before))
    if kept.counts:
        raise EnvironmentProblem(
            f"{path}: {len(kept.counts)} captured products are lost: the file could not be written"
        )


class _NotStarted(UserError):
    """A program that did not start: no such module, or not Python."""


def _execute(argv: Sequence[str], script: str) -> None:
    """Run the program. Raises _NotStarted instead of Python's own exception if it cannot be started."""
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        if all(frame.filename.startswith("<frozen ") for frame in frames):
            raise _NotStarted(_start_error(error, argv[1] if argv[0] == "-m" else script)) from None
        raise


def _start_error(error: Exception, program: str) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or program}:{error.lineno}: {error.msg}"
    reason = (error.strerror if isinstance(error, OSError) else "") or error
    return f"{program}: cannot be started: {reason}"


def _script_path(word: str) -> str:
    """The file of a script, or of a command that is a script (`torchrun`, `vllm`)."""
    if Path(word).is_file():
        return word
    found = shutil.which(word)
    if found is None:
        raise UserError(f"no file '{word}'; {_USAGE}")
    with open_regular(Path(found), "a Python script") as stream:
        first = stream.readline(200)
    if not first.startswith(b"#!") or b"python" not in first:
        raise UserError(f"'{found}' is not a Python script; {_USAGE}")
    return found


def _file_version(path: Path) -> tuple[int, int] | None:
    """(inode, modification time in ns); changes when a process writes the file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _tuning_command(path: Path) -> str:
    """The command that tunes the captured products: a sweep over the kernels if there are several."""
    kernels: list[str] = []
    with suppress(UserError, ValueError):  # a file that another process replaces at this moment
        rows = read_cells(path)
        column = next(rows, (0, []))[1].index("family")
        kernels = sorted({cells[column] for _, cells in rows if len(cells) > column and cells[column]})
    chosen = [f"kernel={','.join(kernels)}"] if kernels else []
    return shell_join(["gemmpipe", *(["-m"] if len(kernels) > 1 else []), *chosen, "shapes=csv", f"shapes.path={path}"])


def _files_changed(path: Path, before: tuple[int, int] | None) -> str:
    now = _file_version(path)
    if now not in (None, before):
        return f"captured products are in {path}; next: {_tuning_command(path)}"
    scope = (
        "threads, processes of multiprocessing and ranks of torchrun are counted, other programs that it starts are not"
    )
    file = f"{path} is from an earlier run" if now else f"no {path}"
    return f"the program executed no matrix product through torch ({scope}); {file}"
