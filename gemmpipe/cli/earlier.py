"""Earlier runs: what was typed for them, so that `resume=` and `reuse=` mean the same kernel and shapes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gemmpipe.cli.folders import Folders
from gemmpipe.cli.nesting import is_too_deep
from gemmpipe.cli.unbegun import JOURNAL, can_go_on
from gemmpipe.errors import UserError
from gemmpipe.files.regular import read_regular
from gemmpipe.paths import RUNS, is_among_runs
from gemmpipe.recipe import ShallowLoader

_MOST_BYTES = 1_000_000
"""What Hydra writes takes some 10,000; PyYAML reads these in seconds."""
_CODE = re.compile(r"_target_|\$\{|(^|[@./+~])hydra\.(callbacks|searchpath|job)")
"""In a word that someone else may have written: names code."""


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """A run on disk: its folder, its pipeline, its overrides, and the user's folder of options it had."""

    folder: Path
    pipeline: str
    overrides: tuple[str, ...]
    config_dir: Path | None


def find(key: str, value: str, pipeline: str | None, config_dir_typed: bool) -> EarlierRun:
    """The run that `resume=` or `reuse=` means. Raises UserError when there is none, or it is no run's folder."""
    try:
        folder = _last(key, pipeline) if value == "last" else Path(value).expanduser()
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
    run = _read(folder.resolve(), f"{key}={value}", config_dir_typed)
    if pipeline is not None and pipeline != run.pipeline and key == "resume":
        raise UserError(f"{key}={value}: that run's pipeline is '{run.pipeline}', not '{pipeline}'; leave the word out")
    return run


def _last(key: str, pipeline: str | None) -> Path:
    """The folder with the newest journal, of this pipeline if one is named; a run that found no problem is none."""
    name = pipeline or "*"
    found = [*RUNS.glob(f"{name}/*/{JOURNAL}"), *RUNS.glob(f"{name}/*/*/{JOURNAL}")]
    journals = [journal for journal in found if can_go_on(journal.parent)]
    if not journals:
        where = RUNS / pipeline if pipeline else RUNS
        raise UserError(f"{key}=last: no run with a journal under {where}; expected {key}=DIR")
    return max(journals, key=lambda journal: journal.stat().st_mtime_ns).parent


def _read(folder: Path, where: str, config_dir_typed: bool) -> EarlierRun:
    """Raises UserError for a run made elsewhere that would bring its own code."""
    try:
        overrides = _loaded(folder / ".hydra" / "overrides.yaml")
        hydra = _loaded(folder / ".hydra" / "hydra.yaml")["hydra"]
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
    odd = next((str(word) for word in overrides if _brings_code(str(word))), None)
    if odd is not None:
        raise UserError(f"{where}: '{odd}' was typed for that run, which can run code; expected a run of your own")
    if config_dir and not is_among_runs(folder) and not config_dir_typed:
        raise UserError(f"{where}: that run had --config-dir={config_dir}, whose code would be run; type it too")
    return EarlierRun(
        folder=folder,
        pipeline=pipeline,
        overrides=tuple(str(word) for word in overrides),
        config_dir=Path(config_dir) if config_dir else None,
    )


def _loaded(path: Path) -> Any:
    """A YAML file of a run, which someone else may have made. Raises OSError, UserError, ValueError or YAMLError."""
    text = read_regular(path, "a run's configuration", _MOST_BYTES).decode()
    if is_too_deep(text):
        raise ValueError(path)
    return yaml.load(text, ShallowLoader)  # noqa: S506 (derived from SafeLoader)


def _brings_code(word: str) -> bool:
    """Whether an override of a run, which someone else may have made, can have anything but our options loaded."""
    key, _, value = word.partition("=")
    group = key.lstrip("+~").split("@")[0]
    return bool(_CODE.search(word)) or (group in Folders(config_dir=None).options and bool({"/", "\\"} & set(value)))
