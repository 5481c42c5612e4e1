"""The style of charts: on a page of its own, and inside a page that is not ours, such as a notebook."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from markupsafe import Markup

from gemmpipe.charts.colours import colour_classes, colour_rules
from gemmpipe.charts.markup import Content, join, tag

SCOPE = "gemmpipe-charts"
"""The class of the element around charts in a page that is not ours. All rules apply below it alone."""
_DARK_PAGES = (
    "[data-jp-theme-light=false]",  # JupyterLab, Notebook 7
    ".vscode-dark",
    ".vscode-high-contrast",
    "html[theme=dark]",  # Colab
    "[data-md-color-scheme=slate]",  # mkdocs-material
    "[data-theme=dark]",  # Sphinx
)
"""Selectors of pages that are dark. The system's theme does not decide: most notebooks are light whatever it is."""
_HOST = (
    "--text:currentColor;--soft:currentColor;--bg:transparent;--shade:transparent;"
    "--grid:color-mix(in srgb,currentColor 18%,transparent);--idle:color-mix(in srgb,currentColor 25%,transparent);"
)
"""Text, axes and the floor have the colour of the text around the charts."""
_LAYOUT = (
    "h3{font-size:13px;font-weight:600;line-height:1.4;margin:4px 0}"
    "figure{margin:4px 0;min-width:0}"
    ".charts{max-width:1100px}"
    ".legend{position:static}"
    "table{font-size:12px;border-collapse:collapse;margin:6px 0}"
    "th,td{padding:2px 8px;text-align:right;white-space:nowrap}"
    "th.l,td.l{text-align:left}"
)
"""Rules against styles of notebooks."""
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_TIP = re.compile(r' data-tip="([^"]*)">')


@cache
def page_style() -> str:
    """The rules of a page of its own, which follows the system's theme or the reader's choice."""
    light, dark = colour_rules()
    themes = (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}@media print{{:root,:root[data-theme=dark]{{{light}}}}}"
    )
    return _rules("chart.css") + _rules("page.css") + themes + colour_classes()


def inline(content: Iterable[Content]) -> Markup:
    """An element with charts and their style, for a page that is not ours and runs no script."""
    return tag("div", tag("style", Markup(_inline_style())), native_tips(join(content)), class_=SCOPE)


def native_tips(markup: Markup) -> Markup:
    """The texts of marks as `title` elements, which browsers show without a script."""
    return Markup(_TIP.sub(r"><title>\1</title>", str(markup)))


@cache
def _inline_style() -> str:
    light, dark = colour_rules()
    dark_pages = ",".join(f"{page} .{SCOPE}" for page in _DARK_PAGES)
    own = f".{SCOPE}{{{light}{_HOST}}}{dark_pages}{{{dark}}}"
    return own + _scoped(_rules("chart.css") + _LAYOUT + colour_classes())


def _scoped(rules: str) -> str:
    """The rules for elements below the scope; there are no at-rules among them."""
    return "".join(
        ",".join(f".{SCOPE} {selector.strip()}" for selector in selectors.split(",")) + f"{{{body}}}"
        for selectors, body in _RULE.findall(rules)
    )


def _rules(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
