"""`python -m gemmpipe.capture script.py args...`: any PyTorch program, unedited, with its products counted."""

import logging
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gemmpipe.errors import EnvironmentProblem, UserError
from gemmpipe.runtime.captured import captured_before, file_of, recorder
from gemmpipe.runtime.watching import Watcher

_LOG = logging.getLogger("gemmpipe.runtime")
_USAGE = (
    "python -m gemmpipe.capture SCRIPT.py ARGS... (or -m MODULE ARGS..., or a command that is a Python script); "
    "GEMMPIPE_CAPTURE=FILE names the CSV"
)


def main(words: Sequence[str]) -> None:
    """Run a script or `-m module` with its own arguments.

    Raises UserError, and EnvironmentProblem when what was captured cannot be written; what the program raises rises.

    Products of its threads, of the processes of multiprocessing and of torchrun's ranks are counted too; other programs
    that it starts count what they call our entry points for.
    """
    if words and words[0] in ("-h", "--help"):
        print(_USAGE)
        return
    if not words or (words[0] == "-m" and len(words) < 2):
        raise UserError(f"expected a program: {_USAGE}")
    script = "" if words[0] == "-m" else _script(words[0])
    path = file_of(os.environ.get("GEMMPIPE_CAPTURE", ""))
    captured_before(path)  # another file than such a one is a mistake to be told before the program runs
    os.environ["GEMMPIPE_CAPTURE"] = str(path)  # for the entry points, and processes that the program starts
    kept = recorder(path)
    try:
        with Watcher(kept):
            if words[0] == "-m":
                sys.argv = list(words[1:])
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(words)
                sys.path.insert(0, str(Path(script).resolve().parent))
                runpy.run_path(script, run_name="__main__")
    finally:
        kept.flush()
        if os.environ.get("LOCAL_RANK", "0") == "0" and not kept.counts:
            _LOG.warning("gemmpipe: %s", _left_behind(path))
    if kept.counts:
        raise EnvironmentProblem(f"{path}: {len(kept.counts)} captured products are lost, as it could not be written")


def _script(word: str) -> str:
    """The file of a script, or of a command that is one (`torchrun`, `vllm`)."""
    if Path(word).is_file():
        return word
    found = shutil.which(word)
    if found is None:
        raise UserError(f"no file '{word}'; {_USAGE}")
    with Path(found).open("rb") as stream:
        first = stream.readline(200)
    if not first.startswith(b"#!") or b"python" not in first:
        raise UserError(f"'{found}' is no Python script; {_USAGE}")
    return found


def _left_behind(path: Path) -> str:
    if path.exists():
        return f"captured products are in {path} (shapes=csv shapes.path={path})"
    seen = "threads, processes of multiprocessing and ranks of torchrun are seen, other programs that it starts are not"
    return f"the program made no product that torch executes ({seen}); no {path}"
