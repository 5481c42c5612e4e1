"""The tuned tables of a process: read once per family, merged in memory, never rewritten.

Also warnings about environment variables that look like those of a family's tables but are not read.
"""

import difflib
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import ModuleType

from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import TABLES_PREFIX, shipped_tables, tables_variable, user_tables
from gemmpipe.core.schema import DEVICE_COLUMNS
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.family.dtypes import X_SCALE_COLUMN
from gemmpipe.family.environment import given_tables, only_given_tables, table_variables, unused_variables
from gemmpipe.family.routing import UNIFORM
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.tables.file_names import is_table_file
from gemmpipe.tables.merge import Row, RowKey, is_provisional, merge_rows, rows_by_key
from gemmpipe.tables.store import read

_THEIR_WORD = "GEMM_"
"""In names of aiter's variables, and easily left out."""
_MIN_SIMILARITY = 0.8
"""Similarity of names (0 to 1): two wrong letters in ten. A user's family in a package is known once it is loaded."""


def warn_of_misspelt_variables() -> None:
    """Warn once about each variable with a name close to a shipped family's that no family reads."""
    shipped = {tables_variable(name) for name in shipped_families()}
    unknown = [n for n, value in os.environ.items() if value and n.startswith(TABLES_PREFIX) and n not in shipped]
    readers = _known_variables() if unknown else {}
    for name in unknown:
        if name in readers.values() or _is_user_family(name):
            continue
        known = {known.removeprefix(TABLES_PREFIX): read for known, read in readers.items()}
        known = {**{word.replace(_THEIR_WORD, ""): read for word, read in known.items()}, **known}
        close = difflib.get_close_matches(name.removeprefix(TABLES_PREFIX).upper(), known, n=1, cutoff=_MIN_SIMILARITY)
        if close:
            LOG.warn(name, f"{name}: not a variable of any family, ignored (did you mean {known[close[0]]}?)")


def warn_of_aiter_variables() -> None:
    """Warn once about each of aiter's variables that is set and has no or another meaning here."""
    for name, line in unused_variables().items():
        LOG.warn(name, line)


def _known_variables() -> dict[str, str]:
    """Names for a shipped family's variable, aiter's included -> the variable that is read."""
    found = {tables_variable(f"gemm_{name}"): tables_variable(name) for name in shipped_families()}
    for family in map(load_family, shipped_families()):
        found |= {name: name for name in table_variables(family) if name.startswith(TABLES_PREFIX)}
    return found


def _is_user_family(name: str) -> bool:
    """True if a user's own family has this variable: a loaded one, or a module with that name."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    loaded = (vars(module).get("FAMILY") for module in modules)  # getattr would trigger lazy imports
    if any(isinstance(family, Family) and tables_variable(family.name) == name for family in loaded):
        return True
    try:
        return find_spec(name.removeprefix(TABLES_PREFIX).lower()) is not None
    except (ImportError, ValueError):
        return False


_LOG = logging.getLogger("gemmpipe.runtime")

FileStates = tuple[tuple[str, int, int], ...]
"""(path, modification time in ns, size in bytes) of files."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row and its file."""

    row: Row
    path: Path
    origin: Path
    """The file, if it was given by name; else its folder: the tables of a folder are looked up as one."""


@dataclass(frozen=True, kw_only=True)
class TunedTables:
    """The rows of one family by key, best first: by layer, provisional rows after all others."""

    family: Family
    state: FileStates
    """The states of the files when they were read."""
    rows: dict[RowKey, list[TableRow]] = field(default_factory=dict)

    @cached_property
    def orders(self) -> bool:
        """True if a row is for a single order of x's scales, so that calls must be distinguished by theirs."""
        return any(found.row.get(X_SCALE_COLUMN.name) is not None for each in self.rows.values() for found in each)

    def find(self, device: Device, key: Iterable[Scalar]) -> Sequence[TableRow]:
        """The rows for the family's key on this device; a later one is used if an earlier one cannot run.

        Of the rows of a file, or of a folder's files, those timed on this model of device come first: gfx and cu_num
        are the same on an H100 and an H200.
        """
        found = self.rows.get((device.gfx, device.cu_num, *key), ())
        if len(found) < 2:
            return found
        origins = groupby(found, key=lambda each: (_is_provisional(each.row), each.origin))
        return [each for _, rows in origins for each in sorted(rows, key=lambda r: r.row.get("device") != device.name)]

    def rows_with(self, device: Device, wanted: dict[str, Scalar]) -> list[list[Row]]:
        """The rows of each key on this device with these values, for any other columns."""
        return [
            [found.row for found in alternatives]
            for (gfx, units, *_), alternatives in self.rows.items()
            if (gfx, units) == (device.gfx, device.cu_num)
            and all(alternatives[0].row[k] == v for k, v in wanted.items())
        ]


def table_layers(family: Family) -> list[list[Path]]:
    """Files by layer: those of the environment variable, the user's folder, the shipped ones; or only the first.

    In a folder the family's default table comes first, then the per-model ones (`<model>_<table>_<tag>.csv`) by name.
    """
    folders = () if only_given_tables() else (user_tables(), shipped_tables())
    return [given_tables(family), *(_model_tables(folder / family.csv_name) for folder in folders)]


