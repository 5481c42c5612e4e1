"""The end of a run that failed: one line on stderr and an exit code.

Imports neither Hydra nor torch: `gemmpipe lint` and `--help` need neither.
"""

import errno
import os
import sys
import traceback
from pathlib import Path

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, UserError, printable, shortened
from gemmpipe.core.renamed import take_notices
from gemmpipe.core.text_table import fold_width
from gemmpipe.report.lines import Line, fitted

_MAX_LINE = 500
"""Characters of an error: it may name a path or a column of any length."""


def terminal_line(text: str) -> str:
    """A text without line breaks, repeated blanks and terminal escapes; the middle of a long one is cut."""
    return shortened(printable(" ".join(text.split())), _MAX_LINE)


def report_error(error: GemmpipeError, cause: BaseException | None = None) -> int:
    """Print the error as one line (with GEMMPIPE_DEBUG also its traceback) and return the exit code."""
    with tolerating_closed_pipes():
        _debug(cause or error)
        print_notices()
        _print(f"gemmpipe: {terminal_line(str(error))}")
    return error.exit_code


def print_notices() -> None:
    """Print the notices of old names that no line has reported."""
    for notice in take_notices():
        _print(f"warning: {terminal_line(notice)}")


def _print(text: str) -> None:
    """Print one line; in a terminal in several, broken at blanks."""
    for part in fitted(Line(text=text), fold_width(sys.stderr)):
        print(part.text, file=sys.stderr, flush=True)


def report_bug(error: Exception, config_dir: Path | None = None) -> int:
    """Report an unexpected exception; returns a nonzero exit code."""
    return report_error(as_bug(error, config_dir), error)


def system_error(error: OSError) -> GemmpipeError:
    """An operating system error as ours, with its file if it names one.

    A file name that is too long comes from the command line or a file: a usage error.
    """
    text = error.strerror or str(error)
    if error.filename is None:  # such as no more processes or open files
        return EnvironmentProblem(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"{shortened(str(error.filename))}: {text}")
    return EnvironmentProblem(f"{error.filename}: {text}")


def as_bug(error: Exception, config_dir: Path | None = None) -> GemmpipeError:
    """An unexpected exception as ours: with its line if it comes from a Python file of the user's `config_dir`."""
    from gemmpipe.family.guard import error_location  # every command imports this module

    place = error_location(config_dir, error) if config_dir else ""
    text = terminal_line(f"{place or 'internal error'}: {type(error).__name__}: {error}")
    return (UserError if place else EnvironmentProblem)(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")


def _debug(error: BaseException) -> None:
    if os.environ.get("GEMMPIPE_DEBUG"):
        traceback.print_exception(error)
