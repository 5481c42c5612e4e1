"""Stdout and stderr when their readers leave: a closed pipe or a lost terminal silences a run, it does not end it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
