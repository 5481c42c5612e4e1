"""Rows that were read from tables, united with what stands in the native table already, and a report of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.errors import UserError, printable
from gemmpipe.family import Family
from gemmpipe.files.artifact import known_runs, locked, runs_of, sidecar, write_runs
from gemmpipe.formats import Target
from gemmpipe.paths import write_atomic
from gemmpipe.table import RECORDED, RESULT
from gemmpipe.tables.merging import Row
from gemmpipe.tables.store import open_sheet, render
from gemmpipe.tables.uniting import Entry, Union, entries_of, unite

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20


def report_path(path: Path) -> Path:
    """Where the report of a union stands: beside the table, and no table itself."""
    return path.with_name(f"{path.name}.merge.txt")


Text = Callable[[Sequence[Row], Family, Sequence[str]], str]
"""(rows, family, foreign columns) -> the text of a table."""


def unite_into(
    path: Path, family: Family, selections: "pd.DataFrame", target: Target, text: Text = render
) -> list[Path]:
    """Unite the rows with the table at `path` and write it, its sidecar and a report, under the table's lock.

    Raises UserError for a table that someone broke and EnvironmentProblem where it cannot be written: the old file
    stands in either case.
    """
    given = list(_entries(family, selections))
    files = sorted({entry.place.rpartition(":")[0] for entry in given})
    with locked(path):
        runs = {run: facts for file in files for run, facts in _runs(Path(file), target).items()}
        runs = {**known_runs(sidecar(path), target.warn), **runs}
        old = entries_of(path, family, open_sheet(path, family), runs) if path.exists() else []
        union = unite([*given, *old], family, target.judge.knowing(runs))
        used = {str(entry.row.get("run_id")) for entry in union.entries}
        # Also of rows that lost: else the columns would depend on what was merged first.
        extra = sorted({name for entry in (*given, *old) for name in entry.extra})
        rows = [{**entry.row, **entry.extra} for entry in union.entries]
        write_runs(sidecar(path), {run: facts for run, facts in runs.items() if run in used})
        write_atomic(path, text(rows, family, extra))
        lines = _lines(path, files, len(given), len(old), union)
        write_atomic(report_path(path), "".join(f"{printable(line)}\n" for line in lines))
    for line in lines[: _SHOWN + 1]:
        target.events.emit("line", f"merge: {line}")
    if len(lines) > _SHOWN + 1:
        target.events.emit("line", f"merge: and {len(lines) - _SHOWN - 1:,} more in {report_path(path)}")
    return [path, report_path(path)]


def _entries(family: Family, selections: "pd.DataFrame") -> Iterable[Entry]:
    names = ["gfx", "cu_num", *(column.name for column in family.key_columns), *RESULT]
    for *values, place, extra in selections[[*names, *RECORDED]].itertuples(index=False, name=None):
        yield Entry(row=dict(zip(names, values, strict=True)), extra=extra, place=place)


def _runs(path: Path, target: Target) -> Mapping[str, Mapping[str, object]]:
    try:
        return runs_of(sidecar(path))
    except UserError as error:
        target.warn(f"{error}; left out")
        return {}


def _lines(path: Path, files: list[str], given: int, stood: int, union: Union) -> list[str]:
    """A summary, then a line for each row that was left out."""
    kinds = Counter(conflict.kind for conflict in union.conflicts)
    left = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda kc: (-kc[1], kc[0])))
    own = f" and {stood:,} that stood there" if stood else ""
    return [
        f"{path}: {len(union.entries):,} rows, from {given:,} of {', '.join(files) or 'inputs without any'}{own}"
        + (f"; {union.alike:,} said the same" if union.alike else "")
        + (f"; left out: {left}" if left else "; no conflict"),
        *map(str, union.conflicts),
    ]
