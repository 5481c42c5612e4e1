"""What calls of a table's rows take beside the launches that were timed, row by row and in a line."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

Record = Mapping[str, object]


def worst_calls(called: "pd.DataFrame | None") -> dict[tuple[str, str], Record]:
    """By problem and candidate, the row of the layout in which a call costs most, or the one that says why none."""
    found: dict[tuple[str, str], Record] = {}
    for row in called.to_dict("records") if called is not None else ():
        key = str(row["problem"]), str(row["candidate"])
        if key not in found or _cost(row) > _cost(found[key]):  # type: ignore[arg-type]
            found[key] = row  # type: ignore[assignment]
    return found


def _cost(row: Record) -> float:
    return math.inf if row["called_error"] else float(str(row["called_ratio"]))


def on_top(call: Record, function: str, within_pct: float | None) -> str:
    """What comes on top of the launch in a call, where that is more than allowed; else nothing.

    `within_pct`: percent of the launch; None allows anything. The paired interval must exclude 1.
    """
    ratio, low = float(str(call["called_ratio"])), float(str(call["called_low"]))
    if within_pct is None or ratio <= 1 + within_pct / 100 or low <= 1:
        return ""
    called_us, bound_us = float(str(call["called_us"])), float(str(call["bound_us"]))
    layout = " with M-major x_scale" if call["layout"] == "column" else ""
    return (
        f"{function}{layout} takes {called_us:.2f} us, {called_us - bound_us:.2f} us on top of the launch "
        f"(+{100 * (ratio - 1):.1f} %, {within_pct:g} allowed)"
    )


def calls_in_words(rows: Sequence[Record], within_pct: float | None) -> str:
    """`; as called: 71 of 72 within 3 % of their launch (98.6 %), +5.1 % at most`; empty where no call was timed."""
    ratios = [float(str(row["called_ratio"])) for row in rows if row.get("called_ratio") is not None]
    if not ratios:
        return ""
    worst = f"{100 * (max(ratios) - 1):+.1f} % at most"
    if within_pct is None:
        return f"; as called: {worst}"
    within = sum(ratio <= 1 + within_pct / 100 for ratio in ratios)
    share = 100 * within / len(ratios)
    return f"; as called: {within} of {len(ratios)} within {within_pct:g} % of their launch ({share:.1f} %), {worst}"
