"""Opening files that someone else made: regular files only, so that no reader waits for a pipe or a device."""

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, TextIO

from gemmpipe.errors import UserError, quoted


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
        raise UserError(f"{quoted(str(path))}: no path, expected {expected}") from None
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
