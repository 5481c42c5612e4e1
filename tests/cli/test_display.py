"""Displays of the progress: what each kind of terminal gets, and that names are never read as markup."""

import io
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from gemmpipe.cli import display
from gemmpipe.cli.display import Heartbeats, LiveLines, TqdmBar, coloured, display_for, progress_text
from gemmpipe.cli.progress import Terminal
from gemmpipe.core.events import Event, Events
from gemmpipe.core.signals import handle_signals
from gemmpipe.report.lines import BAD, GOOD, KEY, Line, styled
from gemmpipe.report.progress import RunProgress

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
MARKUP = "[red]a[/red] [link=x]b[/] :smile:"


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def _progress(share: float | None = 0.5, note: str = "1x64x96") -> RunProgress:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=5.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    if share is not None:
        progress.take(Event(kind="progress", text=note, done=15, total=30, share=share), 10.0)
    return progress


def test_each_kind_of_terminal_has_its_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert type(display_for(_progress())) is Heartbeats
    monkeypatch.setattr("sys.stderr", Screen())
    assert type(display_for(_progress())) is LiveLines
    for term in ("dumb", "unknown", ""):
        monkeypatch.setenv("TERM", term)
        assert type(display_for(_progress())) is TqdmBar


def test_colours_are_those_of_the_styles() -> None:
    line = styled("a ", ("good", GOOD), " b ", ("bad", BAD), " ", ("gemmpipe runs", KEY))
    shown = coloured(line, Screen())
    assert ESCAPE.sub("", shown) == line.text
    assert [code for code, _ in ESCAPE.findall(shown)] == ["32", "0", "31", "0", "36", "0"]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_none_are_wanted(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = styled(("good", GOOD), " b")
    monkeypatch.setenv(name, value)
    assert coloured(line, Screen()) == "good b"


def test_no_colours_without_a_terminal() -> None:
    assert coloured(styled(("good", GOOD)), io.StringIO()) == "good"


@pytest.mark.parametrize("text", [MARKUP, "\\[bold]", "[/]", "https://a.b", "'x' 12"])
def test_names_with_markup_stay_as_they_are(text: str) -> None:
    line = styled(text, " ", ("style", GOOD))
    assert ESCAPE.sub("", coloured(line, Screen())) == line.text
    assert f"  {text}" in progress_text(_progress(note=text), 10.0, 200).plain.splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 79, 119])
@pytest.mark.parametrize("share", [None, 0.0, 0.31, 1.0])
def test_progress_has_at_most_two_lines_of_the_width(width: int, share: float | None) -> None:
    lines = progress_text(_progress(share, note="1024x28672x8192, 3 of 72 problems done"), 12.0, width).plain
    assert len(lines.splitlines()) <= 2
    assert all(len(line) <= width for line in lines.splitlines())
    assert lines.startswith("2 of 6: screen")


def test_the_bar_can_be_read_without_colours() -> None:
    full, half = (progress_text(_progress(share), 10.0, 79).plain.splitlines()[0] for share in (1.0, 0.5))
    assert re.search("━+─+  67 %", full), "of the run: 5 s more for the stages that follow"
    bar = re.search("(━+)(─+)  40 %", half)
    assert bar is not None
    assert len(bar[1]) / len(bar[1] + bar[2]) == pytest.approx(0.4, abs=0.05)
    assert "about 15 s left" in half
    ascii_only = progress_text(_progress(0.5), 10.0, 79, ascii_only=True).plain.splitlines()[0]
    assert re.search("#+-+  40 %", ascii_only)


def test_a_stopping_run_shows_no_share() -> None:
    progress = _progress()
    progress.take(Event(kind="stopping", text="interrupted"), 11.0)
    assert progress_text(progress, 12.0, 79).plain == "2 of 6: screen: stopping  12.0 s"


