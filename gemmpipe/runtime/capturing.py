"""`python -m gemmpipe.capture script.py args...`: any PyTorch program, unedited, with its products counted."""

import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gemmpipe.errors import UserError
from gemmpipe.runtime.captured import captured_before, file_of, recorder
from gemmpipe.runtime.watching import Watcher

_LOG = logging.getLogger("gemmpipe.runtime")
_USAGE = "python -m gemmpipe.capture SCRIPT.py ARGS... (or -m MODULE ARGS...); GEMMPIPE_CAPTURE=FILE names the CSV"


def main(words: Sequence[str]) -> None:
    """Run a script or `-m module` with its own arguments. Raises UserError; what the program raises rises.

    Products of its threads and of the processes of multiprocessing are counted too; programs that it starts count
    what they call our entry points for.
    """
    if not words or words[0] in ("-h", "--help") or (words[0] == "-m" and len(words) < 2):
        raise UserError(_USAGE)
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise UserError(f"no file '{words[0]}'; {_USAGE}")
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
                sys.path.insert(0, str(Path(words[0]).resolve().parent))
                runpy.run_path(words[0], run_name="__main__")
    finally:
        kept.flush()
        if path.exists():
            _LOG.warning("gemmpipe: captured products are in %s (shapes=csv shapes.path=%s)", path, path)
        else:
            _LOG.warning("gemmpipe: the program made no product that torch executes in this process; no %s", path)
