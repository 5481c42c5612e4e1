"""The products of a report: figures of each choice, with its floor and the text of its sizes."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gemmpipe.core import schema
from gemmpipe.core.data import is_plausible_time_us
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import is_number
from gemmpipe.family.roofline import Roofline, rooflines_of, shipped_rooflines
from gemmpipe.report.data import REPORTED
from gemmpipe.report.results import product_results

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family

_NUMBERS = frozenset(
    {
        *("us", "err_ratio", "tflops", "bw", "baseline_us", "p20_us", "p80_us", "ratio", "ratio_low", "ratio_high"),
        *("near_ties", "incumbent_us", "runner_up_us", "noise_pct", "extra_weight_bytes", "weight", "cu_num"),
    }
)
"""Columns of numbers; a cell that is no number is missing."""


def product_frame(
    rows: Iterable[Mapping[str, Any]], family: "Family", config: Mapping[str, Any] | None = None
) -> "pd.DataFrame":
    """The products of selections or of a table's rows, by shape and M; rows without a time are left out.

    `config`: the run's configuration, whose roofline is the floor's. Raises UserError for a row without a product's
    key.
    """
    import pandas as pd

    cells = [_typed(row) for row in rows if not row.get("format")]
    timed = [row for row in cells if is_plausible_time_us(row.get("us"))]
    names = list(dict.fromkeys(name for row in timed for name in row)) or ["us"]
    results = product_results(pd.DataFrame(timed, columns=names, dtype=object), family, _rooflines(config))
    kept = {name: [row.get(name) for row in timed] for name in REPORTED}
    frame = results.assign(**{name: pd.Series(column, dtype=object) for name, column in kept.items()})
    frame["share"] = frame["floor_share"]
    frame["shape"] = _shapes(frame, family)
    sizes = [name for name in family.sizes if name in frame]
    return frame.sort_values([*sizes, "shape", "rows"], kind="stable", ignore_index=True) if len(frame) else frame


def _typed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if name in _NUMBERS else value for name, value in row.items()}


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return float(value) if is_number(value) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


def _rooflines(config: Mapping[str, Any] | None) -> Mapping[str, Roofline]:
    """The run's own rooflines, else the shipped ones."""
    try:
        return {**shipped_rooflines(), **(rooflines_of(config) if config else {})}
    except (TypeError, ValueError, UserError, AttributeError):  # edited by hand
        return shipped_rooflines()


def _shapes(frame: "pd.DataFrame", family: "Family") -> list[str]:
    """The sizes of each product but M, and what else distinguishes rows of this table: `1280 x 8192`, `..., H200`."""
    varying = [
        name
        for name in (
            *(c.name for c in family.key_columns if c.name not in (*family.sizes, family.rows_column)),
            "device",
        )
        if frame[name].astype(str).nunique() > 1
    ]
    texts, short = [], []
    for row in frame.to_dict("records"):
        sizes = " x ".join(str(row[name]) for name in family.sizes)
        others = [text for name in varying if (text := _shown(name, row[name]))]
        texts.append(", ".join([sizes, *others]))
        short.append(", ".join([sizes, *dict.fromkeys(others)]))  # one dtype of all operands is named once
    return short if len(set(short)) == len(set(texts)) else texts


def _shown(name: str, value: object) -> str:
    """A cell of a key as text; empty for a missing one, False and `No`. Of a dotted name the last part is given."""
    if value is None or value != value or value is False:
        return ""
    parts = str(value).split(".")
    text = parts[-1] if all(part.isidentifier() for part in parts) else str(value)
    return name if value is True else "" if text == "No" else text


def kept_columns() -> frozenset[str]:
    """The columns of a selections table that a report reads, besides the family's key."""
    return frozenset({*schema.SELECTIONS, *REPORTED})


def knob_text(config: object) -> str:
    """Knobs as `BLOCK_SIZE_M=64 num_warps=4`; another text as it is, cut."""
    try:
        knobs = json.loads(str(config or "{}"))
    except (ValueError, RecursionError):
        return str(config)[:200]
    if not isinstance(knobs, dict):
        return str(config)[:200]
    return " ".join(f"{name}={value}" for name, value in knobs.items() if value not in ("", None))[:300]
