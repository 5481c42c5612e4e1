"""Reading CSV that someone else wrote: one line a row, blanks around cells dropped, blank lines left out."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from gemmpipe.errors import UserError, nearest
from gemmpipe.files.regular import open_regular

MAX_BYTES = 1_000_000_000
"""More than any table has: 1,000,000 rows take some 400 MB."""
_EXPECTED = "a CSV file"
_MAX_LINE = 1_000_000
_MAX_CELLS = 1_000
"""Of a row: what looks at a header compares its names with each other."""


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, stripped cells), the header first; nothing of an empty file.

    Raises UserError: unreadable, too large or too wide, not UTF-8, a quote that is not closed in its line.
    """
    line = 0
    try:
        with open_table(path) as stream:
            reader = csv.reader(lines_of(stream, path), skipinitialspace=True, strict=True)
            for cells in reader:
                if reader.line_num != line + 1:  # a stray quote would swallow the rows that follow
                    raise UserError(
                        f"{path}:{line + 1}: a quote that is not closed in its line, expected one line a row"
                    )
                line = reader.line_num
                if len(cells) > _MAX_CELLS:
                    raise UserError(f"{path}:{line}: {len(cells):,} cells, expected at most {_MAX_CELLS:,}")
                if any(cells):
                    yield line, list(map(str.strip, cells))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}:{line + 1}: not text in UTF-8, expected {_EXPECTED}") from None
    except csv.Error as error:
        raise UserError(f"{path}:{line + 1}: no CSV: {error}") from None


def lines_of(stream: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file, of which one may not be all of its bytes. Raises UserError for a longer one."""
    number = 0
    while line := stream.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            raise UserError(f"{path}:{number}: a line of over {_MAX_LINE:,} characters, expected {_EXPECTED}")
        yield line


def open_table(path: Path) -> TextIO:
    """A file of lines of cells, opened as text: a regular file within `MAX_BYTES`. Raises UserError, OSError."""
    stream = open_regular(path, _EXPECTED)
    if os.fstat(stream.fileno()).st_size > MAX_BYTES:
        stream.close()
        raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes, expected {_EXPECTED}")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")


def named_files(key: str, value: str | Sequence[str] | None, what: str = "a CSV file") -> list[Path]:
    """The files that a key of the configuration names, globs expanded in sorted order, each once.

    Raises UserError where there is none: the key, what is there instead.
    """
    words = [value] if isinstance(value, str) else list(value or ())
    if not words or not all(isinstance(word, str) and word for word in words):
        given = "missing" if value is None else repr(words[0] if len(words) == 1 else value)
        raise UserError(f"{key}: {given}, expected {what}, a list of files or a glob")
    found: list[Path] = []
    for word in words:
        path = Path(word).expanduser()
        # A file whose own name has brackets is no pattern.
        matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if not matches:
            several = f"; several are written '{key}=[{word}]'" if "," in word else _neighbours(path)
            raise UserError(f"{key}: no file '{word}'{several}")
        kind = ".csv" if "CSV" in what else ""
        for match in matches:
            if match.is_dir():
                raise UserError(f"{key}: '{match}' is a folder, expected {what} (or '{match}/*{kind}')")
        found += [match for match in matches if match not in found]
    return found


def _neighbours(path: Path) -> str:
    try:
        return nearest(path.name, (p.name for p in path.parent.iterdir() if p.suffix == path.suffix and p.is_file()))
    except OSError:
        return f"; no folder '{path.parent}'"
