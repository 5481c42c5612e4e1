"""A run and a comparison as HTML for notebooks: a picture and compact tables, every text escaped.

The picture is drawn by the parts of the report, in its colours, without a script. A run that has several M of a shape
shows its time over M; others show the speed-up of each product, or its time where no library was compared.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from gemmpipe.charts.axes import value_axis
from gemmpipe.charts.bars import horizontal_stacks
from gemmpipe.charts.colours import TUNED, Colours, legend
from gemmpipe.charts.lines import Interval, interval_chart
from gemmpipe.charts.markup import Content, html_table, join, tag
from gemmpipe.charts.page import figure
from gemmpipe.charts.style import inline
from gemmpipe.core.events import counted
from gemmpipe.core.text_table import Column
from gemmpipe.core.units import duration_text, speedup_text, time_text
from gemmpipe.report.attention import Row, product_name
from gemmpipe.report.diff_text import changed_pairs, note_lines, pair_columns, regime_columns, side_text, summary_line
from gemmpipe.report.results import COMPARABLE
from gemmpipe.report.show_text import choice_columns, regime_columns_of
from gemmpipe.report.speedup import speedup_cell

if TYPE_CHECKING:
    from gemmpipe.report.data import RunData
    from gemmpipe.report.diff import Difference, Pair

MAX_ROWS = 20
MAX_SHAPES = 6
"""Charts of time over M."""


def run_html(data: "RunData") -> str:
    """The facts, the regimes of M, a picture and the first products of a run."""
    from gemmpipe.report.attention import records
    from gemmpipe.report.results import run_figures

    rows = records(data.products)
    wall = f" in {duration_text(data.wall_s)}" if data.wall_s else ""
    code = f", exit code {data.exit_code}" if data.exit_code else ""
    parts: list[Content] = [
        tag("b", f"gemmpipe {data.family.name}"),
        f": {counted(len(rows), 'product')} of {data.problems}, {data.state_word}{wall}{code}",
        tag("br"),
        tag("small", data.origin),
        *(tag("p", note) for note in data.notes),
    ]
    if rows:
        parts += [
            _table(regime_columns_of(run_figures(data.products).regimes)),
            _picture(rows),
            _table(choice_columns(data, rows[:MAX_ROWS])),
        ]
    if len(rows) > MAX_ROWS:
        parts.append(tag("small", f"{len(rows) - MAX_ROWS:,} more in .table; .report() writes the page of all"))
    return str(inline(parts))


def _picture(rows: Sequence[Row]) -> Markup:
    """Time over M of the shapes with most Ms; else speed-ups, else times of the products."""
    from gemmpipe.report.overview import by_shape, drawn_names, shape_chart

    colours, shapes = Colours(), by_shape(rows)
    several = {shape: part for shape, part in shapes.items() if len({row["rows"] for row in part}) > 1}
    if not several:
        return _speedups(rows, colours) or _times(rows, colours)
    most = sorted(several, key=lambda shape: -len(several[shape]))[:MAX_SHAPES]
    shown = {shape: part for shape, part in several.items() if shape in most}
    charts = [shape_chart(shape, part, colours) for shape, part in shown.items()]
    left_out = len(shapes) - len(shown)
    note = tag("small", f"{counted(left_out, 'more shape')}: .report() draws all") if left_out else None
    names = drawn_names([row for part in shown.values() for row in part])
    return join([legend(names, colours), tag("div", join(charts), class_="charts"), note])


def _speedups(rows: Sequence[Row], colours: Colours) -> Markup | None:
    """The speed-up of each product over the best library, with its interval."""
    known = [row for row in rows if row["library"] in COMPARABLE and row["speedup"]]
    intervals = []
    for row in known[:MAX_ROWS]:
        times = f"{time_text(row['us'])}, best library {time_text(row['library_us'])}"
        tip = f"{product_name(row)}: {speedup_cell(row)}; {row['libtype']} {times}"
        value, low, high = (row[name] for name in ("speedup", "speedup_low", "speedup_high"))
        intervals.append(Interval(label=product_name(row), name=TUNED, value=value, low=low, high=high, tip=tip))
    if not intervals:
        return None
    chart = _interval_chart(intervals, "speed-up over the best library", colours)
    return figure("Speed-up over the best library, 95 % interval", chart)


def _times(rows: Sequence[Row], colours: Colours) -> Markup:
    """The time of each product, where there is no library to compare with."""
    stacks = [(product_name(row), {TUNED: float(row["us"])}) for row in rows[:MAX_ROWS]]
    return figure("Time of one call", horizontal_stacks(stacks, colours, title="times", label="us", unit="us"))


def _interval_chart(intervals: Sequence[Interval], label: str, colours: Colours) -> Markup:
    values = [value for each in intervals for value in (each.low, each.high, each.value, 1.0) if value]
    axis = value_axis(values, label=label, text=speedup_text, log=max(values) > 2 * min(values), zoom=1.01)
    return interval_chart(intervals, axis, colours, title=label, mark=1.0)


def plain_run_html(pipeline: str, folder: str, exit_code: int, wall_s: float, files: Iterable[str]) -> str:
    """The facts of a run without problems, such as a merge."""
    head = tag("b", f"gemmpipe {pipeline}: exit code {exit_code}, {duration_text(wall_s)}")
    return str(tag("div", head, tag("br"), tag("small", folder), join(tag("p", name) for name in files)))


def difference_html(found: "Difference") -> str:
    """The counts, the regimes, a picture of the changes, and the first changed products of a comparison."""
    changed = changed_pairs(found)
    parts: list[Content] = [tag("b", summary_line(found))]
    for name, side in (("A", found.before), ("B", found.after)):
        parts += [tag("br"), tag("small", f"{name} {side_text(side)}")]
    parts += [tag("p", note) for note in note_lines(found)]
    if found.pairs:
        parts.append(_table(regime_columns(found)))
    if changed:
        parts += [_changes(changed[:MAX_ROWS]), _table(pair_columns(changed[:MAX_ROWS]))]
    if len(changed) > MAX_ROWS:
        parts.append(tag("small", f"{len(changed) - MAX_ROWS:,} more in .frame"))
    return str(inline(parts))


def _changes(pairs: "Sequence[Pair]") -> Markup:
    """The ratio of the times of changed products, with its interval; right of 1 is slower."""
    columns = itertools.takewhile(lambda column: column.title != "A", pair_columns(pairs))
    names = zip(*([f"{column.title} {cell}" for cell in column.cells] for column in columns), strict=True)
    intervals = []
    for pair, name in zip(pairs, map(", ".join, names), strict=True):
        tip = f"{name}: {time_text(pair.before.time_us)} before, {time_text(pair.after.time_us)} after"
        intervals.append(Interval(label=name, name=TUNED, value=pair.ratio, low=pair.low, high=pair.high, tip=tip))
    chart = _interval_chart(intervals, "time after over time before", Colours())
    return figure("Time after over time before, with its interval (over 1: slower)", chart)


def _table(columns: Sequence[Column]) -> Markup:
    """A table; texts are aligned to the left, numbers to the right."""
    texts = [index for index, column in enumerate(columns) if column.is_text]
    rows = list(zip(*(column.cells for column in columns), strict=True))
    return html_table([column.title for column in columns], rows, text_columns=texts)
