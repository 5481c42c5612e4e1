"""Reading CSV that someone else wrote: one line a row, blanks around cells dropped, blank lines left out.

Opening files that someone else made: regular files only, so that no reader waits for a pipe or a device.

Reading JSON that someone else wrote: bounded in size and depth, no name twice.

What the text of a cell is: a plain number, or what a spreadsheet takes for a formula.
"""

import csv
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from gemmpipe.core.errors import UserError, quoted_repr, suggest_or_list


def open_regular(path: Path, expected: str) -> BinaryIO:
    """A regular file opened for reading bytes.

    A FIFO, a device, a socket or a folder is refused before it is opened: opening a FIFO waits for a writer, opening a
    device can have effects. The file that was opened is asked once more, since another one may have taken its place.

    Raises UserError (`path: no regular file, expected ...`), OSError where the system refuses to open it.
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
    """The same, decoded; the keywords are those of `open`."""
    return io.TextIOWrapper(open_regular(path, expected), encoding=encoding, errors=errors, newline=newline)


def read_regular(path: Path, expected: str, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes. Raises as `open_regular`; UserError for a larger one."""
    with open_regular(path, expected) as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise UserError(f"{path}: larger than {limit:,} bytes, expected {expected}")
    return raw


def _not_regular(path: Path, expected: str) -> UserError:
    return UserError(f"{path}: no regular file, expected {expected}")


MAX_CSV_BYTES = 1_000_000_000
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
    """A file of lines of cells, opened as text: a regular file within `MAX_CSV_BYTES`. Raises UserError, OSError."""
    stream = open_regular(path, _EXPECTED)
    if os.fstat(stream.fileno()).st_size > MAX_CSV_BYTES:
        stream.close()
        raise UserError(f"{path}: larger than {MAX_CSV_BYTES:,} bytes, expected {_EXPECTED}")
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
            several = f"; several are written '{key}=[{word}]'" if "," in word else _similar_files(path)
            raise UserError(f"{key}: no file '{word}'{several}")
        kind = ".csv" if "CSV" in what else ""
        for match in matches:
            if match.is_dir():
                raise UserError(f"{key}: '{match}' is a folder, expected {what} (or '{match}/*{kind}')")
        found += [match for match in matches if match not in found]
    return found


def _similar_files(path: Path) -> str:
    try:
        return suggest_or_list(
            path.name, (p.name for p in path.parent.iterdir() if p.suffix == path.suffix and p.is_file())
        )
    except OSError:
        return f"; no folder '{path.parent}'"


MAX_JSON_BYTES = 1_000_000
MAX_DEPTH = 32
_MAX_DIGITS = 1000

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"?|[\[\]{}]', re.DOTALL)
"""A string that does not end goes on to the end of the text: else each quote in it would be tried as another start."""


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The JSON object in a file. Raises UserError: unreadable, too large, too deep, no object, a name twice."""
    try:
        raw = read_regular(path, "a small JSON file", limit)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return parse_object(raw.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text in UTF-8, expected a JSON object") from None


def parse_object(text: str, where: str) -> dict[str, object]:
    """The JSON object in a text; `where` begins every UserError."""
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
            raise ValueError(f"the name {quoted_repr(name)} is there twice")
        found[name] = value
    return found


def _parse_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, expected at most {_MAX_DIGITS}")
    return int(digits)


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON number")


_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_LENGTH = 64


def is_number(text: str) -> bool:
    """Whether a text is a decimal number in ASCII, as `1`, `-0.5` and `2e-3`: no `1_000`, `5%`, `inf` or `0x10`."""
    return len(text) <= _MAX_NUMBER_LENGTH and _NUMBER.fullmatch(text) is not None


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet takes a cell for a formula: `=`, `+`, `-` or `@` before something else than a number."""
    return cell[:1] in ("=", "+", "-", "@") and any(map(str.isalnum, cell)) and not is_number(cell)
