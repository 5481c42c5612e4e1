"""The tuned table on disk: read with the headers of all known versions and programs, merged, rewritten as a whole."""

import csv
import difflib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gemmpipe.core.artifact import locked, read_runs_or_reset, record_run, sidecar_path
from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError, quoted_repr, suggest_or_list
from gemmpipe.core.files import is_formula, read_cells
from gemmpipe.core.paths import write_atomic
from gemmpipe.core.schema import DEVICE_COLUMNS, RESULT
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.problem import locate_key_columns, parse_key_value
from gemmpipe.tables.cells import CellParser
from gemmpipe.tables.merge import REPLAYED, MergeConflict, Row, RowPreference, is_timed, merge_rows, row_key
from gemmpipe.tables.table_cache import TableCache

COLUMN_ALIASES = {"kernelid": "solidx", "errratio": "err_ratio", "arch": "gfx"}
_GFX_OF_UNITS = {304: "gfx942", 80: "gfx942", 256: "gfx950", 132: "sm_90"}
_UNITS_OF_GFX = {"gfx950": 256, "sm_90": 132}
_REPAIR_HINT = "fix or delete the row; the file is unchanged"


@dataclass(frozen=True, kw_only=True)
class LoadedTable:
    """A tuned table: rows with a time, rows without one (with the reason), and the names of foreign columns."""

    rows: list[Row]
    refused: list[tuple[Row, str]]
    extra: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParsedTable:
    """All rows of a table's file with their lines, timed or not."""

    extra: tuple[str, ...]
    """Foreign columns, kept as text."""
    missing_columns: tuple[str, ...]
    """Key columns that the file lacks, filled with the values that their absence means."""
    formula_columns: tuple[str, ...] = ()
    """Foreign columns with cells that a spreadsheet would run as formulas: those cells are left out."""
    rows: list[Row] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def read(path: Path, family: Family) -> list[Row]:
    """The timed rows, typed: the family's key, `gfx`, `cu_num`, `schema.RESULT` and unknown columns as text.

    Raises UserError: `file:row`, column, what was expected, what to do.
    """
    return load(path, family).rows


def load(path: Path, family: Family) -> LoadedTable:
    """The whole table, untimed rows apart. Raises UserError as `read` does."""
    sheet = parse_table(path, family)
    rows = [row for row in sheet.rows if is_timed(row)]
    untimed = [(row, line) for row, line in zip(sheet.rows, sheet.lines, strict=True) if not is_timed(row)]
    refused = [(row, f"{path}:{line}: us is {row.get('us')}, not a measured time") for row, line in untimed]
    return LoadedTable(rows=rows, refused=refused, extra=sheet.extra)


def parse_table(path: Path, family: Family) -> ParsedTable:
    """Every row of a table, typed. Raises UserError as `read` does.

    The rows are shared by all readers of the process, which must not change them.
    """
    return TABLES.read(path, family)


def _parse(path: Path, family: Family) -> ParsedTable:
    lines = read_cells(path)
    _, header = next(lines, (1, []))
    if not header:
        raise UserError(f"{path}:1: no header, expected the columns of a tuned table of {family.name}")
    columns = _columns(header, family, f"{path}:1")
    parsers = [CellParser(column, family) for column in columns]
    needed = (*DEVICE_COLUMNS, *(column.name for column in family.key_columns if not column.optional))
    absent = [column.name for column in family.key_columns if column.optional and column.name not in columns]
    missing = tuple(name for name in needed if name not in columns)
    key_indices = [columns.index(name) for name in needed if name in columns]
    defaults: dict[str, Mapping[str, Scalar]] = {}
    implied = family.aiter_table.implied if family.aiter_table and "config" not in columns else {}
    extra = tuple(name for name in columns if name in header and _foreign(name, family))
    shortest = max((i for i, name in enumerate(columns, 1) if name not in extra), default=0)  # pandas pads rows too
    sheet = ParsedTable(extra=extra, missing_columns=missing)
    for line, cells in lines:
        where = f"{path}:{line}"
        # A row that lost a comma is short too: its last cell of ours is then another program's, mostly empty.
        if len(header) > len(cells) >= shortest > 0 and cells[shortest - 1]:
            cells = [*cells, *[""] * (len(header) - len(cells))]
        if len(cells) != len(header):
            raise UserError(f"{where}: {len(cells)} cells, expected {len(header)} as in the header; {_REPAIR_HINT}")
        try:
            values = [known[cell] for known, cell in zip(parsers, cells, strict=True)]
        except UserError as error:
            raise UserError(f"{where}: {error}; {_REPAIR_HINT}") from None
        row: Row = {**dict(zip(columns, values, strict=True)), **dict.fromkeys(absent)}
        if REPLAYED in str(row.get("policy") or "").split():
            raise UserError(f"{where}: a row of a replay (gemmpipe demo), expected rows timed on a device")
        if missing or None in [values[index] for index in key_indices]:
            _fill_key(row, family, defaults, implied, where)
        _count_splits(row, columns, family, where)
        sheet.rows.append(row)
        sheet.lines.append(line)
    formulas = (
        name for name, known in zip(columns, parsers, strict=True) if name in extra and any(map(is_formula, known))
    )
    return replace(sheet, formula_columns=tuple(formulas))


