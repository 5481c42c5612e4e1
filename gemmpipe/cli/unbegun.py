"""What stands in a run's folder: whether it began and can go on; those that never began go away again."""

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemmpipe.cli.reports import INTERRUPTED
from gemmpipe.errors import UserError
from gemmpipe.files.jsonfile import read_object
from gemmpipe.files.regular import open_regular

JOURNAL, MANIFEST = "trials.jsonl", "manifest.json"
_LONGEST_LINE = 10_000_000
_OF_THE_WORDS = {".hydra", JOURNAL}
_MOST_BYTES = 50_000_000  # of a manifest, which names every file and every unsolved problem
_OF_A_SWEEP = {"multirun.yaml"}


def began(run_dir: Path) -> bool:
    """Whether anything stands in a run's journal after the first row, which every run writes."""
    return _rows(run_dir) > 1


def _rows(run_dir: Path) -> int:
    """0, 1 or 2 (and more): the rows of a run's journal."""
    with (
        contextlib.suppress(FileNotFoundError, UserError),
        open_regular(run_dir / JOURNAL, "a run's journal") as stream,
    ):
        return bool(stream.readline(_LONGEST_LINE)) + bool(stream.readline(_LONGEST_LINE))
    return 0


def can_go_on(run_dir: Path) -> bool:
    """Whether a run began, or was stopped before it did: by a signal, as its manifest says, or killed without one."""
    rows, manifest = _rows(run_dir), run_dir / MANIFEST
    if rows != 1:
        return rows > 1
    if not manifest.exists():
        return True
    with contextlib.suppress(OSError, UserError):
        return read_object(manifest, _MOST_BYTES).get("exit_code") == INTERRUPTED
    return False


def forget(run_dir: Path) -> None:
    """Remove the folder of a run that never began, so that `last` and the eye find real ones only.

    Not the one that the user stands in, where pipelines without a folder of their own run (doctor).
    """
    with contextlib.suppress(OSError):  # a disk that gave out; it is only an empty folder
        if run_dir.samefile(Path.cwd()):
            return
        if {path.name for path in run_dir.iterdir()} <= _OF_THE_WORDS and not began(run_dir):
            shutil.rmtree(run_dir)


def forget_sweep(folder: Path) -> None:
    """Remove the folder of a sweep none of whose runs began."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= _OF_A_SWEEP:
            shutil.rmtree(folder)


@contextmanager
def empty_folders_removed(folder: Path) -> Iterator[None]:
    """Of `folder` and those above it, what was not there before and holds nothing after the block is removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that holds a run
            for path in new:
                path.rmdir()
