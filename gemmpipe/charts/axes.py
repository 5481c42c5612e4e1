"""Axes of charts: positions, and ticks whose labels do not overlap."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from gemmpipe.charts.markup import join, tag
from gemmpipe.core.units import time_text

CHAR_PX = 6.4
"""Width of a character of a label at 11 px."""
WIDE_CHAR_PX = 7.3
"""The same for names of rows, in which capitals are frequent: a name is cut at the edge of the chart."""
_LINE_PX = 15.0
_STEPS = (1, 2, 5)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: its range of values and of pixels, and its ticks."""

    low: float
    high: float
    log: bool = False
    start_px: float = 0.0
    end_px: float = 1.0
    label: str = ""
    ticks: tuple[float, ...] = ()
    text: Callable[[float], str] = "{:g}".format

    def at(self, value: float) -> float:
        """The position of a value in px, not outside the axis."""
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start_px + min(1.0, max(0.0, share)) * (self.end_px - self.start_px)

    def placed(self, start_px: float, end_px: float) -> "Axis":
        """The axis between these pixels."""
        return replace(self, start_px=start_px, end_px=end_px)


def short_time(time_us: float) -> str:
    """A time at a tick, without zeros after the point: `50 us`, `2.5 ms`."""
    return re.sub(r"\.?0+(?= )", "", text) if "." in (text := time_text(time_us)) else text


def value_axis(
    values: Iterable[float],
    *,
    label: str,
    text: Callable[[float], str],
    log: bool = False,
    least: float | None = None,
    zoom: float = 1.5,
) -> Axis:
    """The axis of these values with round ticks.

    least: a value that it includes; zoom: the least ratio of the ends of a logarithmic axis, so that a flat line is not
    enlarged to its noise.
    """
    given = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    given += [] if least is None else [least]
    low, high = (min(given), max(given)) if given else (1.0 if log else 0.0, 10.0 if log else 1.0)
    if log:
        if high / low < zoom:
            low, high = low / zoom**0.5, high * zoom**0.5
        low, high = low / 1.06, high * 1.06
        return Axis(low=low, high=high, log=True, label=label, text=text, ticks=log_ticks(low, high))
    room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    high, low = high + room, low if least is not None and low == least else low - room
    return Axis(low=low, high=high, label=label, text=text, ticks=linear_ticks(low, high))


def rows_axis(rows: Iterable[int], *, label: str = "M") -> Axis:
    """The axis of M, logarithmic, with a tick at each M that occurs."""
    ticks = tuple(float(m) for m in sorted(set(rows)) if m > 0)
    low, high = (ticks[0], ticks[-1]) if ticks else (1.0, 10.0)
    if low == high:
        low, high = low / 2, high * 2
    return Axis(low=low / 1.12, high=high * 1.12, log=True, label=label, ticks=ticks, text=lambda m: f"{m:.0f}")


def log_ticks(low: float, high: float, most: int = 7) -> tuple[float, ...]:
    """Ticks at 1, 2 and 5 of each decade, or at fewer if there were more than `most`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (_STEPS, (1, 3), (1,)):
        found = tuple(s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high)
        if len(found) <= most:
            break
    if len(found) < 3:
        return linear_ticks(low, high, 5)
    return found[:: -(-len(found) // most)]


def linear_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """About `count` ticks at multiples of 1, 2 or 5 of a power of ten."""
    if not high > low:
        return (low,)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((s * power for s in (*_STEPS, 10) if s * power >= raw * 0.999), power)
    first = math.ceil(low / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1))


def shown_labels(axis: Axis, room_px: float = 6.0) -> list[tuple[float, str]]:
    """Ticks with labels that do not overlap: the ends first, then powers of two, then the others."""
    placed: list[tuple[float, float]] = []
    shown: dict[float, str] = {}
    for tick in _by_importance(axis.ticks):
        text = axis.text(tick)
        half = len(text) * CHAR_PX / 2 + room_px / 2
        at = axis.at(tick)
        if all(at + half <= left or at - half >= right for left, right in placed):
            placed.append((at - half, at + half))
            shown[tick] = text
    return sorted(shown.items())


def _by_importance(ticks: Sequence[float]) -> list[float]:
    ends = [*ticks[-1:], *ticks[:1]]
    powers = [t for t in ticks if t > 0 and math.log2(t).is_integer()]
    return list(dict.fromkeys([*ends, *powers[::2], *powers, *ticks]))


def x_axis(axis: Axis, y_px: float, top_px: float) -> Markup:
    """The axis below a chart: a mark at each tick, a grid line and a label where labels have room."""
    labels = shown_labels(axis)
    lines = [tag("line", x1=axis.at(t), x2=axis.at(t), y1=top_px, y2=y_px, class_="grid") for t, _ in labels]
    marks = [tag("line", x1=axis.at(t), x2=axis.at(t), y1=y_px, y2=y_px + 4, class_="tick") for t in axis.ticks]
    texts = [tag("text", text, x=axis.at(t), y=y_px + 16, text_anchor="middle") for t, text in labels]
    middle = (axis.start_px + axis.end_px) / 2
    title = tag("text", axis.label, x=middle, y=y_px + 32, text_anchor="middle", class_="name")
    base = tag("line", x1=axis.start_px, x2=axis.end_px, y1=y_px, y2=y_px, class_="tick")
    return join([*lines, base, *marks, *texts, title])


def y_axis(axis: Axis, x_px: float, right_px: float) -> Markup:
    """The axis to the left of a chart, its name above it."""
    ticks = _apart([t for t in axis.ticks if axis.low <= t <= axis.high], axis)
    lines = [tag("line", x1=x_px, x2=right_px, y1=axis.at(t), y2=axis.at(t), class_="grid") for t in ticks]
    texts = [tag("text", axis.text(t), x=x_px - 6, y=axis.at(t) + 4, text_anchor="end") for t in ticks]
    title = tag("text", axis.label, x=4, y=axis.end_px - 8, class_="name") if axis.label else None
    return join([*lines, *texts, title])


def _apart(ticks: Sequence[float], axis: Axis) -> list[float]:
    """The ticks whose labels are one above another: the last first."""
    kept: list[float] = []
    for tick in reversed(ticks):
        apart = all(abs(axis.at(tick) - axis.at(other)) >= _LINE_PX for other in kept)
        if apart and axis.text(tick) not in map(axis.text, kept):
            kept.append(tick)
    return kept
