"""Charts of points: lines with bands of their spread, scattered points, and intervals."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from gemmpipe.charts.axes import WIDE_CHAR_PX, Axis, x_axis, y_axis
from gemmpipe.charts.colours import FLOOR, Colours
from gemmpipe.charts.markup import join, number, tag, text_line

Point = tuple[float, float]
_TOP, _BOTTOM, _RIGHT = 22.0, 40.0, 12.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart; `name` decides its colour."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of the spread around the line."""
    whiskers: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of the spread at single points, where bands of many lines would hide each other."""
    tips: Sequence[str] = ()
    """Per point, the text shown when it is pointed at."""
    stepped: bool = False
    """True if the value holds until the next point, as in the best time so far."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A row of a chart of intervals: a value between its limits."""

    label: str
    name: str
    value: float
    low: float | None
    high: float | None
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The size of a chart in px, which scales with the width of its place on the page."""

    width: float = 360.0
    height: float = 240.0
    left: float = 58.0
    least_px: int | None = None
    """On a narrower page the chart scrolls instead of shrinking."""

    @property
    def right_px(self) -> float:
        """Where the area of the data ends."""
        return self.width - _RIGHT

    @property
    def bottom_px(self) -> float:
        """Where the area of the data ends."""
        return self.height - _BOTTOM


def chart(content: Iterable[Markup], frame: Frame, title: str, *, least_px: int | None = None) -> Markup:
    """The SVG element of a chart; on a page narrower than `least_px` it scrolls instead of shrinking."""
    svg = tag(
        "svg",
        join(content),
        viewBox=f"0 0 {number(frame.width)} {number(frame.height)}",
        role="img",
        aria_label=text_line(title),
        class_="chart",
        style=f"max-width:{number(1.2 * frame.width)}px" + (f";min-width:{least_px}px" if least_px else ""),
    )
    return tag("div", svg, class_="scroll") if least_px else svg


def line_chart(
    lines: Sequence[Series],
    x: Axis,
    y: Axis,
    colours: Colours,
    *,
    title: str,
    frame: Frame | None = None,
    dots: bool = True,
) -> Markup:
    """Lines over an axis; bands behind them, dots with their texts in front."""
    frame = frame or Frame()
    x, y = _placed(x, y, frame)
    layers = [_axes(x, y, frame)]
    layers += [_band(line, x, y, colours) for line in lines if line.band]
    layers += [_whiskers(line, x, y, colours) for line in lines if line.whiskers]
    layers += [_path(line, x, y, colours) for line in lines]
    if dots:
        layers += [_dots(line, x, y, colours) for line in lines if line.name != FLOOR]
    return chart(layers, frame, title, least_px=frame.least_px)


def scatter_chart(
    groups: Sequence[Series], x: Axis, y: Axis, colours: Colours, *, title: str, frame: Frame | None = None
) -> Markup:
    """Points without lines, coloured by the name of their group."""
    frame = frame or Frame()
    x, y = _placed(x, y, frame)
    return chart([_axes(x, y, frame), *(_dots(group, x, y, colours) for group in groups)], frame, title)


def interval_chart(
    rows: Sequence[Interval],
    x: Axis,
    colours: Colours,
    *,
    title: str,
    mark: float | None = None,
    width: float = 720.0,
) -> Markup:
    """Rows of a value with a whisker between its limits; a vertical line at `mark`."""
    pitch, top = 20.0, 8.0
    left = min(width / 2, max((len(r.label) for r in rows), default=0) * WIDE_CHAR_PX + 12)
    frame = Frame(width=width, height=top + pitch * len(rows) + _BOTTOM, left=left)
    x = x.placed(left, frame.right_px)
    parts = [x_axis(x, frame.bottom_px, top)]
    if mark is not None:
        at = x.at(mark)
        parts.append(tag("line", x1=at, x2=at, y1=top, y2=frame.bottom_px, class_="mark"))
    for index, row in enumerate(rows):
        parts.append(_interval(row, x, top + pitch * (index + 0.5), left, colours))
    return chart(parts, frame, title, least_px=620)


def _interval(row: Interval, x: Axis, y_px: float, left: float, colours: Colours) -> Markup:
    label = text_line(row.label, max(12, int((left - 12) / WIDE_CHAR_PX)))
    parts = [tag("text", label, x=left - 8, y=y_px + 4, text_anchor="end")]
    if row.low is not None and row.high is not None:
        a, b = number(x.at(row.low)), number(x.at(row.high))
        ends = f"M{a} {number(y_px - 4)}v8M{b} {number(y_px - 4)}v8"
        parts.append(tag("path", d=f"M{a} {number(y_px)}H{b}{ends}", class_="line"))
    parts.append(tag("circle", cx=x.at(row.value), cy=y_px, r=4, class_="dot", data_tip=text_line(row.tip) or None))
    return tag("g", join(parts), class_=colours.css_class(row.name), data_name=text_line(row.name))


def _placed(x: Axis, y: Axis, frame: Frame) -> tuple[Axis, Axis]:
    return x.placed(frame.left, frame.right_px), y.placed(frame.bottom_px, _TOP)


def _axes(x: Axis, y: Axis, frame: Frame) -> Markup:
    return join([y_axis(y, frame.left, frame.right_px), x_axis(x, frame.bottom_px, _TOP)])


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)]


def _path(line: Series, x: Axis, y: Axis, colours: Colours) -> Markup:
    points = [(number(x.at(a)), number(y.at(b))) for a, b in _finite(line.points)]
    if not points:
        return Markup("")
    join_with: Callable[[tuple[str, str]], str] = (
        (lambda p: f"H{p[0]}V{p[1]}") if line.stepped else (lambda p: f"L{p[0]} {p[1]}")
    )
    path = f"M{points[0][0]} {points[0][1]}" + "".join(map(join_with, points[1:]))
    return tag("path", d=path, class_=f"line {colours.css_class(line.name)}", data_name=text_line(line.name))


def _band(line: Series, x: Axis, y: Axis, colours: Colours) -> Markup:
    rows = [r for r in line.band if all(map(math.isfinite, r))]
    if len(rows) < 2:
        return Markup("")
    if line.stepped:  # limits hold until the next point, like the line
        held = [(after[0], *row[1:]) for row, after in pairwise(rows)]
        rows = [each for pair in zip(rows, held, strict=False) for each in pair] + rows[-1:]
    upper = [f"{number(x.at(a))} {number(y.at(high))}" for a, _, high in rows]
    lower = [f"{number(x.at(a))} {number(y.at(low))}" for a, low, _ in reversed(rows)]
    return tag("path", d=f"M{'L'.join([*upper, *lower])}Z", class_=f"band {colours.css_class(line.name)}")


def _whiskers(line: Series, x: Axis, y: Axis, colours: Colours) -> Markup:
    parts = [
        f"M{number(x.at(a))} {number(y.at(low))}V{number(y.at(high))}"
        for a, low, high in line.whiskers
        if all(map(math.isfinite, (a, low, high)))
    ]
    return tag("path", d="".join(parts), class_=f"whisker {colours.css_class(line.name)}")


def _dots(line: Series, x: Axis, y: Axis, colours: Colours) -> Markup:
    tips = [*map(text_line, line.tips)] or [""] * len(line.points)
    marks = [
        tag("circle", cx=x.at(a), cy=y.at(b), r=3, data_tip=tip or None)
        for (a, b), tip in zip(line.points, tips, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    return tag("g", join(marks), class_=f"dots {colours.css_class(line.name)}", data_name=text_line(line.name))
