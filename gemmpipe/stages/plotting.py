"""Time over M, one panel a product, as an HTML file that needs nothing beside it."""

from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.errors import UserError
from gemmpipe.paths import write_atomic

if TYPE_CHECKING:
    import pandas as pd

_PANEL_PX = 420
_COLUMNS = 2


def plot(compared: "pd.DataFrame", path: Path, device: str) -> Path:
    """A line a name and one for the floor, both axes logarithmic; whose choice took time says how much.

    Raises UserError where plotly is missing.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError:
        raise UserError("stages.compare.plot=true needs plotly: pip install 'gemmpipe[plot]'") from None
    products = list(compared.groupby(["N", "K"], sort=False))
    rows = -(-len(products) // _COLUMNS) or 1
    titles = [f"N={n} K={k}" for (n, k), _ in products]
    figure = make_subplots(rows=rows, cols=_COLUMNS, subplot_titles=titles)
    shown: set[str] = set()
    tuning_s = compared.groupby("name", sort=False)["tuning_s"].sum()
    for place, (_, part) in enumerate(products):
        where = {"row": place // _COLUMNS + 1, "col": place % _COLUMNS + 1}
        lines = [(str(name), line, "us") for name, line in part.groupby("name", sort=False)]
        floors = part.dropna(subset=["floor_us"]).drop_duplicates("M")
        for name, line, column in [*lines, ("floor", floors, "floor_us")]:
            ordered = line.dropna(subset=[column]).sort_values("M")
            if len(ordered):
                dash = "dash" if name == "floor" else "solid"
                figure.add_trace(
                    go.Scatter(
                        x=ordered["M"],
                        y=ordered[column],
                        name=name if not tuning_s.get(name) else f"{name} (chosen in {tuning_s[name]:.0f} s)",
                        legendgroup=name,
                        showlegend=name not in shown,
                        mode="lines+markers",
                        line={"dash": dash},
                    ),
                    **where,
                )
                shown.add(name)
    figure.update_xaxes(type="log", title_text="M")
    figure.update_yaxes(type="log", title_text="us")
    figure.update_layout(height=_PANEL_PX * rows, title=f"Time over M on {device}")
    write_atomic(path, figure.to_html(include_plotlyjs=True))
    return path
