"""Readers of untrusted files.

* Only regular files are opened, so that no reader blocks on a pipe or a device.
* CSV: one line per row, blanks around cells are stripped, blank lines skipped.
* JSON: bounded in size and depth, duplicate names are errors.
* Cells: plain numbers, and texts that a spreadsheet would evaluate as a formula.
"""

import csv
import difflib
import io
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from gemmpipe.core.errors import UserError, quoted_repr, suggest, suggest_or_list

MAX_MANIFEST_BYTES = 50_000_000
"""The limit for a run's manifest, which names every file and every unsolved problem."""


def open_regular(path: Path, expected: str) -> BinaryIO:
    """Open a regular file for reading bytes.

    A FIFO, a device, a socket or a folder is refused before it is opened: opening a FIFO waits for a writer, opening a
    device can have effects. The opened file is checked again, since the path may point to another file by then.

    Raises UserError (`path: not a regular file, expected ...`), OSError if it cannot be opened.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _not_regular(path, expected)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:  # a null byte
        raise UserError(f"{quoted_repr(str(path))}: no path, expected {expected}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _not_regular(path, expected)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def open_regular_text(
    path: Path, expected: str, *, encoding: str = "utf-8", errors: str = "strict", newline: str | None = None
) -> TextIO:
    """Like `open_regular`, for text; the keywords are those of `open`."""
    return io.TextIOWrapper(open_regular(path, expected), encoding=encoding, errors=errors, newline=newline)


def read_regular(path: Path, expected: str, limit: int) -> bytes:
    """All bytes of a regular file. Raises like `open_regular`, and UserError for more than `limit` bytes."""
    with open_regular(path, expected) as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise UserError(f"{path}: larger than {limit:,} bytes, expected {expected}")
    return raw


def _not_regular(path: Path, expected: str) -> UserError:
    return UserError(f"{path}: not a regular file, expected {expected}")


MAX_CSV_BYTES = 1_000_000_000
"""More than any table has: 1,000,000 rows take about 400 MB."""
_EXPECTED = "a CSV file"
_MAX_LINE = 1_000_000
_MAX_CELLS = 1_000
"""Cells per row: checks of a header compare its names pairwise."""


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Pairs (line number, stripped cells), the header first; none for an empty file.

    Raises UserError: unreadable, too large, too many cells, not UTF-8, a quote that is not closed in its line.
    """
    line = 0
    try:
        with open_table(path) as stream:
            reader = csv.reader(lines_of(stream, path), skipinitialspace=True, strict=True)
            for cells in reader:
                if reader.line_num != line + 1:  # a stray quote would swallow the rows that follow
                    raise UserError(
                        f"{path}:{line + 1}: a quote that is not closed in its line, expected one line per row"
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
    """The lines of a file. Raises UserError for a line of _MAX_LINE characters or more."""
    number = 0
    while line := stream.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            raise UserError(f"{path}:{number}: a line of over {_MAX_LINE:,} characters, expected {_EXPECTED}")
        yield line


def open_table(path: Path) -> TextIO:
    """Open a CSV file as text: a regular file of at most `MAX_CSV_BYTES`. Raises UserError, OSError."""
    stream = open_regular(path, _EXPECTED)
    if os.fstat(stream.fileno()).st_size > MAX_CSV_BYTES:
        stream.close()
        raise UserError(f"{path}: larger than {MAX_CSV_BYTES:,} bytes, expected {_EXPECTED}")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")


def named_files(key: str, value: str | Sequence[str] | None, what: str = "a CSV file") -> list[Path]:
    """The distinct files named by the value of the configuration key `key`, globs expanded in sorted order.

    Raises UserError with the key if a name or a glob has no file, or a folder.
    """
    names = [value] if isinstance(value, str) else list(value or ())
    if not names or not all(isinstance(name, str) and name for name in names):
        given = "missing" if value is None else repr(names[0] if len(names) == 1 else value)
        raise UserError(f"{key}: {given}, expected {what}, a list of files or a glob")
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        # An existing file with brackets in its name is not a pattern.
        matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if not matches:
            hint = f"; several are written '{key}=[{name}]'" if "," in name else _similar_files(path)
            raise UserError(f"{key}: no file '{name}'{hint}")
        kind = ".csv" if "CSV" in what else ""
        for match in matches:
            if match.is_dir():
                raise UserError(f"{key}: '{match}' is a folder, expected {what} (or '{match}/*{kind}')")
        found += [match for match in matches if match not in found]
    return found


_MAX_NEIGHBOURS = 10_000
_SIMILAR = 0.6


def suggest_path(path: Path) -> str:
    """The clause "; did you mean 'outputs/tuned'?" with the path beside a missing one that is named most alike.

    Names without their suffix must be alike too. Where the folder itself is missing, the clause names that.
    """
    try:
        near = (each.name for each in itertools.islice(path.parent.iterdir(), _MAX_NEIGHBOURS))
        alike = [name for name in near if _likeness(Path(name).stem, path.stem) >= _SIMILAR]
    except OSError:
        return "" if path.parent.is_dir() else f"; no folder '{path.parent}'"
    return suggest(str(path), [str(path.parent / name) for name in alike])


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _similar_files(path: Path) -> str:
    """The file of the same kind that is named most alike, else all of them."""
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix == path.suffix and p.is_file()]
    except OSError:
        return f"; no folder '{path.parent}'"
    alike = [name for name in names if _likeness(Path(name).stem, path.stem) >= _SIMILAR]
    return suggest(path.name, alike) or suggest_or_list("", names)


MAX_JSON_BYTES = 1_000_000
MAX_DEPTH = 32
_MAX_DIGITS = 1000

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"?|[\[\]{}]', re.DOTALL)
"""An unclosed string matches up to the end of the text; else each quote in it would be tried as another start."""


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The JSON object in a file. Raises UserError: unreadable, too large, too deep, not an object, duplicate names."""
    try:
        raw = read_regular(path, "a small JSON file", limit)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return parse_object(raw.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text in UTF-8, expected a JSON object") from None


def parse_object(text: str, where: str) -> dict[str, object]:
    """The JSON object in a text; `where` is the prefix of every UserError."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            raise UserError(f"{where}: nested more than {MAX_DEPTH} deep, expected a JSON object")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_parse_integer)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.lineno}:{error.colno}: no JSON: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: a JSON {'null' if value is None else type(value).__name__}, expected an object")
    return value


def _unique_keys(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"duplicate name {quoted_repr(name)}")
        found[name] = value
    return found


def _parse_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, expected at most {_MAX_DIGITS}")
    return int(digits)


def _no_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON number")


_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_LENGTH = 64


def is_number(text: str) -> bool:
    """True for a decimal number in ASCII, like `1`, `-0.5` and `2e-3`; not for `1_000`, `5%`, `inf` or `0x10`."""
    return len(text) <= _MAX_NUMBER_LENGTH and _NUMBER.fullmatch(text) is not None


def is_formula(cell: str) -> bool:
    """True if a spreadsheet would evaluate a cell: `=`, `+`, `-` or `@` first, and the cell is not a number."""
    return cell[:1] in ("=", "+", "-", "@") and any(map(str.isalnum, cell)) and not is_number(cell)
