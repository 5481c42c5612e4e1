"""The tables that this process has read: a file is parsed again only when it has changed.

The state of a file is its inode, size and times. A replaced file has another inode, one that was changed in place
another time or size. Times advance in ticks of the kernel's clock: a file that was written just before it was read may
change once more within its tick, so it is not kept.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from gemmpipe.family import Family

_MAX_TABLES = 64
_MAX_ROWS = 200_000
"""Rows of all tables together; a larger table is read each time. A row takes about 1 kB."""
_TICK_S = 0.05
"""More than the ticks of local file systems (1 to 10 ms)."""

FileState = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of modification and of change in ns."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Entry(Generic[T]):
    state: FileState
    layout: tuple[object, ...]
    table: T
    rows: int


@dataclass(kw_only=True)
class TableCache(Generic[T]):
    """Parsed tables by path, the least recently used dropped first; its methods may be called from several threads.

    Tables are shared by all callers, which must not change them.
    """

    parse: Callable[[Path, Family], T]
    """Reads a file. Raises UserError; errors are not kept."""
    row_count: Callable[[T], int]
    max_tables: int = _MAX_TABLES
    max_rows: int = _MAX_ROWS
    reads: int = 0
    """Files parsed so far."""
    _entries: "OrderedDict[str, _Entry[T]]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        os.register_at_fork(after_in_child=self._after_fork)

    def read(self, path: Path, family: Family) -> T:
        """The table in a file as the family reads it, parsed if it is not known or has changed since."""
        layout, before = _layout(family), _state(path)
        with self._lock:
            entry = self._entries.get(str(path))
            if entry is not None and entry.state == before and entry.layout == layout:
                self._entries.move_to_end(str(path))
                return entry.table
        started_ns = time.time_ns()
        table = self.parse(path, family)
        with self._lock:
            self.reads += 1
            self._entries.pop(str(path), None)
            # A file that changed while it was read, or may change unnoticed, is read again next time.
            if before is not None and before == _state(path) and _is_settled(before, started_ns):
                entry = _Entry(state=before, layout=layout, table=table, rows=self.row_count(table))
                self._entries[str(path)] = entry
                self._drop_surplus()
        return table

    def _drop_surplus(self) -> None:
        rows = sum(entry.rows for entry in self._entries.values())
        while self._entries and (len(self._entries) > self.max_tables or rows > self.max_rows):
            rows -= self._entries.popitem(last=False)[1].rows

    def _after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()


def _layout(family: Family) -> tuple[object, ...]:
    """The parts of a family that the parser uses: load_family returns a new object with the same parts each time."""
    return family.name, family.key_columns, id(family.key_defaults), id(family.aiter_table)


def _state(path: Path) -> FileState | None:
    """The state of a file; None if it cannot be read, which the parser reports."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _is_settled(state: FileState, now_ns: int) -> bool:
    """True if a later change will have another time."""
    *_, modified_ns, changed_ns = state
    return max(modified_ns, changed_ns) < now_ns - _TICK_S * 1e9
