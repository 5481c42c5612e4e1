"""The tuned table on disk: read with every header that is out there, merged, written back whole."""

import csv
import difflib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gemmpipe.core.artifact import locked, read_runs_or_reset, record_run, sidecar_path
from gemmpipe.core.data import Scalar, is_plausible_time_us
from gemmpipe.core.errors import UserError, quoted_repr, suggest_or_list
from gemmpipe.core.files import is_formula, read_cells
from gemmpipe.core.paths import write_atomic
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.problem import locate_key_columns, parse_key_value
from gemmpipe.tables.merge import CellParser, MergeConflict, Row, merge_rows, row_key

_ALIASES = {"kernelid": "solidx", "errratio": "err_ratio", "arch": "gfx"}
_GFX_OF_UNITS = {304: "gfx942", 80: "gfx942", 256: "gfx950", 132: "sm_90"}
_UNITS_OF_GFX = {"gfx950": 256, "sm_90": 132}
_REPAIR_HINT = "mend or delete the row; the file was left as it is"


@dataclass(frozen=True, kw_only=True)
class LoadedTable:
    """A tuned table: rows that can win, rows that cannot (with the reason), and the names of foreign columns."""

    rows: list[Row]
    refused: list[tuple[Row, str]]
    extra: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParsedTable:
    """A table as it stands in its file: every row with its line, whether it can win or not."""

    extra: tuple[str, ...]
    """Foreign columns, kept as text."""
    missing_columns: tuple[str, ...]
    """Columns of the key that the file does not have: filled with what it means by leaving them out."""
    formula_columns: tuple[str, ...] = ()
    """Foreign columns with cells that a spreadsheet would take for formulas: those cells are left out."""
    rows: list[Row] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def read(path: Path, family: Family) -> list[Row]:
    """The rows that can win, typed: the family's key, `gfx`, `cu_num`, `table.RESULT` and unknown columns as text.

    Raises UserError: `file:row`, column, what was expected, what to do.
    """
    return load(path, family).rows


def load(path: Path, family: Family) -> LoadedTable:
    """The whole table, with what cannot win kept apart. Raises UserError as `read` does."""
    sheet = parse_table(path, family)
    rows = [row for row in sheet.rows if is_timed(row)]
    lame = [(row, line) for row, line in zip(sheet.rows, sheet.lines, strict=True) if not is_timed(row)]
    refused = [(row, f"{path}:{line}: us is {row.get('us')}, no time that was measured") for row, line in lame]
    return LoadedTable(rows=rows, refused=refused, extra=sheet.extra)


def is_timed(row: Row) -> bool:
    """Whether the row has a time that was measured."""
    return is_plausible_time_us(row.get("us"))


def parse_table(path: Path, family: Family) -> ParsedTable:
    """Every row of a table, typed. Raises UserError as `read` does."""
    lines = read_cells(path)
    _, header = next(lines, (1, []))
    if not header:
        raise UserError(f"{path}:1: no header, expected the columns of a tuned table of {family.name}")
    columns = _columns(header, family, f"{path}:1")
    parsers = [CellParser(column, family) for column in columns]
    needed = ("gfx", "cu_num", *(column.name for column in family.key_columns if not column.optional))
    unsaid = [column.name for column in family.key_columns if column.optional and column.name not in columns]
    lacking = tuple(name for name in needed if name not in columns)
    places = [columns.index(name) for name in needed if name in columns]
    fill: dict[str, Mapping[str, Scalar]] = {}
    extra = tuple(name for name in columns if name in header and _foreign(name, family))
    sheet = ParsedTable(extra=extra, missing_columns=lacking)
    for line, cells in lines:
        where = f"{path}:{line}"
        if len(cells) != len(header):
            raise UserError(f"{where}: {len(cells)} cells, expected {len(header)} as in the header; {_REPAIR_HINT}")
        try:
            values = [known[cell] for known, cell in zip(parsers, cells, strict=True)]
        except UserError as error:
            raise UserError(f"{where}: {error}; {_REPAIR_HINT}") from None
        row: Row = {**dict(zip(columns, values, strict=True)), **dict.fromkeys(unsaid)}
        if lacking or None in [values[place] for place in places]:
            _fill_key(row, family, fill, where)
        _count_splits(row, columns, family, where)
        sheet.rows.append(row)
        sheet.lines.append(line)
    odd = (name for name, known in zip(columns, parsers, strict=True) if name in extra and any(map(is_formula, known)))
    return replace(sheet, formula_columns=tuple(odd))


def _foreign(name: str, family: Family) -> bool:
    return name not in ("gfx", "cu_num", *RESULT) and all(name != column.name for column in family.key_columns)


