"""Charts as tables: heat maps, bars and funnels, whose text keeps its size on a narrow page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gemmpipe.charts.colours import Colours
from gemmpipe.charts.markup import join, number, tag, text_line

STEPS = 11
"""Steps of a scale of colours: the classes `h0` to `h10`."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value; `target` is the id of the element that a click leads to."""

    value: float
    text: str
    tip: str = ""
    target: str = ""
    pale: bool = False
    """True for a value that the reader should not compare with the others."""


def speedup_step(value: float) -> int:
    """The step of a ratio: the middle at 1, the ends at 1/3 and 3."""
    return _step((math.log(value) / math.log(3) + 1) / 2) if value > 0 else 0


def share_step(value: float) -> int:
    """The step of a share of 1: the ends at 0.4 and 1."""
    return _step((value - 0.4) / 0.6)


def _step(share: float) -> int:
    return min(STEPS - 1, max(0, round(share * (STEPS - 1))))


def heat_map(
    rows: Sequence[tuple[str, Mapping[int, Cell]]],
    columns: Sequence[int],
    step: Callable[[float], int],
    *,
    corner: str,
    kind: str,
    caption: str,
) -> Markup:
    """A row per (label, cell by column). `kind`: the class of the scale of colours, `speedup` or `share`."""
    head = tag("tr", tag("th", corner, class_="l"), join(tag("th", f"{column:,}") for column in columns))
    body = [
        tag("tr", tag("th", text_line(label, 60), class_="l"), join(_cell(cells.get(m), step) for m in columns))
        for label, cells in rows
    ]
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", join(body)), class_=f"heat {kind}")
    return tag("div", table, class_="scroll")


def _cell(cell: Cell | None, step: Callable[[float], int]) -> Markup:
    if cell is None:
        return tag("td", class_="none")
    text = tag("a", cell.text, href=f"#{cell.target}") if cell.target else cell.text
    shade = "pale" if cell.pale else f"h{step(cell.value)}"
    return tag("td", text, class_=shade, data_tip=text_line(cell.tip) or None)


def scale_key(kind: str, low: str, middle: str, high: str) -> Markup:
    """The key of a scale of colours, with the values at its ends and in its middle."""
    boxes = join(tag("span", class_=f"h{i}") for i in range(STEPS))
    return tag("div", low, tag("span", boxes, class_="steps"), high, f" (middle: {middle})", class_=f"key {kind}")


def bar(share: float, name: str | None = None, colours: Colours | None = None) -> Markup:
    """A horizontal bar of this share of its cell, 0 to 1."""
    width = 100 * min(1.0, max(0.0, share))
    kind = f" {colours.css_class(name)}" if name is not None and colours is not None else ""
    return tag("span", tag("span", style=f"width:{number(width)}%"), class_=f"bar{kind}")


def funnel(steps: Sequence[tuple[str, int, str]]) -> Markup:
    """Steps of a funnel: a row per (text, number that remains, note), each with a bar of its share of the first."""
    first = max((count for _, count, _ in steps), default=1) or 1
    rows = [
        tag(
            "tr",
            tag("td", text_line(text, 120), class_="l"),
            tag("td", f"{count:,}"),
            tag("td", bar(count / first), class_="wide"),
            tag("td", text_line(note, 200), class_="l note"),
        )
        for text, count, note in steps
    ]
    return tag("div", tag("table", tag("tbody", join(rows)), class_="funnel"), class_="scroll")
