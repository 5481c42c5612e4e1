"""HTML and SVG elements, escaped by construction: text of a run may be anyone's."""

import csv
import html
import io
import json
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from gemmpipe.core.errors import printable, shortened
from gemmpipe.core.files import is_formula

Content = str | Markup | int | float | None


def tag(name: str, *children: Content, **attributes: object) -> Markup:
    """An element. `class_` and `data_tip` become `class` and `data-tip`; None and False leave an attribute out.

    Children that are no `Markup` are escaped, like the values of attributes.
    """
    parts = ["<", name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else number(value) if isinstance(value, float) else str(value)
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{html.escape(text)}"')
    parts.append(">")
    parts += [_escaped(child) for child in children if child is not None]
    if name not in _VOID:
        parts += ["</", name, ">"]
    return Markup("".join(parts))


_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


def join(parts: Iterable[Content]) -> Markup:
    """The parts one after another; those that are no `Markup` are escaped, None is left out."""
    return Markup("".join(_escaped(part) for part in parts if part is not None))


def _escaped(part: Content) -> str:
    """Markup as it is, other values as text. `Markup.format` and `Markup.join` take ten times as long."""
    return str(part) if isinstance(part, Markup) else html.escape(str(part))


def number(value: float) -> str:
    """A coordinate: at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text_line(value: object, limit: int = 300) -> str:
    """One line of text for people: control characters are replaced, long texts lose their middle."""
    return printable(shortened(str(value), limit))


def json_text(value: object) -> Markup:
    """JSON for a `script` element: without `<`, `>` and `&`, so that no value ends the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV; missing values are empty, and what a spreadsheet takes for a formula has an apostrophe."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return stream.getvalue()


def _cell(value: object) -> object:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return f"'{text}" if is_formula(text) else text


def html_table(header: Sequence[str], rows: Iterable[Sequence[Content]], *, text_columns: Iterable[int] = ()) -> Markup:
    """A table; columns of numbers are aligned to the right, those of `text_columns` to the left."""
    left = set(text_columns)
    head = join(tag("th", name, class_="l" if i in left else None) for i, name in enumerate(header))
    body = [
        tag("tr", join(tag("td", cell, class_="l" if i in left else None) for i, cell in enumerate(row)))
        for row in rows
    ]
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", join(body)))
    return tag("div", table, class_="scroll")
