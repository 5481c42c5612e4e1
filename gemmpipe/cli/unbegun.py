"""Folders of runs that never began, because they were refused or stopped before: they go away again."""

import contextlib
import shutil
from pathlib import Path

JOURNAL = "trials.jsonl"
_OF_THE_WORDS = {".hydra", JOURNAL}
_OF_A_SWEEP = {"multirun.yaml"}


def began(run_dir: Path) -> bool:
    """Whether anything stands in a run's journal after the first row, which every run writes."""
    with contextlib.suppress(FileNotFoundError), (run_dir / JOURNAL).open("rb") as stream:
        return bool(stream.readline()) and bool(stream.readline())
    return False


def forget(run_dir: Path) -> None:
    """Remove the folder of a run that never began, so that `last` and the eye find real ones only."""
    with contextlib.suppress(OSError):  # a disk that gave out; it is only an empty folder
        if {path.name for path in run_dir.iterdir()} <= _OF_THE_WORDS and not began(run_dir):
            shutil.rmtree(run_dir)


def forget_sweep(folder: Path) -> None:
    """Remove the folder of a sweep none of whose runs began."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= _OF_A_SWEEP:
            shutil.rmtree(folder)
