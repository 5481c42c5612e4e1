"""The section about sums of time: what the choices save by layer, and for a mix of small and large M."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from gemmpipe.charts.colours import TUNED, Colours
from gemmpipe.charts.markup import html_table, join, tag, text_line
from gemmpipe.charts.page import Data, Section, embedded, figure
from gemmpipe.charts.table_charts import bar
from gemmpipe.core.events import counted
from gemmpipe.core.units import percent_text, time_text
from gemmpipe.report.attention import Row, records
from gemmpipe.report.data import RunData
from gemmpipe.report.results import COMPARABLE

_SMALL_M = 64
_MAX_ROWS = 40


def mix_section(data: RunData, colours: Colours) -> Section | None:
    """Sums of calls times time, before and after, by layer or shape; and a slider between small and large M.

    They are called a workload only where calls were captured: else each M of a product counts the same.
    """
    rows = [r for r in records(data.products) if r["us"] and r["library_us"] and r["library"] in COMPARABLE]
    if not rows:
        return None
    small = [r for r in rows if r["rows"] <= _SMALL_M]
    large = [r for r in rows if r["rows"] > _SMALL_M]
    parts: list[Markup | None] = [_total(rows) if data.captured else None]
    if small and large:
        parts.append(_slider(small, large))
    parts.append(_by_layer(data, rows, colours))
    if data.captured:
        title, lead = "Workload", "Time of the captured calls with the best library and with the choices."
    else:
        title = "A mix of M"
        lead = (
            "No calls were captured, so this is no workload: each M of a product counts the same. "
            "python -m gemmpipe.capture PROGRAM records how often a program makes each call."
        )
    return Section(id="workload", title=title, body=join(parts), lead=lead)


def _sums(rows: Sequence[Row]) -> tuple[float, float]:
    """Time in us of all calls with the best library, and with the choices."""
    before = sum((r["weight"] or 1.0) * r["library_us"] for r in rows)
    return before, sum((r["weight"] or 1.0) * r["us"] for r in rows)


def _total(rows: Sequence[Row]) -> Markup:
    before, after = _sums(rows)
    calls = sum(r["weight"] or 1.0 for r in rows)
    text = f"{time_text(after)} instead of {time_text(before)}: {percent_text(1 - after / before)} less"
    return tag("p", tag("b", text), f" for {calls:,.0f} calls of {counted(len(rows), 'product')}.")


def _slider(small: Sequence[Row], large: Sequence[Row]) -> Markup:
    """Two groups of M with the mean time per call of each; the page mixes them."""
    means = [(*_sums(rows), sum(r["weight"] or 1.0 for r in rows)) for rows in (small, large)]
    before = [total / calls for total, _, calls in means]
    after = [total / calls for _, total, calls in means]
    label = tag("label", f"Share of calls with M <= {_SMALL_M} (generation), the others larger (prompts):", for_="mix")
    slider = tag("input", type="range", id="mix", min=0, max=100, value=50, step=1)
    output = [
        tag("output", id="mix-result"),
        tag(
            "p",
            "M <= 64: ",
            tag("span", id="mix-small"),
            ", larger: ",
            tag("span", id="mix-large"),
            ". Per call: ",
            tag("span", id="mix-times"),
            ".",
            class_="note",
        ),
    ]
    block = embedded("mix-data", {"before": before, "after": after})
    return tag("div", label, tag("br"), slider, join(output), block, class_="mix")


def _by_layer(data: RunData, rows: Sequence[Row], colours: Colours) -> Markup:
    """A row per layer, or per shape where layers have no names: the time before and after."""
    named = any(r["layer"] for r in rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["layer"] or row["shape"]) if named else str(row["shape"]), []).append(row)
    sums = {name: (*_sums(part), len(part)) for name, part in groups.items()}
    most = max(before - after for before, after, _ in sums.values())
    ordered = sorted(sums.items(), key=lambda item: item[1][1] - item[1][0])
    body: list[tuple[Any, ...]] = [
        (
            text_line(name, 60),
            str(count),
            time_text(before),
            time_text(after),
            percent_text(1 - after / before),
            bar((before - after) / most if most > 0 else 0.0, TUNED, colours),
        )
        for name, (before, after, count) in ordered[:_MAX_ROWS]
    ]
    header = ("layer" if named else data.shape_title, "products", "best library", "choices", "less", "saved")
    table = html_table(header, body, text_columns=(0,))
    csv_rows = [[name, count, before, after] for name, (before, after, count) in ordered]
    content = Data(name="saved_time", header=("layer", "products", "before_us", "after_us"), rows=csv_rows)
    return figure("Sum over the products of a layer" if named else "Sum over the Ms of a shape", table, content)