def _model_tables(default: Path) -> list[Path]:
    models = [path for path in default.parent.glob(f"*{default.stem}*.csv") if is_table_file(path.name, default.name)]
    files = dict.fromkeys((default, *sorted(models)))
    return [path for path in files if path.is_file()]


def file_states(family: Family) -> FileStates:
    """The current states of the tables' files; a change means new rows to read."""
    found = []
    for path in (path for files in table_layers(family) for path in files):
        with suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def load_tables(family: Family, only: Path | None = None) -> TunedTables:
    """The rows of all layers, or of the file `only`; warns of conflicts within a layer.

    A key has the rows of all files in their order, those of one file best first: if one cannot run, the next one is
    used. A file that cannot be read causes a warning, not an error.
    """
    warn_of_misspelt_variables()
    warn_of_aiter_variables()
    tables = TunedTables(family=family, state=file_states(family))
    for layer, files in enumerate(table_layers(family) if only is None else [[only]]):
        earlier: dict[RowKey, list[TableRow]] = {}
        for path in files:
            origin = path if layer == 0 else path.parent
            found = _rows_of(path, origin, family)
            _warn_of_conflicts(found, path, family, earlier)
            for key, rows in found.items():
                earlier.setdefault(key, []).extend(rows)
            for key, rows in _answers(found, path, family):
                tables.rows.setdefault(key, []).extend(rows)
    for alternatives in tables.rows.values():
        alternatives.sort(key=lambda found: _is_provisional(found.row))
    return tables


def _rows_of(path: Path, origin: Path, family: Family) -> dict[RowKey, list[TableRow]]:
    """A file's rows by key, best first."""
    try:
        rows = read(path, family)
    except UserError as error:
        _LOG.warning("gemmpipe: a tuned table is left out: %s", error)
        return {}
    by_key = rows_by_key(rows, family).items()
    return {key: [TableRow(row=row, path=path, origin=origin) for row in found] for key, found in by_key}


def _answers(rows: dict[RowKey, list[TableRow]], path: Path, family: Family) -> list[tuple[RowKey, list[TableRow]]]:
    """The rows of a file with the keys of the calls that they answer: without conditions, such as a routing.

    Rows timed under a condition come before those without. If a file has rows of several conditions for a call, which
    does not say its own, those without come first, then those of the uniform routing, then the others in the order of
    the file; the log names the file once.
    """
    # A row's key begins with gfx and cu_num.
    places = {i: column.name for i, column in enumerate(family.key_columns, 2) if column.condition}
    if not places:
        return list(rows.items())
    by_call: dict[RowKey, list[RowKey]] = {}
    for key in rows:
        by_call.setdefault(tuple(None if i in places else v for i, v in enumerate(key)), []).append(key)
    several = []
    for call, keys in by_call.items():
        one_condition = sum(key != call for key in keys) < 2
        ranks = (1, 0, 0) if one_condition else (0, 1, 2)
        keys.sort(key=lambda key: ranks[_condition_kind(key, places)])
        if not one_condition:
            several.append(keys[0])
    if several:
        _LOG.warning(
            "gemmpipe: %s rows of several values of %s; calls use the row %s (%s)",
            _keys_have(len(several), path),
            ", ".join(places.values()),
            ("without one", f"of {UNIFORM}", "that comes first")[_condition_kind(several[0], places)],
            _key_text(several[0], family),
        )
    return [(call, rows[key]) for call, keys in by_call.items() for key in keys]


def _condition_kind(key: RowKey, places: Iterable[int]) -> int:
    """0 for a key without conditions, 1 for the uniform routing alone, 2 for any other."""
    given = {key[place] for place in places} - {None}
    return 0 if not given else 1 if given == {UNIFORM} else 2


def _warn_of_conflicts(
    rows: Mapping[RowKey, Sequence[TableRow]], path: Path, family: Family, earlier: Mapping[RowKey, Sequence[TableRow]]
) -> None:
    """Warn of keys with two choices for one model of device; a row that names none may be of each."""
    first: dict[RowKey, Path] = {}
    for key, found in rows.items():
        alone = [each for each in (*earlier.get(key, ()), *found) if not _is_provisional(each.row)]
        if len(alone) < 2:
            continue
        for model in {str(each.row["device"]) for each in alone if each.row.get("device")} or {""}:
            of_model = [each for each in alone if (each.row.get("device") or model) == model]
            if merge_rows([each.row for each in of_model], [], family, min_improvement_pct=0)[1]:
                first.setdefault(key, of_model[0].path)
    if first:
        others = sorted({str(other) for other in first.values()} - {str(path)}) or [str(path)]
        _LOG.warning(
            "gemmpipe: %s other choices in %s, which has precedence (%s)",
            _keys_have(len(first), path),
            ", ".join(others),
            _key_text(next(iter(first)), family),
        )


def _keys_have(count: int, path: Path) -> str:
    return f"{count} keys of {path} have" if count != 1 else f"1 key of {path} has"


def _is_provisional(row: Row) -> bool:
    return is_provisional(row.get("policy"))


def _key_text(key: Sequence[Scalar], family: Family) -> str:
    names = (*DEVICE_COLUMNS, *(column.name for column in family.key_columns))
    return " ".join(f"{name}={value}" for name, value in zip(names, key, strict=True))
