"""The native tuned table: a CSV row for each problem."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.family import Family
from gemmpipe.formats import Format, Target
from gemmpipe.formats.chosen import plain_rows
from gemmpipe.formats.united import unite_into
from gemmpipe.table import RESULT
from gemmpipe.tables import store
from gemmpipe.tables.merging import Row

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Csv(Format):
    """Merges the problems' own selections into the family's table.

    `file` is its name in the folder of artifacts, or an absolute path (None: the family's own name); `sort` orders
    it by cu_num, N, M, K.
    """

    file: str | None
    sort: bool

    def table(self, family: Family, folder: Path) -> Path:
        """The table's path."""
        return self.named(folder) or folder / family.csv_name

    def named(self, folder: Path) -> Path | None:
        """The table's path, where `file` says it."""
        return folder / self.file if self.file else None

    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """The table and nothing else; conflicts are told as details, kept old rows as lines.

        Selections that were read from tables are of equal standing with what is there: see `united`.
        """
        path = self.table(family, target.folder)
        if "place" in selections:
            return unite_into(path, family, selections, target)
        rows = [_row(row, family) for row in plain_rows(family, selections, "")]
        if not rows:
            return []
        # Select has asked for the improvement that the user wants; asking twice would lose what it granted.
        conflicts = store.update(
            path,
            family,
            rows,
            sort=self.sort,
            min_improvement_pct=0.0,
            run_id=target.run_id,
            provenance=target.provenance,
            tell=target.warn,
        )
        for conflict in conflicts:
            target.events.emit("line" if conflict.kept == "old" else "detail", f"{path}: {conflict}")
        return [path]


def _row(row: Row, family: Family) -> Row:
    names = ("gfx", "cu_num", *(column.name for column in family.key_columns), *RESULT, "incumbent_us")
    found = {name: row.get(name) for name in names}
    for name in ("cu_num", "solidx", "splitK", "near_ties"):
        value = found[name]
        if isinstance(value, float) and math.isfinite(value):
            found[name] = int(value)
    return found if family.further_cells is None else {**found, **family.further_cells(found)}
