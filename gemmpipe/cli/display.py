"""Displays of the progress: live lines in a terminal, a bar in one that cannot move its cursor, else heartbeats.

rich draws the live lines. tqdm draws the bar where the terminal supports only a carriage return (`TERM=dumb`: the
shells of editors, the consoles of some job runners). rich takes 0.1 s to import and is loaded when something is drawn.
"""

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.core.errors import printable
from gemmpipe.core.signals import stop_requested
from gemmpipe.core.units import duration_text
from gemmpipe.report.lines import Line
from gemmpipe.report.progress import RunProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

HEARTBEAT_S = 10.0
_DRAW_S = 0.25
_FIRST_DRAW_S = 0.4  # shorter commands draw nothing, and do not load rich
_MIN_BAR, _MAX_BAR = 8, 32
_COLORS = {"good": "green", "bad": "red", "warn": "yellow", "dim": "bright_black", "head": "bold", "key": "cyan"}


class Display(ABC):
    """Shows progress on stderr, and lets lines pass."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def open(self) -> None:
        """Begin to show progress."""
        return

    @abstractmethod
    def update(self) -> None:
        """Show new progress."""

    def print(self, line: Line, stream: TextIO) -> None:
        """Print a line."""
        print(coloured(line, stream), file=stream, flush=True)

    def close(self) -> None:
        """Remove what is shown."""
        return


def display_for(progress: RunProgress) -> Display:
    """The display that stderr can have."""
    if not sys.stderr.isatty():
        return Heartbeats(progress)
    return TqdmBar(progress) if is_dumb() else LiveLines(progress)


def is_dumb() -> bool:
    """True for a terminal that cannot move its cursor."""
    return os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")


def coloured(line: Line, stream: TextIO) -> str:
    """The line with its colours, or bare where the stream is no terminal or the user wants none (NO_COLOR)."""
    if not line.spans or not stream.isatty() or is_dumb() or os.environ.get("NO_COLOR"):
        return line.text
    console = _console(stream)
    with console.capture() as captured:
        console.print(_text(line), soft_wrap=True, end="")
    return captured.get()


def _console(stream: TextIO) -> "Console":
    from rich.console import Console

    class Steady(Console):
        """A console that never hides the cursor: a process that is killed would leave it hidden."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return Steady(file=stream, highlight=False, markup=False, emoji=False)


def _text(line: Line) -> "Text":
    """Text is never read as markup: a name with `[red]` stays as it is."""
    from rich.text import Text

    text = Text(line.text)
    for start, end, style in line.spans:
        text.stylize(_COLORS[style], start, end)
    return text


class Heartbeats(Display):
    """A line per ten seconds, where stderr is no terminal."""

    def __init__(self, progress: RunProgress) -> None:
        super().__init__(progress)
        self._stage, self._shown_at = "", time.monotonic()

    def update(self) -> None:
        now = time.monotonic()
        if self._progress.title != self._stage:
            self._stage, self._shown_at = self._progress.title, now
        elif now - self._shown_at >= HEARTBEAT_S and not self._progress.stopping:
            self._shown_at = now
            print(printable(self._progress.line(now)), file=sys.stderr, flush=True)


class TqdmBar(Display):
    """A bar that needs no more than a carriage return."""

    def __init__(self, progress: RunProgress) -> None:
        super().__init__(progress)
        self._bar: tqdm[Any] | None = None
        self._stage = ""

    def update(self) -> None:
        progress = self._progress
        if progress.title != self._stage or progress.stopping:
            self.close()
            self._stage = progress.title
        if progress.of_run is None or progress.stopping:
            return
        if self._bar is None:
            form = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}{postfix}"
            self._bar = tqdm(
                total=1.0, desc=self._stage, leave=False, dynamic_ncols=True, file=sys.stderr, bar_format=form
            )
            self._bar.start_t -= time.monotonic() - progress.began  # it counts from the begin of the run
        self._bar.set_postfix_str(progress.left_text(time.monotonic()), refresh=False)
        self._bar.update(progress.of_run - self._bar.n)

    def print(self, line: Line, stream: TextIO) -> None:
        if self._bar is None:
            super().print(line, stream)
        else:
            tqdm.write(line.text, file=stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LiveLines(Display):
    """One or two lines at the bottom of the terminal, redrawn while nothing happens, too, so that the clock moves."""

    def __init__(self, progress: RunProgress) -> None:
        super().__init__(progress)
        self._live: Live | None = None
        self._lock = threading.RLock()
        """Held while drawing or printing: lines of the run come from one thread, the clock from another."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        self._thread = threading.Thread(target=self._draw_until_closed, daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Does nothing: the next drawing shows it."""

    def _draw_until_closed(self) -> None:
        wait_s = _FIRST_DRAW_S
        while not self._ended.wait(wait_s):
            wait_s = _DRAW_S
            with self._lock, tolerating_closed_pipes():
                if not self._ended.is_set():
                    self._draw()

    def _draw(self) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=_console(sys.stderr),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        if stop_requested():  # the run says so after its current step, which may take seconds
            self._progress.stopping = True
        width = self._live.console.width - 1  # the last column may wrap
        ascii_only = self._live.console.options.ascii_only
        self._live.update(progress_text(self._progress, time.monotonic(), width, ascii_only=ascii_only), refresh=True)

    def print(self, line: Line, stream: TextIO) -> None:
        with self._lock:
            if self._live is not None and stream.isatty():
                # Above the live lines, which are on the same terminal.
                self._live.console.print(_text(line), soft_wrap=True)
            else:
                super().print(line, stream)

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None


def progress_text(progress: RunProgress, now: float, width: int, *, ascii_only: bool = False) -> "Text":
    """One or two lines of `width` characters: stage, bar, share, work, time spent and left; then what runs now."""
    from rich.text import Text

    title = progress.title or "starting"
    share = progress.share_text
    spent, left = duration_text(now - progress.began), progress.left_text(now)
    if progress.stopping:
        title, share, left = f"{title}: stopping", "", ""
    facts = [share, progress.work if not progress.stopping else "", spent, left]
    texts = [text for text in facts if text]
    while len(texts) > 1 and len(title) + 2 + len("  ".join(texts)) + (_MIN_BAR + 2 if share else 0) > width:
        texts.remove(progress.work if progress.work in texts else spent if spent in texts else texts[-1])
    right = "  ".join(texts)
    room = min(_MAX_BAR, width - len(title) - len(right) - 4)
    text = Text(printable(title), style="bold cyan", no_wrap=True, overflow="ellipsis")
    if progress.of_run is not None and room >= _MIN_BAR and not progress.stopping:
        filled = round(room * progress.of_run)
        full, empty = ("#", "-") if ascii_only else ("━", "─")  # they differ without colours, too
        text.append("  ").append(full * filled, "cyan").append(empty * (room - filled), "bright_black")
    text.append("  ").append(right, "default not bold")
    lines = [text]
    if progress.note and not progress.stopping:
        lines.append(Text(f"  {printable(progress.note)}", style="bright_black", no_wrap=True, overflow="ellipsis"))
    for line in lines:
        line.truncate(max(1, width), overflow="ellipsis")
    return Text("\n").join(lines)
