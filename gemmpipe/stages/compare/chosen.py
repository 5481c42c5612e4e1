"""The rows of tuned tables for the problems of a comparison, as the run time would choose among them.

A row of a mixture of experts may be tuned under a condition (a routing) that calls do not say. A problem takes a row of
its own condition; where there is none, the row that a call is dispatched to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.data import Device, Problem, Scalar
from gemmpipe.family import Family
from gemmpipe.runtime.tables import TunedTables, load_tables
from gemmpipe.stages import Context
from gemmpipe.stages.history import native_tables
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row, RowPreference, rows_by_key

ProblemKey = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class TunedRows:
    """The rows of some tables for one device, best first."""

    device: Device
    exact: Mapping[ProblemKey, Sequence[Row]]
    """By the whole key."""
    tables: Sequence[TunedTables] = ()
    """By the keys of calls, without conditions; none for a family without such columns."""

    def find(self, problem: Problem) -> Sequence[Row]:
        """The rows of the problem's key; else those that calls are dispatched to, tuned under other conditions."""
        if problem.key in self.exact:
            return self.exact[problem.key]
        found: list[Row] = []
        for tables in self.tables:
            names = condition_names(tables.family)
            call = [None if name in names else value for name, value in problem.key]
            found += [each.row for each in tables.find(self.device, call)]
        return found


def condition_names(family: Family) -> frozenset[str]:
    """The key's columns that are conditions of a measurement."""
    return frozenset(column.name for column in family.key_columns if column.condition)


def other_conditions(row: Row, problem: Problem, family: Family) -> str:
    """`routing=uniform` for a row that was tuned under other conditions than the problem's; empty for the same."""
    key, names = dict(problem.key), condition_names(family)
    other = {name: row.get(name) for name in sorted(names) if row.get(name) != key[name]}
    return " ".join(f"no {name}" if value is None else f"{name}={value}" for name, value in other.items())


def chosen_rows(context: Context) -> TunedRows:
    """The rows of the output's tables, then those of the tables that the run time uses."""
    family, formats = context.family, (engine_format for _, engine_format in context.formats)
    paths = [path for path in native_tables(family, context.output, formats) if path.is_file()]
    used = load_tables(family)
    rows = [found.row for alternatives in used.rows.values() for found in alternatives]
    return _tuned_rows([*_rows(paths, context), *rows], [*_call_tables(paths, family), used], context)


def table_rows(path: Path, context: Context) -> TunedRows:
    """The rows of one table."""
    return _tuned_rows(_rows([path], context), _call_tables([path], context.family), context)


def _tuned_rows(rows: Sequence[Row], tables: Sequence[TunedTables], context: Context) -> TunedRows:
    has_conditions = bool(condition_names(context.family))
    return TunedRows(device=context.device, exact=_by_key(rows, context), tables=tables if has_conditions else ())


def _call_tables(paths: Sequence[Path], family: Family) -> list[TunedTables]:
    return [load_tables(family, only=path) for path in paths] if condition_names(family) else []


def _rows(paths: Sequence[Path], context: Context) -> list[Row]:
    """The rows of each table in turn, those of one key best first."""
    preference = RowPreference(device=context.device.name)
    tables = (rows_by_key(store.read(path, context.family), context.family, preference) for path in paths)
    return [row for table in tables for rows in table.values() for row in rows]


def _by_key(rows: Sequence[Row], context: Context) -> dict[ProblemKey, list[Row]]:
    """The rows for this device by problem key, in their order."""
    names = [c.name for c in context.family.key_columns]
    found: dict[ProblemKey, list[Row]] = {}
    for row in rows:
        if (row["gfx"], row["cu_num"]) == (context.device.gfx, context.device.cu_num):
            found.setdefault(tuple((name, row[name]) for name in names), []).append(row)
    return found
