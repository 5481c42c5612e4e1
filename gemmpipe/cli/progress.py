"""The terminal output of a run: a progress bar with the time left, lines, warnings."""

import sys
import time
from types import TracebackType
from typing import Never, Self

from tqdm import tqdm

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.core.errors import printable, shortened
from gemmpipe.core.events import Event

_HEARTBEAT_S = 10.0
_MAX_LINE = 500
"""Characters of a warning; the limit of errors as well."""


class Terminal:
    """A listener that prints: lines to stdout; bar, heartbeat and warnings to stderr.

    `is_only_output`: the run leaves nothing but its output, so that a full disk there is a failure.
    """

    def __init__(self, *, verbose: bool, is_only_output: bool = False) -> None:
        self._verbose = verbose
        self._is_only_output = is_only_output
        self._interactive = sys.stderr.isatty()
        self._bar: tqdm[Never] | None = None
        self._stage = ""
        self._total = 0
        self._begin_s = self._print_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Event) -> None:
        """Show one event; nothing if the reader is gone (a closed pipe, a lost terminal): the run continues."""
        with tolerating_closed_pipes(but_not_full=self._is_only_output):
            self._show(event)

    def _show(self, event: Event) -> None:
        if event.kind == "stage":
            self._begin(event)
        elif event.kind == "progress":
            self._advance(event)
        elif event.kind == "warning":
            self._print(shortened(f"warning: {event.text}", _MAX_LINE), error=True)
        elif event.kind == "line" or self._verbose:
            self._print(event.text)

    def _begin(self, event: Event) -> None:
        self._close()
        self._stage, self._total = event.text, event.total
        self._begin_s = self._print_s = time.monotonic()
        if self._interactive:
            self._bar = tqdm(
                total=event.total or None, desc=event.text, leave=False, dynamic_ncols=True, file=sys.stderr
            )

    def _advance(self, event: Event) -> None:
        self._total = event.total or self._total
        if self._bar is not None:
            self._bar.total = self._total or None
            if event.text:
                self._bar.set_postfix_str(event.text, refresh=False)
            self._bar.update(event.done - self._bar.n)
        elif not self._interactive and time.monotonic() - self._print_s >= _HEARTBEAT_S:
            self._print_s = time.monotonic()
            self._print(self._heartbeat(event), error=True)

    def _heartbeat(self, event: Event) -> str:
        """`screen 120/400, 35 s, about 80 s left`; unknown parts are left out."""
        spent_s = time.monotonic() - self._begin_s
        of_all = f"/{self._total}" if self._total else ""
        left_s = spent_s * (self._total - event.done) / event.done if event.done else 0.0
        left = f", about {left_s:.0f} s left" if left_s > 0 else ""
        note = f", {event.text}" if event.text else ""
        return f"{self._stage} {event.done}{of_all}, {spent_s:.0f} s{left}{note}"

    def _print(self, text: str, *, error: bool = False) -> None:
        stream = sys.stderr if error else sys.stdout
        text = printable(text)  # may include names from untrusted tables and files
        if self._bar is None:
            print(text, file=stream, flush=True)
        else:
            tqdm.write(text, file=stream)

    def _close(self) -> None:
        if self._bar is not None:
            with tolerating_closed_pipes():
                self._bar.close()
            self._bar = None
