"""The page around charts: one file with its style and script, which loads nothing and runs no other script."""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from gemmpipe import __version__
from gemmpipe.charts.markup import Content, csv_text, join, json_text, tag, text_line
from gemmpipe.charts.style import page_style

_FOLDER = Path(__file__).parent
MAX_CSV = 200_000
"""Characters of the data behind one figure; the rest is left out with a note."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page with a title, for its table of contents."""

    id: str
    title: str
    body: Markup
    lead: str = ""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a figure: the name of its file, its header and its rows."""

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


def page(
    title: str, sections: Iterable[Section], *, state: str = "", footer: str = "", refresh_s: int | None = None
) -> str:
    """The HTML text. `refresh_s`: seconds after which the browser loads the page again."""
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(
        title=text_line(title, 200),
        state=state,
        sections=list(sections),
        footer=footer,
        refresh_s=refresh_s,
        style=Markup(page_style()),
        script=Markup(script),
        script_hash=Markup(digest),
        version=__version__,
    )


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(_FOLDER)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template(
        "page.html"
    )


def figure(title: str, content: Content, data: Data | None = None, *, limit: int = MAX_CSV) -> Markup:
    """A titled figure with a link to its data as CSV."""
    link = Markup("") if data is None else csv_link(data, limit)
    return tag("figure", tag("figcaption", tag("h3", title), link), content)


def csv_link(data: Data, limit: int = MAX_CSV) -> Markup:
    """A link that downloads the data; beyond `limit` characters, the first rows of it."""
    text = csv_text(data.header, data.rows)
    label = "CSV"
    if len(text) > limit:
        text = text[: text.rfind("\n", 0, limit) + 1]
        label = f"CSV (first {text.count(chr(10)) - 1:,} of {len(data.rows):,} rows)"
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", data.name)[:60]
    block = tag("script", json_text(text), type="application/json", id=f"csv-{name}")
    return join([tag("a", label, href="#", class_="csv", data_csv=f"csv-{name}", download=f"{name}.csv"), block])


def cards(items: Iterable[tuple[str, str]]) -> Markup:
    """Figures of a summary: (value, label) pairs."""
    return tag(
        "div",
        join(tag("div", tag("b", value), tag("span", label), class_="card") for value, label in items),
        class_="cards",
    )


def attention(lines: Sequence[str], fine: str) -> Markup:
    """A list of what deserves attention, or the text `fine`."""
    items = join(tag("li", line) for line in lines or [fine])
    return tag("ul", items, class_="attention" if lines else "attention fine")


def embedded(name: str, value: object) -> Markup:
    """Data for the page's script, as an element with the id `name`."""
    return tag("script", json_text(value), type="application/json", id=name)
