"""Stdout and stderr when their readers leave: a closed pipe or a lost terminal silences a run, it does not end it."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
    """Characters that a stream's encoding lacks are escaped: the name of a folder in a line ends no run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """Within the block what cannot be printed is lost; the stream that lost its reader says nothing from then on."""
    try:
        yield
    except OSError:
        silence_the_lost()


def silence_the_lost() -> None:
    """Send to nowhere what goes to streams without readers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What is still buffered would raise again, at the latest when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
