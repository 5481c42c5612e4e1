"""The terminal output of a run: its progress, lines, warnings."""

import sys
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.cli.display import display_for
from gemmpipe.core.errors import printable, shortened
from gemmpipe.core.events import Event
from gemmpipe.core.text_table import fold_width
from gemmpipe.report.lines import WARN, Line, fitted
from gemmpipe.report.progress import RunProgress

_MAX_LINE = 500
"""Characters of a warning; the limit of errors as well."""
_KINDS_OF_PROGRESS = ("step", "rest", "stage", "progress")


class Terminal:
    """A listener that prints: lines to stdout; progress and warnings to stderr.

    `is_only_output`: the run leaves nothing but its output, so that a full disk there is a failure.
    """

    def __init__(self, *, verbose: bool, is_only_output: bool = False) -> None:
        self._verbose = verbose
        self._is_only_output = is_only_output
        self._progress = RunProgress(time.monotonic())
        self._display = display_for(self._progress)

    def __enter__(self) -> Self:
        self._display.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with tolerating_closed_pipes():
            self._display.close()

    def __call__(self, event: Event) -> None:
        """Show one event; nothing if the reader is gone (a closed pipe, a lost terminal): the run continues."""
        with tolerating_closed_pipes(but_not_full=self._is_only_output):
            self._show(event)

    def _show(self, event: Event) -> None:
        if event.kind in _KINDS_OF_PROGRESS:
            self._progress.take(event, time.monotonic())
            self._display.update()
        elif event.kind == "stopping":
            self._progress.take(event, time.monotonic())
            self._display.update()
            self._print(_labelled(event.text, WARN), error=True)
        elif event.kind == "warning":
            self._print(_labelled(f"warning: {event.text}", WARN), error=True)
        elif event.kind == "line" or self._verbose:
            self._print(Line(text=event.text, spans=event.spans, is_whole=event.is_whole))

    def _print(self, line: Line, *, error: bool = False) -> None:
        stream = sys.stderr if error else sys.stdout
        shown = replace(line, text=printable(line.text))  # it may include names from untrusted tables and files
        for part in fitted(shown, fold_width(stream)):
            self._display.print(part, stream)


def _labelled(text: str, style: str) -> Line:
    """A line with its first word, up to the colon, in a style."""
    text = shortened(text, _MAX_LINE)
    return Line(text=text, spans=((0, text.find(":") + 1, style),))
