"""The page of a comparison: time over M, a chart per product, a line per name, and the floor of the hardware."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gemmpipe.charts.axes import rows_axis, short_time, value_axis
from gemmpipe.charts.colours import FLOOR, Colours, legend
from gemmpipe.charts.lines import Series, line_chart
from gemmpipe.charts.markup import html_table, join, tag
from gemmpipe.charts.page import Data, Section, figure, page
from gemmpipe.core.paths import write_atomic
from gemmpipe.core.units import time_text
from gemmpipe.stages.compare.summary import ABOUT, NOTES, marks_of, shared_line, without_equal_peer

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[Hashable, Any]
_DATA = ("problem", "M", "N", "K", "name", "unlike", "us", "p20_us", "p80_us", "floor_us", "over_tuned", "error")


def plot(compared: "pd.DataFrame", path: Path, device: str, regimes: "pd.DataFrame | None" = None) -> Path:
    """Write a self-contained HTML file; `regimes` is the summary that it shows too. Logarithmic axes."""
    colours = Colours()
    sections = [_times(compared, colours)]
    if regimes is not None and len(regimes):
        sections.append(_summary(regimes))
    write_atomic(path, page(f"Time over M on {device}", sections))
    return path


def _rows(frame: "pd.DataFrame") -> list[Row]:
    """The rows; missing values are None."""
    return [
        {name: None if value != value else value for name, value in row.items()} for row in frame.to_dict("records")
    ]


def _times(compared: "pd.DataFrame", colours: Colours) -> Section:
    rows = _rows(compared)
    timed = [row for row in rows if row["us"] is not None]
    names = list(dict.fromkeys(str(row["name"]) for row in timed))
    for name in names:
        colours.css_class(name)  # in the order of the lineup, in all charts
    products: dict[str, list[Row]] = {}
    for row in timed:
        products.setdefault(f"{row['N']} x {row['K']}", []).append(row)
    charts = [figure(title, _chart(title, part, names, colours)) for title, part in products.items()]
    has_floor = any(row["floor_us"] for row in timed)
    marked = marks_of(compared)
    used = "".join(marked.values())
    notes = [
        "N x K above each chart; the lines at a point are from the 20 % to the 80 % quantile of its samples.",
        *(f"{note}." for mark, note in NOTES.items() if mark in used),
        *([f"{ABOUT} approximate: {shared}."] if (shared := shared_line(compared)) else []),
        *([] if has_floor else ["No floor: no option of the group roofline has the peak rates of this device."]),
    ]
    body = join(
        [
            legend([*names, *([FLOOR] if has_floor else [])], colours, labels=_labels(timed, marked)),
            figure("Time of one call", tag("div", join(charts), class_="charts"), _data(rows)),
            *(tag("p", note, class_="note") for note in notes),
        ]
    )
    return Section(id="time", title="Time over M", body=body)


def _data(rows: Sequence[Row]) -> Data:
    return Data(name="compared", header=_DATA, rows=[[row.get(name) for name in _DATA] for row in rows])


def _labels(rows: Sequence[Row], marked: Mapping[str, str]) -> dict[str, str]:
    """Legend labels by name: marks, and the cost of entries that a tuner chose in measured time."""
    tuning_s: dict[str, float] = {}
    for row in rows:
        tuning_s[str(row["name"])] = tuning_s.get(str(row["name"]), 0.0) + (row["tuning_s"] or 0.0)
    return {
        name: f"{name} {marked.get(name, '')}".rstrip() + (f" (chosen in {spent_s:.0f} s)" if spent_s else "")
        for name, spent_s in tuning_s.items()
    }


def _chart(title: str, rows: Sequence[Row], names: Sequence[str], colours: Colours) -> Markup:
    lines = [line for name in names if (line := _line(name, rows))]
    floor = sorted({(row["M"], row["floor_us"]) for row in rows if row["floor_us"]})
    if floor:
        lines.append(Series(name=FLOOR, points=floor))
    times = [us for line in lines for _, us in line.points]
    y = value_axis(times, label="time of one call", text=short_time, log=True)
    return line_chart(lines, rows_axis(int(row["M"]) for row in rows), y, colours, title=f"time over M, {title}")


def _line(name: str, rows: Sequence[Row]) -> Series | None:
    """One name's times of a product, by M ascending."""
    own = sorted((row for row in rows if row["name"] == name), key=lambda row: int(row["M"]))
    if not own:
        return None
    tips = [f"{name}, M {row['M']}: {time_text(row['us'])}" for row in own]
    spread = [(row["M"], row["p20_us"], row["p80_us"]) for row in own if row.get("p20_us") and row.get("p80_us")]
    return Series(name=name, points=[(row["M"], row["us"]) for row in own], whiskers=spread, tips=tips)


def _summary(regimes: "pd.DataFrame") -> Section:
    """The geometric means by regime of M: over the tuned choice, or times where nothing is tuned."""
    ratio = "over_tuned" if regimes["over_tuned"].notna().any() else "us"
    rows = [row for row in _rows(without_equal_peer(regimes)) if row[ratio] is not None]
    labels = list(dict.fromkeys(str(row["regime"]) for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        about = ABOUT if row.get("shared") else ""
        text = f"{about}{row[ratio]:.2f} ({row[f'{ratio}_least']:.2f} to {row[f'{ratio}_most']:.2f})"
        cells.setdefault(str(row["name"]), {})[str(row["regime"])] = text
    table = html_table(
        ("name", *labels),
        [(name, *(part.get(x, "-") for x in labels)) for name, part in cells.items()],
        text_columns=(0,),
    )
    what = "Time over the tuned choice's" if ratio == "over_tuned" else "Time of a call in us, as nothing is tuned here"
    return Section(id="summary", title="By regime of M", body=table, lead=f"{what}: geometric mean (least to most).")