def test_a_dumb_terminal_gets_a_bar_without_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", screen := Screen())
    progress = RunProgress(time.monotonic() - 65.0)
    shown = TqdmBar(progress)
    shown.update()
    assert screen.getvalue() == "", "nothing is known yet"
    progress.take(Event(kind="step", text="screen", done=2, total=6), time.monotonic())
    progress.take(Event(kind="stage", text="screen", unit="trials"), time.monotonic())
    progress.take(Event(kind="progress", text="x", done=1, total=2, share=0.25), time.monotonic())
    shown.update()
    shown.print(Line(text=MARKUP), screen)
    shown.close()
    text = screen.getvalue()
    assert "\x1b" not in text
    assert text.lstrip("\r").startswith("2 of 6: screen")
    assert "25 %|" in text
    assert "01:0" in text, "the time of the run, not of its stage"
    assert f"{MARKUP}\n" in text


def test_heartbeats_are_lines_of_a_stage_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", output := io.StringIO())
    shown = Heartbeats(_progress())
    for now[0] in (1.0, 9.0, 11.5, 12.0, 21.6):
        shown.update()
    lines = output.getvalue().splitlines()
    assert [line.split(", ")[0] for line in lines] == ["2 of 6: screen"] * 2
    assert "\x1b" not in output.getvalue()


@pytest.mark.parametrize("no_color", [False, True])
def test_live_lines_are_drawn_above_nothing_and_removed(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", screen := Screen())
    shown = LiveLines(_progress())
    shown._draw()
    shown.print(styled(("done ", GOOD), MARKUP), screen)
    shown.close()
    text = screen.getvalue()
    colours = {code for codes, kind in ESCAPE.findall(text) if kind == "m" for code in codes.split(";")}
    assert bool(colours & {"31", "32", "36", "90"}) != no_color
    assert "\x1b[?25l" not in text, "the cursor is never hidden: a killed run would leave it so"
    assert all(len(line) <= 60 for line in re.split(r"[\r\n]+", ESCAPE.sub("", text)))
    assert f"done {MARKUP}" in ESCAPE.sub("", text)


def test_a_signal_is_shown_before_the_run_notices_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Screen())
    shown = LiveLines(_progress())
    with handle_signals(Events()) as stop:
        shown._draw()
        assert "stopping" not in screen.getvalue()
        stop.has_workers = True  # else an alarm bounds the wait for `check`
        stop.on_signal(signal.SIGINT, None)
        shown._draw()
    shown.close()
    assert "screen: stopping" in screen.getvalue()


def test_lines_are_folded_to_a_terminal_and_commands_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout", screen := Screen())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    long, command = "word " * 30, f"see: gemmpipe show {'x' * 80} last"
    with Terminal(verbose=False) as terminal:
        terminal(Event(kind="line", text=long))
        terminal(Event(kind="line", text=command))
        terminal(Event(kind="detail", text="for verbose=true"))
    lines = screen.getvalue().splitlines()
    assert lines[-1] == command
    assert len(lines) > 2
    assert all(len(line) <= 70 and line == line.rstrip() for line in lines[:-1])


def test_a_pipe_gets_each_line_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", output := io.StringIO())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with Terminal(verbose=True) as terminal:
        terminal(Event(kind="line", text="word " * 50, spans=((0, 4, GOOD),)))
        terminal(Event(kind="detail", text="a detail"))
    assert output.getvalue() == f"{('word ' * 50).rstrip()}\na detail\n"


@pytest.mark.e2e
def test_a_terminal_of_80_columns_shows_no_longer_line(folder: Path) -> None:
    """In a real pseudo-terminal: help, an error, and the line that names what runs."""
    for arguments in (["--help"], ["kernel=nothing", "shapes=llama8b", "stages.screen.keep=4", "space.num_stages=[3]"]):
        text = _in_terminal([sys.executable, "-m", "gemmpipe", *arguments], columns=80)
        lines = re.split(r"[\r\n]+", ESCAPE.sub("", text))
        assert len(lines) > 3
        assert [line for line in lines if len(line) > 80] == []


def _in_terminal(argv: list[str], columns: int) -> str:
    """The output of a program in a pseudo-terminal."""
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"COLUMNS": str(columns), "TERM": "xterm"}
        os.execvp(argv[0], argv)
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux, where the child has ended
            break
        if not part:
            break
        found += part
    os.close(terminal)
    os.waitpid(child, 0)
    return found.decode()
