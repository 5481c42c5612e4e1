"""Time over M, one panel a product, as an HTML file that needs nothing beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.errors import UserError
from gemmpipe.paths import write_atomic

if TYPE_CHECKING:
    import pandas as pd

_PANEL_PX = 420
_COLUMNS = 2
_FLOOR = "floor"


def plot(compared: "pd.DataFrame", path: Path, device: str) -> Path:
    """A line a name and one for the floor, both axes logarithmic; whose choice took time says how much.

    Raises UserError where plotly is missing.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise UserError("stages.compare.plot=true needs plotly: pip install 'gemmpipe[plot]'") from None
    products = list(compared.groupby(["N", "K"], sort=False))
    rows = -(-len(products) // _COLUMNS) or 1
    titles = [f"N={n} K={k}" for (n, k), _ in products]
    figure = make_subplots(rows=rows, cols=_COLUMNS, subplot_titles=titles)
    labels = _labels(compared)
    shown: set[str] = set()
    for place, (_, part) in enumerate(products):
        for name, line in _lines(part):
            words = {"name": labels.get(name, name), "legendgroup": name, "showlegend": name not in shown}
            style = {"mode": "lines+markers", "line": {"dash": "dash" if name == _FLOOR else "solid"}}
            where = {"row": place // _COLUMNS + 1, "col": place % _COLUMNS + 1}
            figure.add_scatter(x=line.index, y=line, **words, **style, **where)
            shown.add(name)
    figure.update_xaxes(type="log", title_text="M")
    figure.update_yaxes(type="log", title_text="us")
    figure.update_layout(height=_PANEL_PX * rows, title=f"Time over M on {device}")
    write_atomic(path, figure.to_html(include_plotlyjs=True))
    return path


def _labels(compared: "pd.DataFrame") -> dict[str, str]:
    """By name, what the legend calls it where its choice took time."""
    tuning_s = compared.groupby("name", sort=False)["tuning_s"].sum()
    return {str(name): f"{name} (chosen in {spent_s:.0f} s)" for name, spent_s in tuning_s.items() if spent_s}


def _lines(part: "pd.DataFrame") -> Iterator[tuple[str, "pd.Series[float]"]]:
    """Of one product: each name with its microseconds by M, ascending; the floor last."""
    timed = [(str(name), line.set_index("M")["us"]) for name, line in part.groupby("name", sort=False)]
    floor = part.dropna(subset=["floor_us"]).drop_duplicates("M").set_index("M")["floor_us"]
    for name, line in [*timed, (_FLOOR, floor)]:
        if len(found := line.dropna().sort_index()):
            yield name, found
