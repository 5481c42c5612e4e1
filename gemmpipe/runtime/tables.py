"""The tuned tables that a process looks things up in: read once a family, merged in memory, never rewritten."""

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gemmpipe.aiter_environment import given_tables, only_given
from gemmpipe.data import Device, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family
from gemmpipe.operand_types import X_SCALE
from gemmpipe.paths import shipped_tables, user_tables
from gemmpipe.runtime.variables import warn_of_aiters, warn_of_slips
from gemmpipe.tables.merging import Key, Row, key_of, merge, provisional
from gemmpipe.tables.store import read

_LOG = logging.getLogger("gemmpipe.runtime")

State = tuple[tuple[str, int, int], ...]
"""(path, time of the last change in ns, bytes) of files."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A row and the file that it came from."""

    row: Row
    path: Path


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The rows of one family by key, best first: by layer, and those timed beside other work after all others."""

    family: Family
    state: State
    """The files as they were when read."""
    rows: dict[Key, list[Found]] = field(default_factory=dict)

    @cached_property
    def orders(self) -> bool:
        """Whether a row is for one layout of x's scales alone, so that calls must be told apart by theirs."""
        return any(found.row.get(X_SCALE.name) is not None for each in self.rows.values() for found in each)

    def find(self, device: Device, key: Iterable[Scalar]) -> Sequence[Found]:
        """The rows for the family's key on this device; a later one serves where an earlier one cannot run."""
        return self.rows.get((device.gfx, device.cu_num, *key), ())

    def like(self, device: Device, wanted: dict[str, Scalar]) -> list[list[Row]]:
        """The rows of each key on this device that has these values, whatever its other columns say."""
        return [
            [found.row for found in alternatives]
            for (gfx, units, *_), alternatives in self.rows.items()
            if (gfx, units) == (device.gfx, device.cu_num)
            and all(alternatives[0].row[k] == v for k, v in wanted.items())
        ]


def layers(family: Family) -> list[list[Path]]:
    """Files by layer: those of the environment variable, the user's folder, the shipped ones; or the first alone.

    In a folder the family's default table comes first, then the per-model ones (`<model>_<table>_<tag>.csv`) by name.
    """
    folders = () if only_given() else (user_tables(), shipped_tables())
    return [given_tables(family), *(_beside(folder / family.csv_name) for folder in folders)]


def _beside(default: Path) -> list[Path]:
    named = re.compile(rf"([^.].*_)?{re.escape(default.stem)}(_.*)?\.csv")
    models = [path for path in default.parent.glob(f"*{default.stem}*.csv") if named.fullmatch(path.name)]
    files = dict.fromkeys((default, *sorted(models)))
    return [path for path in files if path.is_file() and "untuned" not in path.name]


def state_of(family: Family) -> State:
    """Which files there are now; another answer than before means that there is something to read."""
    found = []
    for path in (path for files in layers(family) for path in files):
        with suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def load_tables(family: Family, only: Path | None = None) -> Tables:
    """Every layer's rows, or those of one file; what clashes within a layer is named once.

    A key has the rows of all files, file after file, since one that cannot run gives way to the next.

    A file that cannot be read costs a warning, not the workload.
    """
    warn_of_slips()
    warn_of_aiters()
    tables = Tables(family=family, state=state_of(family))
    for files in layers(family) if only is None else [[only]]:
        first: dict[Key, Found] = {}
        for path in files:
            for found in _rows_of(path, family, first):
                tables.rows.setdefault(key_of(found.row, family), []).append(found)
    for alternatives in tables.rows.values():
        alternatives.sort(key=lambda found: _provisional(found.row))
    return tables


def _rows_of(path: Path, family: Family, layer: dict[Key, Found]) -> list[Found]:
    """A file's rows; `layer` holds what answers first of the layer's files so far, and learns of this one's."""
    try:
        rows = read(path, family)
    except UserError as error:
        _LOG.warning("gemmpipe: a tuned table is left out: %s", error)
        return []
    _tell_of_conflicts(rows, path, family, layer)
    found = [Found(row=row, path=path) for row in rows]
    for each in found:
        key = key_of(each.row, family)
        known = layer.get(key)
        if known is None or (_provisional(known.row) and not _provisional(each.row)):
            layer[key] = each
    return found


def _tell_of_conflicts(rows: Sequence[Row], path: Path, family: Family, layer: dict[Key, Found]) -> None:
    before = [layer[key].row for key in dict.fromkeys(key_of(row, family) for row in rows) if key in layer]
    timed_alone = [row for row in (*before, *rows) if not _provisional(row)]
    _, conflicts = merge(timed_alone, [], family, min_improvement_pct=0)
    if conflicts:
        others = sorted({str(layer[c.key].path) for c in conflicts if c.key in layer} - {str(path)}) or [str(path)]
        _LOG.warning(
            "gemmpipe: %d keys of %s are chosen differently in %s, which is asked first (%s)",
            len({c.key for c in conflicts}),
            path,
            ", ".join(others),
            _words(conflicts[0].key, family),
        )


def _provisional(row: Row) -> bool:
    return provisional(row.get("policy"))


def _words(key: Sequence[Scalar], family: Family) -> str:
    names = ("gfx", "cu_num", *(column.name for column in family.key_columns))
    return " ".join(f"{name}={value}" for name, value in zip(names, key, strict=True))
