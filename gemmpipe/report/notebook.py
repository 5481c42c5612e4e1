"""A run and a comparison as HTML for notebooks: compact tables, every text escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from gemmpipe.core.events import counted
from gemmpipe.core.units import duration_text
from gemmpipe.report.diff_text import changed_pairs, note_lines, pair_columns, regime_columns, side_text, summary_line
from gemmpipe.report.show_text import choice_columns, regime_columns_of
from gemmpipe.report.text_table import Column

if TYPE_CHECKING:
    from gemmpipe.report.data import RunData
    from gemmpipe.report.diff import Difference

MAX_ROWS = 20


def run_html(data: "RunData") -> str:
    """The facts, the regimes of M and the first products of a run."""
    from gemmpipe.report.attention import records
    from gemmpipe.report.results import run_figures

    rows = records(data.products)
    wall = f" in {duration_text(data.wall_s)}" if data.wall_s else ""
    code = f", exit code {data.exit_code}" if data.exit_code else ""
    parts = [
        _tag("b", f"gemmpipe {data.family.name}"),
        escape(f": {counted(len(rows), 'product')} of {data.problems}, {data.state}{wall}{code}"),
        "<br>",
        _tag("small", data.origin),
        *(_tag("p", note) for note in data.notes),
    ]
    if rows:
        parts += [
            _table(regime_columns_of(run_figures(data.products).regimes)),
            _table(choice_columns(data, rows[:MAX_ROWS])),
        ]
    if len(rows) > MAX_ROWS:
        parts.append(_tag("small", f"{len(rows) - MAX_ROWS:,} more in .table; .report() writes the page of all"))
    return f"<div>{''.join(parts)}</div>"


def plain_run_html(pipeline: str, folder: str, exit_code: int, wall_s: float, files: Iterable[str]) -> str:
    """The facts of a run without problems, such as a merge."""
    head = f"gemmpipe {pipeline}: exit code {exit_code}, {duration_text(wall_s)}"
    return f"<div>{_tag('b', head)}<br>{_tag('small', folder)}{''.join(_tag('p', name) for name in files)}</div>"


def difference_html(found: "Difference") -> str:
    """The counts, the regimes and the first changed products of a comparison."""
    changed = changed_pairs(found)
    parts = [
        _tag("b", summary_line(found)),
        *(
            "<br>" + _tag("small", f"{name} {side_text(side)}")
            for name, side in (("A", found.before), ("B", found.after))
        ),
        *(_tag("p", note) for note in note_lines(found)),
    ]
    if found.pairs:
        parts.append(_table(regime_columns(found)))
    if changed:
        parts.append(_table(pair_columns(changed[:MAX_ROWS])))
    if len(changed) > MAX_ROWS:
        parts.append(_tag("small", f"{len(changed) - MAX_ROWS:,} more in .frame"))
    return f"<div>{''.join(parts)}</div>"


def _table(columns: Sequence[Column]) -> str:
    """A table; numbers are aligned to the right."""
    head = "".join(_cell("th", column.title, column) for column in columns)
    rows = zip(*(column.cells for column in columns), strict=True)
    body = "".join(
        f"<tr>{''.join(_cell('td', text, column) for text, column in zip(cells, columns, strict=True))}</tr>"
        for cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, text: str, column: Column) -> str:
    side = "left" if column.is_text else "right"
    return f'<{name} style="text-align: {side}">{escape(text)}</{name}>'


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"
