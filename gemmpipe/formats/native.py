"""The native tuned table: a CSV row per problem.

Selections of a run are merged into it; rows that were read from tables are united with it, with a report.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.artifact import locked, read_runs, read_runs_or_reset, sidecar_path, write_runs
from gemmpipe.core.errors import UserError, printable
from gemmpipe.core.events import counted
from gemmpipe.core.paths import write_atomic
from gemmpipe.core.schema import DEVICE_COLUMNS, RECORDED, RESULT
from gemmpipe.family import Family
from gemmpipe.formats import Format, Target, typed_rows
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row
from gemmpipe.tables.store import parse_table, render
from gemmpipe.tables.unite import TableEntry, UnitedTable, entries_of, unite_tables

if TYPE_CHECKING:
    import pandas as pd


_MAX_SHOWN = 20


def report_path(path: Path) -> Path:
    """The path of a union's report, next to the table; its suffix keeps it from being read as a table."""
    return path.with_name(f"{path.name}.merge.txt")


Text = Callable[[Sequence[Row], Family, Sequence[str]], str]
"""(rows, family, foreign columns) -> the text of a table."""


def unite_into(
    path: Path, family: Family, selections: "pd.DataFrame", target: Target, text: Text = render
) -> list[Path]:
    """Unite the rows with the table at `path` and write it, its sidecar and a report, under the table's lock.

    Raises UserError for a damaged table and EnvironmentProblem if it cannot be written: the old file is unchanged in
    both cases.
    """
    given = list(_entries(family, selections))
    files = sorted({entry.place.rpartition(":")[0] for entry in given})
    with locked(path):
        runs = {run: facts for file in files for run, facts in _runs(Path(file), target).items()}
        runs = {**read_runs_or_reset(sidecar_path(path), target.warn), **runs}
        old = entries_of(path, family, parse_table(path, family), runs) if path.exists() else []
        union = unite_tables([*given, *old], family, target.preference.with_runs(runs))
        used = {str(entry.row.get("run_id")) for entry in union.entries}
        # Rows that lost included: otherwise the columns would depend on the order of merging.
        extra = sorted({name for entry in (*given, *old) for name in entry.extra})
        rows = [{**entry.row, **entry.extra} for entry in union.entries]
        write_runs(sidecar_path(path), {run: facts for run, facts in runs.items() if run in used})
        write_atomic(path, text(rows, family, extra))
        lines = _report_lines(path, files, len(given), len(old), union)
        write_atomic(report_path(path), "".join(f"{printable(line)}\n" for line in lines))
    for line in lines[: _MAX_SHOWN + 1]:
        target.events.emit("line", f"merge: {line}")
    if len(lines) > _MAX_SHOWN + 1:
        target.events.emit("line", f"merge: and {len(lines) - _MAX_SHOWN - 1:,} more in {report_path(path)}")
    return [path, report_path(path)]


def _entries(family: Family, selections: "pd.DataFrame") -> Iterable[TableEntry]:
    names = [*DEVICE_COLUMNS, *(column.name for column in family.key_columns), *RESULT]
    for *values, place, extra in selections[[*names, *RECORDED]].itertuples(index=False, name=None):
        yield TableEntry(row=dict(zip(names, values, strict=True)), extra=extra, place=place)


def _runs(path: Path, target: Target) -> Mapping[str, Mapping[str, object]]:
    try:
        return read_runs(sidecar_path(path))
    except UserError as error:
        target.warn(f"{error}; left out")
        return {}


def _report_lines(path: Path, files: list[str], given: int, existing: int, union: UnitedTable) -> list[str]:
    """A summary, then a line per row that was left out."""
    kinds = Counter(conflict.kind for conflict in union.conflicts)
    left = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda kc: (-kc[1], kc[0])))
    own = f" and {existing:,} already there" if existing else ""
    return [
        f"{path}: {counted(len(union.entries), 'row')}, from {given:,} of {', '.join(files)}{own}"
        + (f"; {counted(union.duplicates, 'duplicate')}" if union.duplicates else "")
        + (f"; left out: {left}" if left else "; no conflict"),
        *map(str, union.conflicts),
    ]


@dataclass(frozen=True, kw_only=True)
class NativeCsv(Format):
    """Merges the problems' own selections into the family's table.

    `file` is its name in the folder of artifacts, or an absolute path (None: the family's own name); `sort` orders
    it by cu_num, N, M, K.
    """

    file: str | None
    sort: bool

    def table(self, family: Family, folder: Path) -> Path:
        """The table's path."""
        return self.named_file(folder) or folder / family.csv_name

    def named_file(self, folder: Path) -> Path | None:
        """The table's path, if `file` names it."""
        return folder / self.file if self.file else None

    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """The path of the table; conflicts are emitted as details, old rows that were kept as lines.

        Selections that were read from tables have equal rank with the table's rows: see `unite_into`.
        """
        path = self.table(family, target.folder)
        if "place" in selections:
            return unite_into(path, family, selections, target)
        rows = [_row(row, family) for row in typed_rows(family, selections, "")]
        if not rows:
            return []
        # The stage select has applied the user's threshold of improvement; a second test here would undo its choice.
        conflicts = store.update(
            path,
            family,
            rows,
            sort=self.sort,
            min_improvement_pct=0.0,
            run_id=target.run_id,
            provenance=target.provenance,
            warn=target.warn,
        )
        for conflict in conflicts:
            target.events.emit("line" if conflict.kept == "old" else "detail", f"{path}: {conflict}")
        return [path]


def _row(row: Row, family: Family) -> Row:
    names = (*DEVICE_COLUMNS, *(column.name for column in family.key_columns), *RESULT, "incumbent_us")
    found = {name: row.get(name) for name in names}
    for name in ("cu_num", "solidx", "splitK", "near_ties"):
        value = found[name]
        if isinstance(value, float) and math.isfinite(value):
            found[name] = int(value)
    return found if family.extra_cells is None else {**found, **family.extra_cells(found)}
