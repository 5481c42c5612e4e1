"""Lines for people: text with styles for terminals, cut or folded to a width.

Styles are names of meanings; a terminal chooses colours for them, and other output has the bare text.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

GOOD, BAD, WARN, DIM, HEAD, KEY = "good", "bad", "warn", "dim", "head", "key"
"""Better than its counterpart, worse, to be looked at, of less interest, a heading, a name or a command."""
_INDENT = "  "
_COMMAND = re.compile(r"(^|: |[\"'])(gemmpipe|export) \S|^[A-Z][A-Z0-9_]+=\S|^(vllm serve|python -m) \S")
"""A command to copy, which a line break would split."""
_NUMBER = re.compile(r"[-+~]?\d[\d,.]*\W*( |$)")
"""A number, which stays with the word before it: `torch 17`, `M 1 to 4,096`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of text; `spans` are (start, end, style)."""

    text: str
    spans: tuple[tuple[int, int, str], ...] = ()
    is_whole: bool = False
    """True for a line to copy, such as a command: it is neither folded nor cut."""


def styled(*parts: str | tuple[str, str]) -> Line:
    """A line of plain texts and (text, style) pairs."""
    text, spans = "", []
    for part in parts:
        piece, style = (part, "") if isinstance(part, str) else part
        if style and piece:
            spans.append((len(text), len(text) + len(piece), style))
        text += piece
    return Line(text=text, spans=tuple(spans))


def folded(line: Line, width: int) -> list[Line]:
    """The line in parts of at most `width` characters, broken at blanks; later parts are indented.

    No part begins with a number, which belongs to the word before it, unless there is no other blank. A word that is
    longer than the width, such as a path, stays whole.
    """
    if line.is_whole or len(line.text) <= width:
        return [line]
    lead = line.text[: len(line.text) - len(line.text.lstrip())] + _INDENT
    if len(lead) * 2 > width:
        return [line]
    parts: list[Line] = []
    start = 0
    while start < len(line.text):
        prefix = lead if parts else ""
        end = _break(line.text, start, width - len(prefix))
        parts.append(_part(line, start, end, prefix))
        start = end + 1
        while start < len(line.text) and line.text[start] == " ":
            start += 1
    return parts


def fitted(line: Line, width: int | None) -> list[Line]:
    """The line as it is shown: folded to a terminal's width, whole where it has a command, and without a terminal.

    `width`: None without a terminal, since programs search such lines one by one. Blanks at the end are left out.
    """
    line = replace(line, text=line.text.rstrip())
    return [line] if width is None or _COMMAND.search(line.text) else folded(line, width)


def _break(text: str, start: int, room: int) -> int:
    """The index of the blank where a part that begins at `start` ends; the end of the text if all of it fits."""
    if len(text) - start <= room:
        return len(text)
    first = (
        start + len(text[start:]) - len(text[start:].lstrip(" "))
    )  # the indent of the first part is no place to break
    last = at = text.rfind(" ", first, start + room + 1)
    while at > first and _NUMBER.match(text, at + 1):
        at = text.rfind(" ", first, at)
    if at < 0:  # numbers alone
        at = last
    if at < 0:
        at = text.find(" ", start + room)
    return len(text) if at < 0 else at


def _part(line: Line, start: int, end: int, prefix: str) -> Line:
    shift = len(prefix) - start
    spans = [
        (max(low, start) + shift, min(high, end) + shift, style)
        for low, high, style in line.spans
        if low < end and high > start
    ]
    return Line(text=prefix + line.text[start:end].rstrip(), spans=tuple(spans))


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """A paragraph in lines of at most `width` characters; all but the first are indented."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def texts(lines: Iterable[Line]) -> list[str]:
    """The bare texts."""
    return [line.text for line in lines]


KNOB_LETTERS = {
    "BLOCK_SIZE_M": "",
    "BLOCK_SIZE_N": "x",
    "BLOCK_SIZE_K": "x",
    "GROUP_SIZE_M": " g",
    "NUM_KSPLIT": " k/",
    "num_warps": " w",
    "num_stages": " s",
}
"""Knob -> the mark before its value: `64x128x128 g1 k/4 w4 s3`."""
KNOB_NAMES = {
    **KNOB_LETTERS,
    "GROUP_SIZE_M": " group ",
    "NUM_KSPLIT": " split ",
    "num_warps": " warps ",
    "num_stages": " stages ",
}
"""The same with words: `64x128x128 group 1 split 4 warps 4 stages 3`."""


def marked_knobs(knobs: Mapping[str, object], marks: Mapping[str, str]) -> str:
    """Knobs in one text: those with a mark first; others, such as a library's, with their names."""
    text = "".join(f"{mark}{knobs[name]}" for name, mark in marks.items() if name in knobs).strip()
    rest = {name: value for name, value in knobs.items() if name not in marks and value not in ("", None)}
    others = [value if isinstance(value, str) else f"{name}={value}" for name, value in rest.items()]
    return " ".join(part for part in (text, *others) if part)
