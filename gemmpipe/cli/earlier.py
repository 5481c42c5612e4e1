"""Earlier runs: what was typed for them, so that `resume=` and `reuse=` mean the same kernel and shapes."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from gemmpipe.errors import UserError

RUNS = Path("outputs/runs")
_JOURNAL = "trials.jsonl"


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """A run on disk: its folder, its pipeline, its overrides, and the user's folder of options it had."""

    folder: Path
    pipeline: str
    overrides: tuple[str, ...]
    config_dir: Path | None


def find(key: str, value: str, pipeline: str | None) -> EarlierRun:
    """The run that `resume=` or `reuse=` means. Raises UserError when there is none, or it is no run's folder."""
    folder = _last(key, pipeline) if value == "last" else Path(value).expanduser()
    if not folder.is_dir():
        raise UserError(f"{key}={value}: no such folder; expected the folder of a run, or 'last'")
    if (folder / "multirun.yaml").is_file():
        raise UserError(f"{key}={value}: the folder of a sweep; expected one of its runs, such as {folder / '0_...'}")
    if not (folder / _JOURNAL).is_file():
        raise UserError(
            f"{key}={value}: no {_JOURNAL} there; expected the folder of a run, such as outputs/runs/tune/..."
        )
    run = _read(folder.resolve(), f"{key}={value}")
    if pipeline is not None and pipeline != run.pipeline and key == "resume":
        raise UserError(f"{key}={value}: that run's pipeline is '{run.pipeline}', not '{pipeline}'; leave the word out")
    return run


def _last(key: str, pipeline: str | None) -> Path:
    """The folder with the newest journal, of this pipeline if one is named; a run that found no problem is none."""
    name = pipeline or "*"
    found = [*RUNS.glob(f"{name}/*/{_JOURNAL}"), *RUNS.glob(f"{name}/*/*/{_JOURNAL}")]
    journals = [journal for journal in found if _began(journal)]
    if not journals:
        where = RUNS / pipeline if pipeline else RUNS
        raise UserError(f"{key}=last: no run with a journal under {where}; expected {key}=DIR")
    return max(journals, key=lambda journal: journal.stat().st_mtime_ns).parent


def _began(journal: Path) -> bool:
    """Whether anything follows the first row, which every run writes."""
    with journal.open("rb") as stream:
        return bool(stream.readline()) and bool(stream.readline())


def _read(folder: Path, where: str) -> EarlierRun:
    try:
        overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
        hydra = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text(encoding="utf-8"))["hydra"]
        pipeline = hydra["job"]["config_name"]
        sources = hydra["runtime"]["config_sources"]
        config_dir = next((source["path"] for source in sources if source["provider"] == "command-line"), None)
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        raise UserError(f"{where}: its .hydra folder does not say what was typed for that run") from None
    if not isinstance(overrides, list) or not isinstance(pipeline, str):
        raise UserError(f"{where}: its .hydra folder does not say what was typed for that run")
    return EarlierRun(
        folder=folder,
        pipeline=pipeline,
        overrides=tuple(str(word) for word in overrides),
        config_dir=Path(config_dir) if config_dir else None,
    )
