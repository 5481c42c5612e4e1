"""Run folders: find a run for `resume=` or `reuse=`, read its overrides, remove folders of runs that never began.

A run's folder may come from someone else: its files are read with limits, and overrides that can run code are refused.
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

from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.old_keys import current_overrides
from gemmpipe.cli.overrides import is_too_deep
from gemmpipe.cli.recipes import ShallowLoader
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_regular
from gemmpipe.core.paths import is_in_runs_folder
from gemmpipe.journal import NAME as JOURNAL
from gemmpipe.report.last_run import RESUMABLE, REUSABLE, last_run, named_folder, names_last, suggest_run
from gemmpipe.report.run_folder import SWEEP, has_trials

_STARTUP_FILES = {".hydra", JOURNAL}
_SWEEP_FILES = {SWEEP}
_MAX_YAML_BYTES = 1_000_000
"""Hydra writes about 10,000; PyYAML reads the maximum in seconds."""
_CODE = re.compile(r"_target_|\$\{|(^|[@./+~])hydra\.(callbacks|searchpath|job)")
"""Overrides that name code."""


def remove_empty_run(run_dir: Path) -> None:
    """Remove the folder of a run that never began, so that the runs folder has real ones only.

    Never the current directory, where pipelines without a run folder run (doctor).
    """
    with contextlib.suppress(OSError):  # a failing disk; it is only an empty folder
        if run_dir.samefile(Path.cwd()):
            return
        if {path.name for path in run_dir.iterdir()} <= _STARTUP_FILES and not has_trials(run_dir):
            shutil.rmtree(run_dir)


def remove_empty_sweep(folder: Path) -> None:
    """Remove the folder of a sweep if no run of it began."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= _SWEEP_FILES:
            shutil.rmtree(folder)


@contextmanager
def removing_empty_folders(folder: Path) -> Iterator[None]:
    """Remove `folder` and its parents after the block if they did not exist before it and are empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that has a run
            for path in new:
                path.rmdir()


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """A run on disk: its folder, its pipeline, its overrides, and the user's folder of options it had."""

    folder: Path
    pipeline: str
    overrides: tuple[str, ...]
    config_dir: Path | None


def find_run(key: str, value: str, pipeline: str | None, config_dir_typed: bool) -> PreviousRun:
    """The run that `resume=` or `reuse=` names. Raises UserError if it does not exist or is not a run's folder."""
    folder = _last(key, value, pipeline) if names_last(value) else named_folder(value, f"{key}={value}")
    if not folder.is_dir():
        raise UserError(f"{key}={value}: no such folder; expected the folder of a run, or 'last'{suggest_run(value)}")
    if (folder / SWEEP).is_file():
        raise UserError(f"{key}={value}: the folder of a sweep; expected one of its runs, such as {folder / '0_...'}")
    if not (folder / JOURNAL).is_file():
        raise UserError(
            f"{key}={value}: no {JOURNAL} there; expected the folder of a run, such as outputs/runs/tune/..."
        )
    run = _read_run(folder.resolve(), f"{key}={value}", config_dir_typed)
    if pipeline is not None and pipeline != run.pipeline and key == "resume":
        raise UserError(f"{key}={value}: that run's pipeline is '{run.pipeline}', not '{pipeline}'; leave it out")
    return run


def _last(key: str, value: str, pipeline: str | None) -> Path:
    condition = RESUMABLE if key == "resume" else REUSABLE
    return last_run(value, (condition,), f"{key}={value}", f"{key}=DIR", pipeline)


def _read_run(folder: Path, where: str, config_dir_typed: bool) -> PreviousRun:
    """Read a run's overrides. Raises UserError for a run from elsewhere that would bring its own code."""
    try:
        overrides = _load_yaml(folder / ".hydra" / "overrides.yaml")
        hydra = _load_yaml(folder / ".hydra" / "hydra.yaml")["hydra"]
        pipeline = hydra["job"]["config_name"]
        sources = hydra["runtime"]["config_sources"]
        config_dir = next((source["path"] for source in sources if source["provider"] == "command-line"), None)
    # ValueError: invalid UTF-8, numbers and dates.
    except (OSError, UserError, yaml.YAMLError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise UserError(f"{where}: its .hydra folder does not have the run's command line") from None
    listed = overrides if isinstance(overrides, list) else [None]
    texts = [*listed, pipeline, *([] if config_dir is None else [config_dir])]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: its .hydra folder does not have the run's command line")
    code = next((str(override) for override in overrides if _loads_code(str(override))), None)
    if code is not None:
        raise UserError(f"{where}: the run's override '{code}' can run code; expected a run of your own")
    if config_dir and not is_in_runs_folder(folder) and not config_dir_typed:
        raise UserError(f"{where}: that run's --config-dir={config_dir} has code that would run; pass --config-dir too")
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


def _loads_code(override: str) -> bool:
    """True if an override of a run can load anything but shipped options."""
    key, _, value = override.partition("=")
    group = key.lstrip("+~").split("@")[0]
    return bool(_CODE.search(override)) or (
        group in ConfigFolders(config_dir=None).options and bool({"/", "\\"} & set(value))
    )
