"""Reader of capture files (CSV, one captured product per row); a row that cannot be read does not affect the others."""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import whitespace
from typing import BinaryIO

from gemmpipe.core.errors import UserError, printable
from gemmpipe.core.files import MAX_CSV_BYTES, open_regular

MAX_COUNT = 10**15
"""Calls per row: sums of counts stay exact as floats, the type of weights."""
_COUNT = re.compile(r"[0-9]{1,16}")
_MAX_LINE = 100_000
"""Characters; a captured product takes about 200."""
_MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class CapturedRow:
    """One row: its cells by column, without `count`."""

    cells: Mapping[str, str]
    count: int
    """Calls, 1 to MAX_COUNT."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A line that is not a row of captured products: its text without the line break, and the reason."""

    line: int
    text: str
    """Bytes that are not UTF-8 are escaped as `\\xff`."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Captures:
    """The content of a capture file, in file order."""

    header: tuple[str, ...]
    rows: tuple[CapturedRow, ...]
    bad_rows: tuple[BadRow, ...]


def read_captures(path: Path) -> Captures:
    """Read a capture file; an empty file gives an empty header.

    Raises UserError: not a regular file, unreadable, too large, or a header without `family` and `count`.
    """
    try:
        with open_regular(path, "a file of captured products") as stream:
            if os.fstat(stream.fileno()).st_size > MAX_CSV_BYTES:
                raise UserError(f"{path}: larger than {MAX_CSV_BYTES:,} bytes, expected a file of captured products")
            return _read(stream, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _read(stream: BinaryIO, path: Path) -> Captures:
    lines = _lines(stream)
    first = next(lines, None)
    if first is None:
        return Captures(header=(), rows=(), bad_rows=())
    header = _cells(first[1])
    if header is None or not {"family", "count"} <= set(header):
        raise UserError(f"{path}: no file of captured products, which begins with family; left as it is")
    found = [_row(line, text, header) for line, text in lines]
    rows = tuple(each for each in found if isinstance(each, CapturedRow))
    return Captures(header=tuple(header), rows=rows, bad_rows=tuple(each for each in found if isinstance(each, BadRow)))


def _lines(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Pairs (line number, text without the line break) of nonblank lines; overlong lines are split into pieces."""
    line, begins = 0, True
    while raw := stream.readline(_MAX_LINE):
        line += begins
        begins = raw.endswith(b"\n")
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8", "backslashreplace").rstrip("\r\n")
        if text.strip(whitespace):
            yield line, text


def _cells(text: str) -> list[str] | None:
    """The stripped cells of one line, or None if the line alone is not valid CSV."""
    try:
        (cells,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError):
        return None
    return [cell.strip() for cell in cells]


def _row(line: int, text: str, header: list[str]) -> CapturedRow | BadRow:
    cells = _cells(text)
    if cells is None or len(cells) != len(header):
        given = "no CSV" if cells is None else f"{len(cells)} cells"
        return BadRow(line=line, text=text, reason=f"{given}, expected {len(header)} cells as in the header")
    row = dict(zip(header, cells, strict=True))
    count = row.pop("count")
    if not _COUNT.fullmatch(count) or not 1 <= int(count) <= MAX_COUNT:
        why = f"column count: '{shown_cell(count)}', expected a whole number from 1 to {MAX_COUNT}"
        return BadRow(line=line, text=text, reason=why)
    return CapturedRow(cells=row, count=int(count))


def shown_cell(text: str) -> str:
    """The beginning of a cell, made printable."""
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
