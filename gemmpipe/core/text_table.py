"""Tables as text: aligned for a terminal of a given width, or Markdown.

A table that is too wide loses its least important columns first, then its last column is cut.
"""

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TextIO

MIN_WIDTH, MAX_WIDTH = 40, 120
_USUAL_WIDTH = 80
_GAP = "  "
_CUT = "..."
_MIN_CUT = 30
"""Characters of the last column that are worth more than another one; without others it is cut, not left out."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    cells: tuple[str, ...]
    is_text: bool = False
    """True for a column that is aligned to the left."""
    importance: int = 0
    """Columns of the lowest importance above 0 are left out first where the table is too wide; 0 is never left out."""

    @property
    def width(self) -> int:
        """The characters of the widest cell."""
        return max(len(self.title), *(len(cell) for cell in self.cells), 0)


def terminal_width(stream: TextIO | None = None) -> int:
    """The columns to write for, from 40 to 120: those of COLUMNS, else the terminal's, else 80, so that files match.

    `stream`: standard output by default.
    """
    columns = _given_columns() or _columns_of(stream or sys.stdout) or _USUAL_WIDTH
    return min(MAX_WIDTH, max(MIN_WIDTH, columns))


def fold_width(stream: TextIO) -> int | None:
    """The columns to fold lines to that are printed to this stream; None without a terminal: programs read lines."""
    return terminal_width(stream) if stream.isatty() else None


def _columns_of(stream: TextIO) -> int:
    """The columns of a stream's terminal; 0 for other streams and for a terminal of unknown width."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a file, as tests have
        return os.get_terminal_size(stream.fileno()).columns
    return 0


def _given_columns() -> int | None:
    """The number of columns in the variable COLUMNS; None without a valid one."""
    text = os.environ.get("COLUMNS", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def aligned(columns: Sequence[Column], width: int) -> list[str]:
    """The lines of a table, the header first, each of at most `width` characters."""
    shown = _fitting(columns, width)
    titles = tuple(column.title for column in shown)
    rows = [titles, *zip(*(column.cells for column in shown), strict=True)]
    return [_line(cells, shown) for cells in rows]


def beside(columns: Sequence[Column], width: int, first: Column) -> list[list[Column]]:
    """Columns in parts that fit side by side in `width` columns after a first one, at least one column in each."""
    parts: list[list[Column]] = []
    for column in columns:
        if parts and total_width([first, *parts[-1], column]) <= width:
            parts[-1].append(column)
        else:
            parts.append([column])
    return parts


def markdown(columns: Sequence[Column]) -> list[str]:
    """The lines of a Markdown table; cells are escaped, so that a name from a file cannot end its cell."""
    rules = ["---" if column.is_text else "---:" for column in columns]
    titles = [escape_markdown(column.title) for column in columns]
    rows = zip(*(map(escape_markdown, column.cells) for column in columns), strict=True)
    return [f"| {' | '.join(cells)} |" for cells in (titles, rules, *rows)]


def escape_markdown(text: str) -> str:
    """A text without a meaning for Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|~#!])", r"\\\1", text).replace("&", "&amp;")


def cut(text: str, width: int) -> str:
    """A text of at most `width` characters; a longer one ends in dots."""
    return text if len(text) <= width else text[: max(0, width - len(_CUT))] + _CUT[:width]


def _line(cells: Sequence[str], columns: Sequence[Column]) -> str:
    padded = (
        cell.ljust(column.width) if column.is_text else cell.rjust(column.width)
        for cell, column in zip(cells, columns, strict=True)
    )
    return _GAP.join(padded).rstrip()


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit: without those of little importance, and the last one cut."""
    shown = list(columns)
    while (excess := total_width(shown) - width) > 0:
        optional = [column for column in shown if column.importance]
        last = shown[-1]
        others = [column for column in optional if column is not last]
        if last.is_text and last.width - excess >= max(len(last.title), _MIN_CUT if others else 1):
            limit = last.width - excess
            return [*shown[:-1], replace(last, cells=tuple(cut(cell, limit) for cell in last.cells))]
        if not optional:
            break
        shown.remove(min(optional, key=lambda column: column.importance))
    return shown


def total_width(columns: Sequence[Column]) -> int:
    """The characters of a line of these columns."""
    return sum(column.width for column in columns) + len(_GAP) * max(0, len(columns) - 1)
