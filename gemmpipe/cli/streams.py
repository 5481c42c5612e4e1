"""Stdout and stderr when their readers leave: a closed pipe or a lost terminal silences a run, it does not end it."""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT = "standard output"
_OF_A_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def stand_in_for_the_closed() -> None:
    """Open nothing in the place of what the caller closed (`>&-`): the next file, the journal too, would be stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def any_text_may_be_said() -> None:
    """Characters that a stream's encoding lacks are escaped: the name of a folder in a line ends no run.

    Nor does Hydra, which says `--info` by logging, print a traceback for each line that nobody reads.
    """
    logging.raiseExceptions = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def readers_may_leave(*, but_not_full: bool = False) -> Iterator[None]:
    """Within the block what cannot be printed is lost; the stream that lost its reader says nothing from then on.

    `but_not_full`: raises OSError where the reader is there, but what was said could not be written.
    """
    try:
        yield
    except OSError as error:
        if but_not_full and error.errno in _OF_A_WRITE:
            raise
        silence_the_lost()


@contextmanager
def writing(what: str) -> Iterator[None]:
    """What the system refuses within the block and does not name (a full disk says no file) is told as of `what`.

    What is still buffered is said within it: at the interpreter's end nobody could tell.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_A_WRITE:
            raise
        raise OSError(error.errno, error.strerror, what) from error


def silence_the_lost() -> None:
    """Send to nowhere what goes to streams without readers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What is still buffered would raise again, at the latest when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
