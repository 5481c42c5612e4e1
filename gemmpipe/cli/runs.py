"""Earlier runs: what was typed for them, so that `resume=` and `reuse=` mean the same kernel and shapes.

What stands in a run's folder: whether it began and can go on; those that never began go away again.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gemmpipe.cli.errors import EXIT_INTERRUPTED
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.old_keys import current_overrides
from gemmpipe.cli.overrides import is_too_deep
from gemmpipe.cli.recipes import ShallowLoader
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import open_regular, read_object, read_regular
from gemmpipe.core.paths import RUNS, is_in_runs_folder

JOURNAL, MANIFEST = "trials.jsonl", "manifest.json"
_MAX_LINE = 10_000_000
_STARTUP_FILES = {".hydra", JOURNAL}
_MAX_JOURNAL_BYTES = 50_000_000  # of a manifest, which names every file and every unsolved problem
_SWEEP_FILES = {"multirun.yaml"}


def has_trials(run_dir: Path) -> bool:
    """Whether anything stands in a run's journal after the first row, which every run writes."""
    return _count_rows(run_dir) > 1


def _count_rows(run_dir: Path) -> int:
    """0, 1 or 2 (and more): the rows of a run's journal."""
    with (
        contextlib.suppress(FileNotFoundError, UserError),
        open_regular(run_dir / JOURNAL, "a run's journal") as stream,
    ):
        return bool(stream.readline(_MAX_LINE)) + bool(stream.readline(_MAX_LINE))
    return 0


def can_resume(run_dir: Path) -> bool:
    """Whether a run began, or was stopped before it did: by a signal, as its manifest says, or killed without one."""
    rows, manifest = _count_rows(run_dir), run_dir / MANIFEST
    if rows != 1:
        return rows > 1
    if not manifest.exists():
        return True
    with contextlib.suppress(OSError, UserError):
        return read_object(manifest, _MAX_JOURNAL_BYTES).get("exit_code") == EXIT_INTERRUPTED
    return False


def remove_empty_run(run_dir: Path) -> None:
    """Remove the folder of a run that never began, so that `last` and the eye find real ones only.

    Not the one that the user stands in, where pipelines without a folder of their own run (doctor).
    """
    with contextlib.suppress(OSError):  # a disk that gave out; it is only an empty folder
        if run_dir.samefile(Path.cwd()):
            return
        if {path.name for path in run_dir.iterdir()} <= _STARTUP_FILES and not has_trials(run_dir):
            shutil.rmtree(run_dir)


def remove_empty_sweep(folder: Path) -> None:
    """Remove the folder of a sweep none of whose runs began."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= _SWEEP_FILES:
            shutil.rmtree(folder)


@contextmanager
def removing_empty_folders(folder: Path) -> Iterator[None]:
    """Of `folder` and those above it, what was not there before and holds nothing after the block is removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that holds a run
            for path in new:
                path.rmdir()


_MAX_YAML_BYTES = 1_000_000
"""What Hydra writes takes some 10,000; PyYAML reads these in seconds."""
_CODE = re.compile(r"_target_|\$\{|(^|[@./+~])hydra\.(callbacks|searchpath|job)")
"""In a word that someone else may have written: names code."""


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """A run on disk: its folder, its pipeline, its overrides, and the user's folder of options it had."""

    folder: Path
    pipeline: str
    overrides: tuple[str, ...]
    config_dir: Path | None


def find_run(key: str, value: str, pipeline: str | None, config_dir_typed: bool) -> PreviousRun:
    """The run that `resume=` or `reuse=` means. Raises UserError when there is none, or it is no run's folder."""
    try:
        folder = _latest_run(key, pipeline) if value == "last" else Path(value).expanduser()
    except RuntimeError:  # of a user that there is not
        raise UserError(f"{key}={value}: no such home; expected the folder of a run, or 'last'") from None
    if not folder.is_dir():
        raise UserError(f"{key}={value}: no such folder; expected the folder of a run, or 'last'")
    if (folder / "multirun.yaml").is_file():
        raise UserError(f"{key}={value}: the folder of a sweep; expected one of its runs, such as {folder / '0_...'}")
    if not (folder / JOURNAL).is_file():
        raise UserError(
            f"{key}={value}: no {JOURNAL} there; expected the folder of a run, such as outputs/runs/tune/..."
        )
    run = _read_run(folder.resolve(), f"{key}={value}", config_dir_typed)
    if pipeline is not None and pipeline != run.pipeline and key == "resume":
        raise UserError(f"{key}={value}: that run's pipeline is '{run.pipeline}', not '{pipeline}'; leave the word out")
    return run


def _latest_run(key: str, pipeline: str | None) -> Path:
    """The folder with the newest journal, of this pipeline if one is named; a run that found no problem is none."""
    name = pipeline or "*"
    found = [*RUNS.glob(f"{name}/*/{JOURNAL}"), *RUNS.glob(f"{name}/*/*/{JOURNAL}")]
    journals = [journal for journal in found if can_resume(journal.parent)]
    if not journals:
        where = RUNS / pipeline if pipeline else RUNS
        raise UserError(f"{key}=last: no run with a journal under {where}; expected {key}=DIR")
    return max(journals, key=lambda journal: journal.stat().st_mtime_ns).parent


def _read_run(folder: Path, where: str, config_dir_typed: bool) -> PreviousRun:
    """Raises UserError for a run made elsewhere that would bring its own code."""
    try:
        overrides = _load_yaml(folder / ".hydra" / "overrides.yaml")
        hydra = _load_yaml(folder / ".hydra" / "hydra.yaml")["hydra"]
        pipeline = hydra["job"]["config_name"]
        sources = hydra["runtime"]["config_sources"]
        config_dir = next((source["path"] for source in sources if source["provider"] == "command-line"), None)
    # ValueError: bytes that are no UTF-8, numbers and dates that are none.
    except (OSError, UserError, yaml.YAMLError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise UserError(f"{where}: its .hydra folder does not say what was typed for that run") from None
    words = overrides if isinstance(overrides, list) else [None]
    texts = [*words, pipeline, *([] if config_dir is None else [config_dir])]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: its .hydra folder does not say what was typed for that run")
    odd = next((str(word) for word in overrides if _loads_code(str(word))), None)
    if odd is not None:
        raise UserError(f"{where}: '{odd}' was typed for that run, which can run code; expected a run of your own")
    if config_dir and not is_in_runs_folder(folder) and not config_dir_typed:
        raise UserError(f"{where}: that run had --config-dir={config_dir}, whose code would be run; type it too")
    own_folder = Path(config_dir) if config_dir else None
    return PreviousRun(
        folder=folder,
        pipeline=pipeline,
        overrides=current_overrides(map(str, overrides), own_folder),
        config_dir=own_folder,
    )


def _load_yaml(path: Path) -> Any:
    """A YAML file of a run, which someone else may have made. Raises OSError, UserError, ValueError or YAMLError."""
    text = read_regular(path, "a run's configuration", _MAX_YAML_BYTES).decode()
    if is_too_deep(text):
        raise ValueError(path)
    return yaml.load(text, ShallowLoader)  # noqa: S506 (derived from SafeLoader)


def _loads_code(word: str) -> bool:
    """Whether an override of a run, which someone else may have made, can have anything but our options loaded."""
    key, _, value = word.partition("=")
    group = key.lstrip("+~").split("@")[0]
    return bool(_CODE.search(word)) or (
        group in ConfigFolders(config_dir=None).options and bool({"/", "\\"} & set(value))
    )
