"""The tuned tables that a process looks things up in: read once a family, merged in memory, never rewritten."""

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.data import Device, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family
from gemmpipe.paths import shipped_tables, tables_variable, user_tables
from gemmpipe.runtime.variables import warn_of_slips
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
    """Files by layer: those of the environment variable, the user's folder, the shipped ones.

    In a folder the family's default table comes first, then the per-model ones (`*_<csv_name>`) by name.
    """
    named = [Path(part).expanduser() for part in os.environ.get(tables_variable(family.name), "").split(":") if part]
    return [named, *(_beside(folder / family.csv_name) for folder in (user_tables(), shipped_tables()))]


def _beside(default: Path) -> list[Path]:
    models = sorted(default.parent.glob(f"*_{default.name}"))
    return [path for path in (default, *models) if path.is_file() and "untuned" not in path.name]


def state_of(family: Family) -> State:
    """Which files there are now; another answer than before means that there is something to read."""
    found = []
    for path in (path for files in layers(family) for path in files):
        with suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def load_tables(family: Family) -> Tables:
    """Every layer's rows; within a layer the earlier file wins, and what clashes there is named once.

    A file that cannot be read costs a warning, not the workload.
    """
    warn_of_slips()
    tables = Tables(family=family, state=state_of(family))
    for files in layers(family):
        fresh: dict[Key, Found] = {}
        for path in files:
            _add(fresh, path, family)
        for key, found in fresh.items():
            tables.rows.setdefault(key, []).append(found)
    for alternatives in tables.rows.values():
        alternatives.sort(key=lambda found: _provisional(found.row))
    return tables


def _add(layer: dict[Key, Found], path: Path, family: Family) -> None:
    try:
        rows = read(path, family)
    except UserError as error:
        _LOG.warning("gemmpipe: a tuned table is left out: %s", error)
        return
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
    for row in rows:
        key = key_of(row, family)
        known = layer.get(key)
        if known is None or (_provisional(known.row) and not _provisional(row)):
            layer[key] = Found(row=row, path=path)


def _provisional(row: Row) -> bool:
    return provisional(row.get("policy"))


def _words(key: Sequence[Scalar], family: Family) -> str:
    names = ("gfx", "cu_num", *(column.name for column in family.key_columns))
    return " ".join(f"{name}={value}" for name, value in zip(names, key, strict=True))
