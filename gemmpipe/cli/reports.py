"""How a run that failed ends: one line on stderr and an exit code."""

import errno
import os
import sys
import traceback
from pathlib import Path

from gemmpipe.asking import place_in
from gemmpipe.cli.streams import readers_may_leave
from gemmpipe.errors import EnvironmentProblem, GemmpipeError, UserError, printable, shortened

INTERRUPTED = 130
_LONGEST = 500
"""Characters of an error: it may name a path or a column of any length."""


def one_line(text: str) -> str:
    """A text without line breaks, runs of blanks, or what a terminal takes for a command; its middle may be cut."""
    return shortened(printable(" ".join(text.split())), _LONGEST)


def report(error: GemmpipeError, cause: BaseException | None = None) -> int:
    """Say in one line what went wrong (all of it with GEMMPIPE_DEBUG) and return the exit code."""
    with readers_may_leave():
        _debug(cause or error)
        print(f"gemmpipe: {one_line(str(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def report_bug(error: Exception, config_dir: Path | None = None) -> int:
    """The same for an error nobody meant to raise; never the code of a run that ended well."""
    return report(as_bug(error, config_dir), error)


def of_the_machine(error: OSError) -> GemmpipeError:
    """What the system refused as one that can be told: of which file, where it says so.

    A name that no file can have was typed, or stands in a file: that is a mistake in the words.
    """
    text = error.strerror or str(error)
    if error.filename is None:  # no more processes or open files, say
        return EnvironmentProblem(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"{shortened(str(error.filename))}: {text}")
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
