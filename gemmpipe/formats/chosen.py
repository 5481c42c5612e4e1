"""Selections as formats want them: plain values, problems apart from buckets, one choice a bucket and product."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, quoted
from gemmpipe.events import Events
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.parsing import missing, parse_key
from gemmpipe.problem import make_problem
from gemmpipe.tables.merging import Row

if TYPE_CHECKING:
    import pandas as pd

Shape = tuple[tuple[str, int], ...]
"""The family's sizes (`N` and `K`, with `B` in front) with their values: what a file of buckets is for."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The candidate selected for a bucket of one product."""

    bucket: str
    low: int
    knobs: dict[str, Scalar]
    libtype: str
    weight: float
    key: Mapping[str, Scalar]
    """The family's key without M."""
    spec: GemmSpec
    """At the bucket's lowest M."""


def plain_rows(family: Family, selections: "pd.DataFrame", name: str) -> list[Row]:
    """The selections of one format (`""`: the problems' own), key columns typed, nothing as None.

    Rows without a chosen candidate are left out. Raises UserError for a key that is none.
    """
    found: list[Row] = []
    for record in selections.to_dict("records"):
        row: Row = {str(column): _plain(value) for column, value in record.items()}
        if (row.get("format") or "") != name or row.get("libtype") is None:
            continue
        for column in family.key_columns:
            value = row.get(column.name)
            if value is not None:
                row[column.name] = parse_key(column, value, str(row.get("gfx") or ""))
        found.append(row)
    return found


def _plain(value: object) -> Scalar:
    if value.__class__.__name__ in ("NAType", "NaTType") or missing(value):
        return None
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    return plain if isinstance(plain, str | int | float | bool) else json.dumps(plain)


def choices(family: Family, selections: "pd.DataFrame", name: str, gfx: str) -> list[Choice]:
    """The bucket selections of one format. Raises UserError for knobs that are no JSON object."""
    words = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    found: list[Choice] = []
    for row in plain_rows(family, selections, name):
        where = f"selections: {name} {row.get('bucket')}"
        low = int(row.get("bucket_low") or 0)
        problem = make_problem(family, {**row, family.rows_column: low + 1}, words, gfx, where)
        found.append(
            Choice(
                bucket=str(row["bucket"]),
                low=low,
                knobs=_knobs(row.get("config"), where),
                libtype=str(row["libtype"]),
                weight=float(row.get("weight") or 0.0),
                key={column: value for column, value in problem.key if column != family.rows_column},
                spec=family.spec(problem),
            )
        )
    return found


def _knobs(config: Scalar, where: str) -> dict[str, Scalar]:
    try:
        knobs = json.loads(str(config or "{}"))
    except ValueError:
        knobs = None
    if not isinstance(knobs, dict):
        raise UserError(f"{where}: config {quoted(config)}, expected the knobs as a JSON object")
    return knobs


def by_shape(family: Family, found: list[Choice], events: Events) -> dict[Shape, dict[str, Choice]]:
    """Product -> bucket -> choice, in the order of first sight.

    A file has no place for the other columns of a key (dtypes, bias): where they differ within a product, the one
    with the most calls is taken and a warning says so.
    """
    shapes: dict[Shape, dict[str, Choice]] = {}
    clashes: set[Shape] = set()
    for choice in found:
        shape = tuple((name, int(str(choice.key[name]))) for name in family.sizes)
        buckets = shapes.setdefault(shape, {})
        before = buckets.get(choice.bucket)
        if before is not None:
            clashes.add(shape)
        if before is None or choice.weight > before.weight:
            buckets[choice.bucket] = choice
    for shape in sorted(clashes):
        named = ",".join(f"{name}={value}" for name, value in shape)
        events.emit("warning", f"{named}: one file for several dtypes or biases; it holds the one with the most calls")
    return shapes
