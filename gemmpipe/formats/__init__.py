"""The format interface, a writer of one kind of artifact, and selections in the form that formats need.

Plain values, the problems' own selections apart from those of buckets, one selection per bucket and product.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.data import Bucket, Device, Knobs, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.core.events import Events
from gemmpipe.core.renamed import accept_old_methods, renamed_members
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.family.problem import is_missing, make_problem, parse_key_value
from gemmpipe.tables.merge import Row, RowPreference

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.backends.engine import EngineBackend


@renamed_members(judge="preference")
@dataclass(frozen=True, kw_only=True)
class Target:
    """The folder of the artifacts, their provenance, and the events of the run."""

    folder: Path
    device: Device
    run_id: str
    provenance: Mapping[str, Scalar | Mapping[str, Scalar]]
    """Versions, clocks and recipe of the run: goes to the sidecar."""
    events: Events
    """Receives what was not stored, and why."""
    preference: RowPreference = RowPreference(device=None, is_stale=lambda row: False)
    """The choice between rows of several tables."""

    def warn(self, text: str) -> None:
        """Emit a warning about something that the user may miss."""
        self.events.emit("warning", text)


class Format(ABC):
    """A writer of artifacts; it decides nothing about candidates."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, {"asks": "constraints", "named": "named_file"})

    def buckets(self, family: Family, ms: Sequence[int]) -> tuple[Bucket, ...]:
        """The ranges of M with one stored candidate per (N, K); ranges that contain none of `ms` are left out."""
        return ()

    def engine(self) -> "EngineBackend | None":
        """The engine, if the format configures an engine's own function, which then has a search of its own."""
        return None

    def entries(self, spec: GemmSpec, device: Device, paths: Sequence[Path]) -> Mapping[int, Knobs]:
        """The knobs by M, in the order of the file, from the first of `paths` with the name that the engine looks for.

        A folder means the file of that name in it. Raises UserError for an invalid file.
        """
        return {}

    def constraints(self, family: Family) -> Mapping[str, tuple[str, ...]]:
        """Configuration key -> the knobs that a candidate must have to be stored there."""
        return {}

    def table(self, family: Family, folder: Path) -> Path | None:
        """The native table in this folder of artifacts, if the format writes one."""
        return None

    def named_file(self, folder: Path) -> Path | None:
        """The path of the user's `file`, if the format has that option and it is set."""
        return None

    @abstractmethod
    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """Merge the selections (columns `schema.SELECTIONS` and the family's key) into the files; returns their paths.

        Rows with an empty `format` are the problems' own, the others belong to this format's buckets. Raises UserError
        for a damaged file, which stays unchanged, and EnvironmentProblem if it cannot write.
        """


ProductKey = tuple[tuple[str, int], ...]
"""The family's sizes (`N` and `K`, with `B` in front) with their values: one file of buckets each."""


@dataclass(frozen=True, kw_only=True)
class BucketSelection:
    """The candidate selected for a bucket of one product."""

    bucket: str
    low: int
    knobs: dict[str, Scalar]
    libtype: str
    weight: float
    key: Mapping[str, Scalar]
    """The family's key without M."""
    spec: GemmSpec
    """The spec at the bucket's lowest M."""


def typed_rows(family: Family, selections: "pd.DataFrame", name: str) -> list[Row]:
    """The selections of one format (`""`: the problems' own), key columns typed, empty cells as None.

    Rows without a chosen candidate are left out. Raises UserError for an invalid key.
    """
    found: list[Row] = []
    for record in selections.to_dict("records"):
        row: Row = {str(column): _plain_value(value) for column, value in record.items()}
        if (row.get("format") or "") != name or row.get("libtype") is None:
            continue
        for column in family.key_columns:
            value = row.get(column.name)
            if value is not None:
                row[column.name] = parse_key_value(column, value, str(row.get("gfx") or ""))
        found.append(row)
    return found


def _plain_value(value: object) -> Scalar:
    if value.__class__.__name__ in ("NAType", "NaTType") or is_missing(value):
        return None
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    return plain if isinstance(plain, str | int | float | bool) else json.dumps(plain)


def bucket_selections(family: Family, selections: "pd.DataFrame", name: str, gfx: str) -> list[BucketSelection]:
    """The bucket selections of one format. Raises UserError for knobs that are not a JSON object."""
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    found: list[BucketSelection] = []
    for row in typed_rows(family, selections, name):
        where = f"selections: {name} {row.get('bucket')}"
        low = int(row.get("bucket_low") or 0)
        problem = make_problem(family, {**row, family.rows_column: low + 1}, defaults, gfx, where)
        found.append(
            BucketSelection(
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
        raise UserError(f"{where}: config {quoted_repr(config)}, expected the knobs as a JSON object")
    return knobs


def by_product(
    family: Family, found: list[BucketSelection], events: Events
) -> dict[ProductKey, dict[str, BucketSelection]]:
    """Product -> bucket -> selection, in the order of first occurrence.

    A file does not contain the other columns of a key (dtypes, bias): where they differ within a product, the one
    with the most calls is stored, with a warning.
    """
    shapes: dict[ProductKey, dict[str, BucketSelection]] = {}
    clashes: set[ProductKey] = set()
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
        events.emit("warning", f"{named}: one file for several dtypes or biases; the one with the most calls is stored")
    return shapes