TABLES = TableCache(parse=_parse, row_count=lambda sheet: len(sheet.rows))
"""The tables that this process has read."""


def _foreign(name: str, family: Family) -> bool:
    return name not in (*DEVICE_COLUMNS, *RESULT) and all(name != column.name for column in family.key_columns)


def _columns(header: Sequence[str], family: Family, where: str) -> list[str]:
    """Our name of each column of the header. Raises UserError for a duplicate or missing one."""
    of_key = {index: name for name, index in locate_key_columns(header, family, where).items()}
    known = {name.lower(): name for name in (*DEVICE_COLUMNS, *RESULT)}
    found = [
        of_key.get(index) or known.get(COLUMN_ALIASES.get(name.lower(), name.lower()), name)
        for index, name in enumerate(header)
    ]
    duplicate = next((name for index, name in enumerate(found) if name in found[:index]), None)
    if duplicate is not None:
        raise UserError(f"{where}: duplicate column '{duplicate}', expected it once")
    formula = next(filter(is_formula, found), None)
    if formula is not None:
        raise UserError(f"{where}: column {quoted_repr(formula)}, expected a name: spreadsheets run it as a formula")
    aiter_columns = family.aiter_table.columns if family.aiter_table else ()
    for name in found:
        unused = [column for column in known.values() if column not in found]
        is_known = name in (*of_key.values(), *known.values(), *aiter_columns)
        if not is_known and difflib.get_close_matches(name, unused, n=1, cutoff=0.75):
            # A misspelt name would lose a whole column.
            raise UserError(f"{where}: no column '{name}'{suggest_or_list(name, unused)}")
    if "config" in found and "libtype" not in found:
        raise UserError(
            f"{where}: column 'config' without 'libtype', expected a tuned table of {family.name}; {_REPAIR_HINT}"
        )
    if "us" not in found:
        raise UserError(f"{where}: no column 'us', expected a tuned table of {family.name}")
    return found


def _fill_key(
    row: Row, family: Family, defaults: dict[str, Mapping[str, Scalar]], implied: Mapping[str, Scalar], where: str
) -> None:
    """Infer gfx and cu_num, and fill the key columns that older tables lack (`defaults`: a cache by gfx).

    `implied`: the values of columns that aiter's table of the family lacks, for such a table.
    """
    gfx, units = row.get("gfx"), row.get("cu_num")
    if gfx is None:
        gfx = row["gfx"] = _GFX_OF_UNITS.get(units) if isinstance(units, int) else None
    if gfx is None:
        raise UserError(f"{where}: no gfx, and not known from cu_num {units}; add a column gfx such as gfx942 or sm_90")
    if units is None:
        units = row["cu_num"] = _UNITS_OF_GFX.get(str(gfx))
    if units is None:
        raise UserError(f"{where}: no cu_num, and not known from gfx {gfx}; add a column cu_num such as 304 or 132")
    for column in family.key_columns:
        if column.optional or row.get(column.name) is not None:
            continue
        if str(gfx) not in defaults:
            plain = family.key_defaults(KernelDefaults(dtype=None, out_dtype=None, bias=None), str(gfx))
            defaults[str(gfx)] = {**plain, **implied}
        value = defaults[str(gfx)].get(column.name, column.default)
        if value is None and column.kind != "str":
            raise UserError(f"{where}: column {column.name}: no value; {_REPAIR_HINT}")
        row[column.name] = parse_key_value(column, "" if value is None else value, str(gfx))