def _columns(header: Sequence[str], family: Family, where: str) -> list[str]:
    """What each column of the header is called here. Raises UserError for one that is there twice or is missing."""
    of_key = {place: name for name, place in locate_key_columns(header, family, where).items()}
    known = {name.lower(): name for name in ("gfx", "cu_num", *RESULT)}
    found = [
        of_key.get(place) or known.get(_ALIASES.get(name.lower(), name.lower()), name)
        for place, name in enumerate(header)
    ]
    twice = next((name for place, name in enumerate(found) if name in found[:place]), None)
    if twice is not None:
        raise UserError(f"{where}: column '{twice}' is there twice, expected once")
    formula = next(filter(is_formula, found), None)
    if formula is not None:
        raise UserError(f"{where}: column {quoted_repr(formula)}, expected a name: spreadsheets take it for a formula")
    theirs = family.aiter_table.columns if family.aiter_table else ()
    for name in found:
        lost = [column for column in known.values() if column not in found]
        known_name = name in (*of_key.values(), *known.values(), *theirs)
        if not known_name and difflib.get_close_matches(name, lost, n=1, cutoff=0.75):
            raise UserError(
                f"{where}: no column '{name}'{suggest_or_list(name, lost)}"
            )  # else a whole column would be lost
    if "config" in found and "libtype" not in found:
        raise UserError(
            f"{where}: no column 'libtype' beside 'config', expected a tuned table of {family.name}; {_REPAIR_HINT}"
        )
    if "us" not in found:
        raise UserError(f"{where}: no column 'us', expected a tuned table of {family.name}")
    return found


def _fill_key(row: Row, family: Family, fill: dict[str, Mapping[str, Scalar]], where: str) -> None:
    """Infer gfx and cu_num, fill the key columns that older tables lack (`fill`: known so far, by gfx)."""
    gfx, units = row.get("gfx"), row.get("cu_num")
    if gfx is None:
        gfx = row["gfx"] = _GFX_OF_UNITS.get(units) if isinstance(units, int) else None
    if gfx is None:
        raise UserError(f"{where}: no gfx, and cu_num {units} does not tell; add a column gfx such as gfx942 or sm_90")
    if units is None:
        units = row["cu_num"] = _UNITS_OF_GFX.get(str(gfx))
    if units is None:
        raise UserError(f"{where}: no cu_num, and gfx {gfx} does not tell; add a column cu_num such as 304 or 132")
    for column in family.key_columns:
        if column.optional or row.get(column.name) is not None:
            continue
        if str(gfx) not in fill:
            fill[str(gfx)] = family.key_defaults(KernelDefaults(dtype=None, out_dtype=None, bias=None), str(gfx))
        value = fill[str(gfx)].get(column.name, column.default)
        if value is None and column.kind != "str":
            raise UserError(f"{where}: column {column.name}: no value; {_REPAIR_HINT}")
        row[column.name] = parse_key_value(column, "" if value is None else value, str(gfx))


def _count_splits(row: Row, columns: Sequence[str], family: Family, where: str) -> None:
    """In a table of aiter's, which has no `config`, say the number of splits instead of what its library writes."""
    if family.aiter_table is None or "config" in columns or row.get("splitK") is None:
        return
    try:
        row["splitK"] = family.aiter_table.splits(family.aiter_table.library(row), row["splitK"])
    except UserError as error:
        raise UserError(f"{where}: column splitK: {error}; {_REPAIR_HINT}") from None


def fill_device_names(rows: Iterable[Row], runs: Mapping[str, Mapping[str, object]]) -> None:
    """Say on which product rows were timed that have no column for it, as their runs in the sidecar tell.

    A blank cell in such a column stays blank: what a row says must not depend on which sidecars it met on its way.
    """
    for row in rows:
        if "device" not in row:
            device = runs.get(str(row.get("run_id")), {}).get("device")
            row["device"] = device if isinstance(device, str) else None


def render(rows: Sequence[Row], family: Family, extra: Sequence[str]) -> str:
    """The CSV text of a native table: dtypes as `torch.bfloat16`, bools True and False, nothing for None.

    An optional column of the key is there only where a row has a value in it.
    """
    said = {c.name for c in family.key_columns if c.optional and any(row.get(c.name) is not None for row in rows)}
    key = (column.name for column in family.key_columns if not column.optional or column.name in said)
    columns = list(dict.fromkeys(("gfx", "cu_num", *key, *RESULT, *family.extra_columns, *extra)))
    dtypes = [columns.index(column.name) for column in family.key_columns if column.kind == "dtype"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [None if value != value else value for value in map(row.get, columns)]  # NaN is no value either
        for place in dtypes:
            cells[place] = f"torch.{cells[place]}"
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
    tell: Callable[[str], object],
) -> list[MergeConflict]:
    """Merge rows into a table under its lock, with the run's provenance in the sidecar; returns what clashed.

    `tell` hears of what was set aside.

    Raises UserError for a table that someone broke, EnvironmentProblem where it cannot be written: the old file
    stands in either case.
    """
    with locked(path):
        old = load(path, family) if path.exists() else LoadedTable(rows=[], refused=[], extra=())
        fill_device_names([*old.rows, *(row for row, _ in old.refused)], read_runs_or_reset(sidecar_path(path), tell))
        rows, conflicts = merge_rows(old.rows, new, family, min_improvement_pct=min_improvement_pct)
        is_timed = {row_key(row, family) for row in rows}
        rows += [row for row, _ in old.refused if row_key(row, family) not in is_timed]
        if sort:
            rows.sort(key=lambda row: _sort_key(row, family))
        used = {str(row.get("run_id")) for row in rows}
        record_run(sidecar_path(path), run_id, provenance, used, tell)
        write_atomic(path, render(rows, family, old.extra))
    return conflicts


def _sort_key(row: Row, family: Family) -> tuple[object, ...]:
    sizes = tuple(row.get(name, 0) for name in ("cu_num", *family.sizes[:-1], family.rows_column, *family.sizes[-1:]))
    return (*sizes, str(row_key(row, family)))
