"""How a run that failed ends: one line on stderr and an exit code."""

import os
import sys
import traceback

from gemmpipe.cli.streams import readers_may_leave
from gemmpipe.errors import EnvironmentProblem, GemmpipeError, printable

INTERRUPTED = 130


def one_line(text: str) -> str:
    """A text without line breaks, runs of blanks, or what a terminal takes for a command."""
    return printable(" ".join(text.split()))


def report(error: GemmpipeError, cause: BaseException | None = None) -> int:
    """Say in one line what went wrong (all of it with GEMMPIPE_DEBUG) and return the exit code."""
    with readers_may_leave():
        _debug(cause or error)
        print(f"gemmpipe: {one_line(str(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def report_bug(error: Exception) -> int:
    """The same for an error nobody meant to raise; never the code of a run that ended well."""
    text = one_line(f"internal error: {type(error).__name__}: {error}")
    with readers_may_leave():
        _debug(error)
        print(f"gemmpipe: {text} (GEMMPIPE_DEBUG=1 prints the traceback)", file=sys.stderr, flush=True)
    return EnvironmentProblem.exit_code


def _debug(error: BaseException) -> None:
    if os.environ.get("GEMMPIPE_DEBUG"):
        traceback.print_exception(error)