def _count_splits(row: Row, columns: Sequence[str], family: Family, where: str) -> None:
    """In an aiter table (no `config`) replace the library's own value of splitK by the number of splits."""
    if family.aiter_table is None or "config" in columns or row.get("splitK") is None:
        return
    try:
        row["splitK"] = family.aiter_table.splits(family.aiter_table.library(row), row["splitK"])
    except UserError as error:
        raise UserError(f"{where}: column splitK: {error}; {_REPAIR_HINT}") from None


def with_device_names(rows: Iterable[Row], runs: Mapping[str, Mapping[str, object]]) -> list[Row]:
    """The rows, with `device`, the product's name, from their runs in the sidecar where tables lack that column.

    A blank cell of an existing column stays blank: a row must not depend on the sidecars it was read with.
    """
    found = []
    for row in rows:
        if "device" not in row:
            device = runs.get(str(row.get("run_id")), {}).get("device")
            row = {**row, "device": device if isinstance(device, str) else None}
        found.append(row)
    return found


def render(rows: Sequence[Row], family: Family, extra: Sequence[str]) -> str:
    """The CSV text of a native table: dtypes as `torch.bfloat16`, bools True and False, nothing for None.

    An optional key column is written only if a row has a value in it.
    """
    used = {c.name for c in family.key_columns if c.optional and any(row.get(c.name) is not None for row in rows)}
    key = (column.name for column in family.key_columns if not column.optional or column.name in used)
    columns = list(dict.fromkeys((*DEVICE_COLUMNS, *key, *RESULT, *family.extra_columns, *extra)))
    dtypes = [columns.index(column.name) for column in family.key_columns if column.kind == "dtype"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [None if value != value else value for value in map(row.get, columns)]  # NaN is no value
        for index in dtypes:
            cells[index] = f"torch.{cells[index]}"
        writer.writerow(cells)
    return out.getvalue()


def update(
    path: Path,
    family: Family,
    new: Sequence[Row],
    *,
    sort: bool,
    min_improvement_pct: float,
    run_id: str,
    provenance: Mapping[str, object],
    warn: Callable[[str], object],
) -> list[MergeConflict]:
    """Merge rows into a table under its lock, with the run's provenance in the sidecar; returns the conflicts.

    `warn` is called with a text for a damaged sidecar that was set aside. Raises UserError for a damaged table,
    EnvironmentProblem if it cannot be written: the old file is unchanged in both cases.
    """
    with locked(path):
        old = load(path, family) if path.exists() else LoadedTable(rows=[], refused=[], extra=())
        runs = read_runs_or_reset(sidecar_path(path), warn)
        timed = with_device_names(old.rows, runs)
        untimed = with_device_names((row for row, _ in old.refused), runs)
        device = provenance.get("device")
        preference = RowPreference(device=device if isinstance(device, str) else None)
        rows, conflicts = merge_rows(timed, new, family, min_improvement_pct=min_improvement_pct, preference=preference)
        keys = {row_key(row, family) for row in rows}
        rows += [row for row in untimed if row_key(row, family) not in keys]
        if sort:
            rows.sort(key=lambda row: _sort_key(row, family))
        used = {str(row.get("run_id")) for row in rows}
        record_run(sidecar_path(path), run_id, provenance, used, warn)
        write_atomic(path, render(rows, family, old.extra))
    return conflicts


def _sort_key(row: Row, family: Family) -> tuple[object, ...]:
    sizes = tuple(row.get(name, 0) for name in ("cu_num", *family.sizes[:-1], family.rows_column, *family.sizes[-1:]))
    return (*sizes, str(row_key(row, family)))
