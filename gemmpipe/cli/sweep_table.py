"""The output of a sweep besides that of its jobs: a header per job, and a table across the jobs at the end.

Jobs that a launcher runs in other processes print their own headers; the table has the jobs of this process.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.core.errors import UserError, printable
from gemmpipe.core.files import MAX_MANIFEST_BYTES, read_object
from gemmpipe.core.paths import MANIFEST
from gemmpipe.core.shell import shell_join
from gemmpipe.core.text_table import Column, aligned, fold_width, terminal_width
from gemmpipe.core.units import MISSING, duration_text
from gemmpipe.report.lines import Line, folded
from gemmpipe.report.speedup import marked_speedup_text


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """One job of a sweep."""

    number: int
    overrides: tuple[str, ...]
    folder: Path

    @property
    def header(self) -> str:
        """`job 1: kernel=a16w16 search=halving`, quoted for a shell."""
        return f"job {self.number}: {shell_join(self.overrides)}"


def begin_job() -> SweepJob:
    """The job that Hydra runs now; prints its header."""
    from hydra.core.hydra_config import HydraConfig

    config = HydraConfig.get()
    job = SweepJob(
        number=int(config.job.num),
        overrides=tuple(str(each) for each in config.overrides.task),
        folder=Path(config.runtime.output_dir),
    )
    header, width = Line(text=printable(job.header)), fold_width(sys.stdout)
    with tolerating_closed_pipes():
        print("", *(part.text for part in ([header] if width is None else folded(header, width))), sep="\n", flush=True)
    return job


def print_table(jobs: Sequence[tuple[SweepJob, int]]) -> None:
    """Print the jobs with their results, if there are several; `jobs` are pairs of a job and its exit code."""
    if len(jobs) < 2:
        return
    with tolerating_closed_pipes():
        print("", *map(printable, table_lines(jobs, terminal_width())), sep="\n", flush=True)


def table_lines(jobs: Sequence[tuple[SweepJob, int]], width: int) -> list[str]:
    """The table across jobs: time, problems, speed-up by regime of M, exit code, overrides that differ."""
    manifests = [_manifest(job.folder) for job, _ in jobs]
    figures = [_mapping(manifest.get("figures")) for manifest in manifests]
    labels = list(dict.fromkeys(label for each in figures for label in _speedups(each)))
    common = set.intersection(*(set(job.overrides) for job, _ in jobs))
    columns = [
        Column(title="job", cells=tuple(str(job.number) for job, _ in jobs)),
        Column(title="exit", cells=tuple(str(code) for _, code in jobs), importance=2),
        Column(title="time", cells=tuple(_duration(manifest) for manifest in manifests)),
        Column(title="products", cells=tuple(map(_products, manifests)), importance=3),
    ]
    for label in labels:
        cells = tuple(_speedups(each).get(label, MISSING) for each in figures)
        columns.append(Column(title=label, cells=cells, importance=1))
    words = tuple(" ".join(each for each in job.overrides if each not in common) for job, _ in jobs)
    return aligned([*columns, Column(title="options", cells=words, is_text=True)], width)


def _manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest of a job's run; empty for a job that failed before it wrote one."""
    with suppress(UserError, OSError):
        return read_object(folder / MANIFEST, limit=MAX_MANIFEST_BYTES)
    return {}


def _products(manifest: Mapping[str, Any]) -> str:
    """The number of products with a choice; `2 reused` where all were tuned already."""
    if reused := _mapping(manifest.get("reused")).get("problems"):
        return f"{reused} reused"
    return str(_mapping(manifest.get("figures")).get("products", MISSING))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _speedups(figures: Mapping[str, Any]) -> dict[str, str]:
    """The mean speed-up by regime, as on the job's last screen."""
    found = {}
    for regime in figures.get("regimes", ()):
        if speedup := _mapping(regime.get("speedup")):
            shared = bool(regime.get("shared"))
            found[str(regime["label"])] = marked_speedup_text(float(speedup["mean"]), shared=shared)
    return found


def _duration(manifest: Mapping[str, Any]) -> str:
    wall_s = manifest.get("wall_s")
    return duration_text(float(wall_s)) if isinstance(wall_s, int | float) else MISSING
