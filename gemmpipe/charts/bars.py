"""Stacked bars, horizontal and vertical."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from gemmpipe.charts.axes import WIDE_CHAR_PX, Axis, linear_ticks, x_axis, y_axis
from gemmpipe.charts.colours import Colours
from gemmpipe.charts.lines import Frame, chart
from gemmpipe.charts.markup import tag, text_line

Stacks = Sequence[tuple[str, Mapping[str, float]]]
"""(label of the bar, value by name), in order."""


def horizontal_stacks(
    stacks: Stacks, colours: Colours, *, title: str, label: str, unit: str, width: float = 720.0
) -> Markup:
    """A bar per row; each part shows its name, value and unit when pointed at."""
    pitch, top = 26.0, 6.0
    left = min(width / 2, max((len(name) for name, _ in stacks), default=0) * WIDE_CHAR_PX + 12)
    frame = Frame(width=width, height=top + pitch * len(stacks) + 40, left=left)
    most = max((sum(parts.values()) for _, parts in stacks), default=0.0) or 1.0
    x = Axis(low=0.0, high=most, label=label, ticks=linear_ticks(0.0, most, 8)).placed(left, frame.right_px)
    drawn = [x_axis(x, frame.bottom_px, top)]
    for index, (name, parts) in enumerate(stacks):
        y_px, value = top + pitch * index, 0.0
        drawn.append(tag("text", text_line(name, 40), x=left - 8, y=y_px + 17, text_anchor="end"))
        for key, part in parts.items():
            start, value = x.at(value), value + part
            if x.at(value) - start >= 0.2:
                box = tag(
                    "rect",
                    x=start,
                    y=y_px + 4,
                    width=x.at(value) - start,
                    height=pitch - 8,
                    class_="area",
                    data_tip=f"{text_line(name)}: {text_line(key)} {part:.3g} {unit}",
                )
                drawn.append(tag("g", box, class_=colours.css_class(key), data_name=text_line(key)))
    return chart(drawn, frame, title, least_px=620)


def vertical_stacks(
    stacks: Stacks,
    colours: Colours,
    *,
    title: str,
    label: str,
    x_label: str,
    height: float = 240.0,
) -> Markup:
    """A bar per column, with its label below.

    The chart grows with the number of its columns, up to a width at which it scrolls on a narrow page.
    """
    width = min(1100.0, 60.0 + 46.0 * max(4, len(stacks)))
    frame = Frame(width=width, height=height, left=44.0)
    most = max((sum(parts.values()) for _, parts in stacks), default=0.0) or 1.0
    ticks = tuple(t for t in linear_ticks(0.0, most, 4) if float(t).is_integer()) or (0.0, most)
    y = Axis(low=0.0, high=most, label=label, ticks=ticks).placed(frame.bottom_px, 22.0)
    pitch = (frame.right_px - frame.left) / max(1, len(stacks))
    drawn = [y_axis(y, frame.left, frame.right_px)]
    for index, (name, parts) in enumerate(stacks):
        x_px, value = frame.left + pitch * index, 0.0
        drawn.append(tag("text", text_line(name, 12), x=x_px + pitch / 2, y=frame.bottom_px + 16, text_anchor="middle"))
        for key, part in parts.items():
            bottom, value = y.at(value), value + part
            box = tag(
                "rect",
                x=x_px + pitch * 0.12,
                y=y.at(value),
                width=pitch * 0.76,
                height=bottom - y.at(value),
                class_="area",
                data_tip=f"{x_label} {text_line(name)}: {text_line(key)} {part:g}",
            )
            drawn.append(tag("g", box, class_=colours.css_class(key), data_name=text_line(key)))
    middle = (frame.left + frame.right_px) / 2
    drawn.append(tag("text", x_label, x=middle, y=frame.bottom_px + 32, text_anchor="middle", class_="name"))
    return chart(drawn, frame, title, least_px=round(0.8 * width))
