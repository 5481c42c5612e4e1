"""How a run that failed ends: one line on stderr and an exit code."""

import os
import sys
import traceback
from pathlib import Path

from gemmpipe.asking import place_in
from gemmpipe.cli.streams import readers_may_leave
from gemmpipe.errors import EnvironmentProblem, GemmpipeError, UserError, printable

INTERRUPTED = 130
_LONGEST = 4_000
"""Characters of an error: it may quote a cell of a table, which may be a book."""


def one_line(text: str) -> str:
    """A text without line breaks, runs of blanks, or what a terminal takes for a command; its middle may be cut."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def report(error: GemmpipeError, cause: BaseException | None = None) -> int:
    """Say in one line what went wrong (all of it with GEMMPIPE_DEBUG) and return the exit code."""
    with readers_may_leave():
        _debug(cause or error)
        print(f"gemmpipe: {one_line(str(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def report_bug(error: Exception, config_dir: Path | None = None) -> int:
    """The same for an error nobody meant to raise; never the code of a run that ended well."""
    return report(as_bug(error, config_dir), error)


def of_the_machine(error: OSError) -> EnvironmentProblem:
    """What the system refused as one that can be told: of which file, where it says so."""
    text = error.strerror or str(error)
    if error.filename is None:  # no more processes or open files, say
        return EnvironmentProblem(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")
    return EnvironmentProblem(f"{error.filename}: {text}")


def as_bug(error: Exception, config_dir: Path | None = None) -> GemmpipeError:
    """An error nobody meant to raise as one that can be told.

    Where it came out of a Python file of the user's own folder it is the user's, and the line says which.
    """
    place = place_in(config_dir, error) if config_dir else ""
    text = one_line(f"{place or 'internal error'}: {type(error).__name__}: {error}")
    return (UserError if place else EnvironmentProblem)(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")


def _debug(error: BaseException) -> None:
    if os.environ.get("GEMMPIPE_DEBUG"):
        traceback.print_exception(error)
