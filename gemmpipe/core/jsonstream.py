"""Reader of large JSON files, plain or gzip: one object at a time, in bounded memory."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import open_regular

MAX_UNPACKED_BYTES = 16_000_000_000
"""Limit of the uncompressed text."""
MAX_VALUE = 16_000_000
"""Characters of one value; parsed, such a value takes up to 0.5 GB."""
MAX_RATIO = 200
"""Limit of the compression ratio beyond the first `_UNCHECKED_BYTES` bytes; traces and logs have 10 to 40."""
_UNCHECKED_BYTES = 1 << 26
_CHUNK = 1 << 20
_BLANKS = re.compile(r"[ \t\r\n]*")


def open_text(path: Path, errors: str = "strict") -> io.TextIOWrapper:
    """Open a text file in UTF-8, plain or gzip. Raises UserError if it cannot be read."""
    try:
        stream = open_regular(path, "a text file, also packed by gzip")
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    raw = _BoundedGzip(path, stream) if packed else stream
    return io.TextIOWrapper(cast(IO[bytes], raw), encoding="utf-8-sig", errors=errors)


class _BoundedGzip(gzip.GzipFile):
    """A gzip stream with a bounded ratio, against decompression bombs (megabytes that unpack to hours of reading)."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        super().__init__(fileobj=stream)
        self._path = path
        self._limit = _UNCHECKED_BYTES + MAX_RATIO * path.stat().st_size

    def read1(self, size: int = -1) -> bytes:
        """Like GzipFile.read1. Raises UserError for a file that unpacks to too much."""
        found = super().read1(size)
        if self.tell() > self._limit:
            raise UserError(f"{self._path}: unpacks to more than {MAX_RATIO} times its size, expected a trace or a log")
        return found


def objects_in(path: Path, name: str) -> Iterator[dict[str, object]]:
    """The objects of a list, in order: the value of `name` in the file's top-level object, or the top-level list.

    Raises UserError: unreadable, invalid JSON up to the end of the file, no such list, items that are not objects,
    too large, too deep.
    """
    with open_text(path) as stream:
        reader = _Reader(stream, path)
        try:
            yield from reader.items(name)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be unpacked: {error}") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not text in UTF-8, expected JSON") from None
        except RecursionError:
            raise UserError(f"{path}: nested too deep, expected a list of small objects") from None
        except ValueError as error:  # a number of thousands of digits
            raise UserError(f"{path}: no JSON at character {reader.where:,}: {error}") from None


class _Reader:
    """Parser over a window of the text; `_place` is the index of the next character in the window."""

    def __init__(self, stream: io.TextIOWrapper, path: Path) -> None:
        self._stream, self._path = stream, path
        self._text, self._place, self._before = "", 0, 0
        self._decoder = json.JSONDecoder()

    def items(self, name: str) -> Iterator[dict[str, object]]:
        first = self._next()
        if first == "[":
            yield from self._listed()
            self._end()
            return
        if first != "{":
            raise self._wrong("no JSON object")
        found = False
        self._skip_blanks()
        while self._peek() != "}":
            self._skip_blanks()
            key = self._value()
            if not isinstance(key, str):
                raise self._wrong("a name that is no text")
            if self._next() != ":":
                raise self._wrong("no ':' after a name")
            if key == name:
                if found or self._next() != "[":
                    raise self._wrong(f"'{name}' is duplicate or no list")
                found = True
                yield from self._listed()
            else:
                self._skip_blanks()
                self._value()
            self._skip_blanks()
            if self._peek() == "}":
                break
            if self._next() != ",":
                raise self._wrong("no ',' between two names")
        self._place += 1
        if not found:
            raise UserError(f"{self._path}: no list '{name}'")
        self._end()

    def _listed(self) -> Iterator[dict[str, object]]:
        self._skip_blanks()
        if self._peek() == "]":
            self._place += 1
            return
        while True:
            self._skip_blanks()
            value = self._value()
            if not isinstance(value, dict):
                raise self._wrong("an item of the list that is no object")
            yield value
            mark = self._next()
            if mark == "]":
                return
            if mark != ",":
                raise self._wrong("no ',' between two objects")

    def _end(self) -> None:
        self._skip_blanks()
        if self._peek():
            raise self._wrong("text after the end")

    def _value(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise self._wrong(error.msg) from None
                continue
            if end < len(self._text) or not self._more():  # a number may continue in the next chunk
                self._place = end
                return value

    def _next(self) -> str:
        self._skip_blanks()
        character = self._peek()
        self._place += 1
        return character

    def _peek(self) -> str:
        if self._place >= len(self._text):
            self._more()
        return self._text[self._place : self._place + 1]

    def _skip_blanks(self) -> None:
        while self._peek():
            blanks = _BLANKS.match(self._text, self._place)
            self._place = blanks.end() if blanks else self._place
            if self._place < len(self._text):
                return

    def _more(self) -> bool:
        """Extend the window: by one chunk, or to twice the length of an incomplete value. False at the end."""
        held = len(self._text) - self._place
        if held > MAX_VALUE:
            raise self._wrong(f"a value of more than {MAX_VALUE:,} characters")
        chunk = self._stream.read(max(_CHUNK, held))
        self._before += self._place
        self._text, self._place = self._text[self._place :] + chunk, 0
        if self._before > MAX_UNPACKED_BYTES:
            raise UserError(f"{self._path}: larger than {MAX_UNPACKED_BYTES:,} characters")
        return bool(chunk)

    @property
    def where(self) -> int:
        """The number of the next character."""
        return self._before + self._place + 1

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._path}: no JSON at character {self.where:,}: {what}")
