"""Make the pictures of the documentation, docs/images/: the terminal as SVG, the report as WebP.

Run it from the root of the checkout, with the extra [docs] and Chromium: python docs/pictures.py [NAME ...]
Pictures of the terminal are recorded from the commands themselves in a pseudo-terminal (10 s of a CPU); those of an
H200 are made from the run in docs/examples/h200_run.tar.xz.
"""

import io
import os
import pty
import re
import shutil
import sys
import tempfile
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent / "examples"))

from make_h200_report import unpack

if TYPE_CHECKING:
    from rich.text import Text

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
REPORT = DOCS / "examples" / "h200_report.html"
MAX_BYTES = 600_000
"""All pictures together."""
_COLUMNS = 96
_QUALITY = 75
_HOME = "/home/user"
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CONTROL = re.compile(r"\r|\n|\x1b\[(\d*)([A-Za-ln-z])")
"""What moves the cursor; codes of colours (`m`) stay in the text."""
_SMALL_RUN = "kernel=a16w16 device=cpu shapes=list"
_ITEMS = "shapes.items=[{M: [1, 64], N: 512, K: 1024}]"


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A part of the report: from the top of one section to the end of another, at most `height` px of it."""

    first: str = "summary"
    """The id of the first section; `top` is the top of the page."""
    last: str = "summary"
    width: int = 1000
    height: int = 900
    dark: bool = False
    notebook: bool = False
    """True for what a notebook shows of the run, in place of its report; the sections are ids of that page."""


SHOTS: Mapping[str, Shot] = {
    "report_light": Shot(first="top", last="where", width=1000, height=1200),
    "report_dark": Shot(first="candidates", last="candidates", width=1000, dark=True),
    "report_narrow": Shot(first="top", last="where", width=400, height=1100),
    "report_time": Shot(first="time", last="time"),
    "report_search": Shot(first="search", last="search"),
    "report_knobs": Shot(first="knobs", last="knobs", height=620),
    "report_space": Shot(first="space", last="space", height=700),
    "report_ties": Shot(first="ties", last="ties"),
    "report_wall": Shot(first="wall", last="wall"),
    "report_conditions": Shot(first="conditions", last="conditions"),
    "notebook": Shot(first="top", last="output", width=900, height=556, notebook=True),
}


class Terminal(io.StringIO):
    """A stream that takes colours."""

    def isatty(self) -> bool:
        """True, as of a terminal."""
        return True


def last_screen() -> Iterator[tuple[str, list["Text"]]]:
    """The last screen of the run on an H200, from its choices."""
    from gemmpipe.cli.display import coloured
    from gemmpipe.report.lines import Line
    from gemmpipe.report.reading import read_run
    from gemmpipe.report.results import run_figures
    from gemmpipe.report.screen import RunFacts, choice_lines, command_lines, screen_lines

    with _folder() as folder:
        data = read_run(unpack(folder))
    family, products = data.family, data.products
    facts = RunFacts(
        kernel=family.name,
        shapes="llama70b",
        device="NVIDIA H200",
        problems=data.problems,
        duration=f"done in {data.wall_s:.1f} s",
    )
    table = [Line(text=text) for text in choice_lines(products, family, _COLUMNS)]
    summary = screen_lines(facts, run_figures(products), products, family)
    lines = [*table, Line(text=""), *summary, *command_lines("last", _COLUMNS, exports=("plugin",), shipped=True)]
    yield "last_screen", _texts([coloured(line, Terminal()) for line in lines])


def small_run() -> Iterator[tuple[str, list["Text"]]]:
    """A small run on a CPU: its progress, and its last screen."""
    with _folder() as folder:
        frames = _recorded(folder, ["gemmpipe", *_SMALL_RUN.split(), _ITEMS, "output=tuned"])
    bars = [f for f in frames if any(re.search("[\u2500\u2501]{8}", line) for line in f)]
    before_results = [frame for frame in bars if not any("merge" in line for line in frame)]
    yield "progress", _texts(before_results[-1])
    yield "cpu_run", _texts(frames[-1])


def commands() -> Iterator[tuple[str, list["Text"]]]:
    """Commands that end within seconds: show, demo, doctor."""
    with _folder() as folder:
        unpack(folder)
        product = ["gemmpipe", "show", "h200_run", "m=256", "n=1280", "k=8192", "candidates=8"]
        yield "show", _texts(_recorded(folder, product)[-1])
        yield "demo", _texts(_recorded(folder, ["gemmpipe", "demo", "open=false", "folder=demo"])[-1])
        yield "doctor", _texts(_recorded(folder, ["gemmpipe", "doctor"])[-1])


TERMINAL: Mapping[Callable[[], Iterator[tuple[str, list["Text"]]]], Sequence[str]] = {
    last_screen: ("last_screen",),
    small_run: ("progress", "cpu_run"),
    commands: ("show", "demo", "doctor"),
}


def names() -> list[str]:
    """The files that this script makes."""
    return [*(f"{name}.svg" for made in TERMINAL.values() for name in made), *(f"{name}.webp" for name in SHOTS)]


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that pictures show as the user's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _recorded(folder: Path, command: Sequence[str]) -> list[list[str]]:
    """What a terminal shows after each output of a command in this folder: lines with codes of colours."""
    child, terminal = pty.fork()
    if child == 0:
        home = folder / "home"
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(_COLUMNS), LINES="50", HOME=str(home))
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], command)
    screen, frames, rest = [""], [], b""
    row = 0
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if not read:
            break
        text, rest = _decoded(rest + read)
        row = _shown(text, screen, row)
        frames.append([f"$ {_command_text(command)}", *(_anonymous(line, folder) for line in screen)])
    os.waitpid(child, 0)
    return frames


def _decoded(read: bytes) -> tuple[str, bytes]:
    """The text of whole characters and codes, and the bytes after them."""
    end = len(read)
    cut = read.rfind(b"\x1b")
    if cut >= 0 and not re.match(rb"\x1b\[[\d;]*[A-Za-z]", read[cut:]):
        end = cut
    while end > 0:
        try:
            return read[:end].decode(), read[end:]
        except UnicodeDecodeError:
            end -= 1
    return "", read


def _shown(text: str, screen: list[str], row: int) -> int:
    """Apply output to the lines of a screen; the row of the cursor. The program clears a line before it writes it."""
    start = 0
    for code in [*_CONTROL.finditer(text), None]:
        screen[row] += text[start : code.start() if code else None]
        if code is None:
            break
        start = code.end()
        if code[0] == "\n":
            row += 1
            if row == len(screen):
                screen.append("")
        elif code[2] == "A":
            row = max(0, row - int(code[1] or 1))
        elif code[2] == "K":
            screen[row] = ""
    return row


def _command_text(command: Sequence[str]) -> str:
    return " ".join(f"'{word}'" if re.search(r"[ \[]", word) else word for word in command)


def _anonymous(line: str, folder: Path) -> str:
    """A line without the paths and the system of the machine that makes the pictures."""
    for path, shown in ((folder / "home", _HOME), (folder, f"{_HOME}/gemm"), (DOCS.parent, f"{_HOME}/gemmpipe")):
        line = line.replace(str(path), shown)
    return re.sub(r"Linux-\S+", "Linux", line)


def _texts(lines: Sequence[str]) -> list["Text"]:
    from rich.text import Text

    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return [Text.from_ansi(line) for line in lines]


def _svg(lines: Sequence["Text"], name: str) -> str:
    """The lines as a terminal's window, in fonts of the reader's machine."""
    from rich.console import Console

    width = max(60, *(line.cell_len for line in lines))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="gemmpipe", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # fonts of another host
    return svg.replace("Fira Code", "ui-monospace, Menlo, Consolas")


@contextmanager
def _page(shot: Shot) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        sys.exit(f"pictures: no browser on PATH; expected one of {', '.join(_PROGRAMS)}")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=flags)
        scheme = "dark" if shot.dark else "light"
        page = browser.new_page(viewport={"width": shot.width, "height": 900}, color_scheme=scheme)
        if shot.notebook:
            page.set_content(_notebook_page())
        else:
            page.goto(REPORT.as_uri())
        yield page
        browser.close()


def _notebook_page() -> str:
    """What a notebook shows of the run on an H200, with the cell above it."""
    import gemmpipe

    with _folder() as folder:
        run = gemmpipe.load(unpack(folder))
        shown = _anonymous(run._repr_html_(), folder)
    cell = '<pre style="background:#f3f3f3;padding:8px;margin:0 0 8px">gemmpipe.load("last")</pre>'
    style = "margin:0;padding:12px;background:#fff;color:#1a1a1a;font:14px sans-serif"
    return f'<body data-jp-theme-light="true" style="{style}">{cell}<div id="output">{shown}</div>'


def _webp(shot: Shot) -> bytes:
    """A part of the report as WebP."""
    with _page(shot) as page:
        boxes = [page.locator(f"#{name}").bounding_box() for name in (shot.first, shot.last) if name != "top"]
        top = 0.0 if shot.first == "top" else boxes[0]["y"]
        height = min(float(shot.height), boxes[-1]["y"] + boxes[-1]["height"] - top)
        clip = {"x": 0, "y": top, "width": shot.width, "height": height, "scale": 1}
        options = {"format": "webp", "quality": _QUALITY, "clip": clip, "captureBeyondViewport": True}
        return b64decode(page.context.new_cdp_session(page).send("Page.captureScreenshot", options)["data"])


def main(wanted: Sequence[str]) -> None:
    """Make the named pictures, by default all."""
    os.environ["TERM"] = "xterm-256color"
    os.environ.pop("NO_COLOR", None)
    IMAGES.mkdir(exist_ok=True)
    unknown = set(wanted) - {name.partition(".")[0] for name in names()}
    if unknown:
        sys.exit(f"pictures: {', '.join(sorted(unknown))}: expected {', '.join(names())}")
    for make, made in TERMINAL.items():
        if not wanted or set(made) & set(wanted):
            for name, lines in make():
                (IMAGES / f"{name}.svg").write_text(_svg(lines, name))
    for name, shot in SHOTS.items():
        if not wanted or name in wanted:
            (IMAGES / f"{name}.webp").write_bytes(_webp(shot))
    sizes = {path.name: path.stat().st_size for path in sorted(IMAGES.iterdir())}
    print("\n".join(f"{size:8,} {name}" for name, size in sizes.items()))
    if sum(sizes.values()) > MAX_BYTES:
        sys.exit(f"pictures: {sum(sizes.values()):,} bytes in all, expected at most {MAX_BYTES:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
