"""Code blocks of the documentation: read from a page, run in order in one folder, outputs compared.

Conventions of a page:

- A block ```` ```console ```` has commands after `$ ` (continued after a backslash) and lines of their output. A line
  `...` stands for any lines, `...` in a line for any text, and every number for any number.
- Blocks ```` ```python ```` share one namespace; blocks ```` ```bash ```` are commands without output.
- A block after a line that ends in `` `FILE`: `` is the content of that file.
- `<!-- not run: REASON -->` on the line before a block: its gemmpipe commands are composed, but not run.
- `<!-- run by: PATH -->` on the line before a block: that test runs it.
- `<!-- exit 0 or 1: REASON -->` on the line before a block: its commands may end with 1 as well.
- `<!-- with: the recorded run -->`: the page's folder has the run of docs/examples/h200_run.tar.xz as its last one.
- `<!-- setup`, commands after `$ `, `-->`: commands that the page does not show.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|run by|exit 0 or 1): (?P<why>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"`([\w./-]+)`:\n\n\Z")
_NUMBER = re.compile(r"\d[\d,.]*")
RUNNABLE = ("console", "python", "bash")
RECORDED_RUN = "<!-- with: the recorded run -->"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page, or its hidden setup."""

    kind: str
    text: str
    line: int
    not_run: str = ""
    """The reason why it is not run, or empty."""
    run_by: str = ""
    """The test that runs it, or empty."""
    may_fail: str = ""
    """The reason why its commands may end with exit code 1, or empty."""
    file: str = ""
    """The file with this content, or empty."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of a console block, and the lines of output that the page shows."""

    text: str
    output: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The arguments of a gemmpipe command, without a comment."""
        return shlex.split(self.text, comments=True)[1:]

    @property
    def is_gemmpipe(self) -> bool:
        """True if the command is gemmpipe itself, without a shell's redirections."""
        return self.text.startswith("gemmpipe ") and not re.search(r" [|>&]|\$\(", self.text)


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page in order."""
    for found in _BLOCK.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            yield Block(kind="console", text=found["setup"], line=line)
            continue
        named = _FILE.search(page[: found.start()])
        reason = {"not run": "not_run", "run by": "run_by", "exit 0 or 1": "may_fail"}.get(found["mark"] or "")
        text = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Block(
            kind=found["kind"],
            text=text,
            line=line,
            file=named[1] if named else "",
            **({reason: found["why"]} if reason else {}),
        )


def commands(block: Block) -> list[Command]:
    """The commands of a console or bash block."""
    if block.kind == "bash":
        lines = [f"$ {line}" for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
    else:
        lines = block.text.replace("\\\n", " ").splitlines()
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(text=line.removeprefix("$ ").strip()))
        elif found and line.strip():
            found[-1] = Command(text=found[-1].text, output=(*found[-1].output, line))
    return found


def missing_line(shown: tuple[str, ...], printed: str) -> str:
    """The first line of a page's output that the printed lines do not have, in order; empty if all are there."""
    rest = iter([_normal(line) for line in printed.splitlines()])
    for line in shown:
        if line.strip() != "..." and not any(_matches(_normal(line), each) for each in rest):
            return line
    return ""


def _normal(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())


def _matches(shown: str, printed: str) -> bool:
    """True if a line is the printed one; `...` in it stands for any text."""
    return re.fullmatch(".*".join(re.escape(part.strip()) for part in shown.split("...")), printed) is not None
