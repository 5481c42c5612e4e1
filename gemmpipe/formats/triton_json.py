"""Triton JSON: one file per (N, K) and a default one, each with a configuration per bucket of M.

The files map a bucket's name to its knobs; existing ones are validated and merged.
"""

import glob
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.artifact import locked, record_run, sidecar_path
from gemmpipe.core.data import Bucket, Scalar
from gemmpipe.core.errors import GemmpipeError, UserError, quoted_repr, suggest_or_list
from gemmpipe.core.files import read_object
from gemmpipe.core.paths import write_atomic
from gemmpipe.family import Family
from gemmpipe.formats import BucketSelection, Format, ProductKey, Target, bucket_selections, by_product

if TYPE_CHECKING:
    import pandas as pd


SIZE_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "NUM_KSPLIT", "SPLIT_K", "num_warps")
"""Knobs that are whole numbers from 1."""
COUNT_KNOBS = ("num_stages", "waves_per_eu", "kpack", "matrix_instr_nonkdim")
"""Knobs that are whole numbers from 0; 0 leaves the choice to the compiler."""
MAX_KNOB_VALUE = 2**16
"""Above the values of all knobs; a tile with more rows or columns fits no device."""

Buckets = dict[str, dict[str, Scalar]]
"""Bucket -> knob -> value."""


def read_buckets(path: Path, ignored: Sequence[str] = (), optional: Sequence[str] = ()) -> Buckets:
    """The buckets of a file, without the `ignored` names, and without `optional` knobs that are null.

    Raises UserError: file, bucket, knob, what was expected.
    """
    found: Buckets = {}
    buckets = read_object(path)
    if not buckets:
        raise UserError(f"{path}: an empty object, expected names of buckets or Ms with their knobs")
    for bucket, knobs in buckets.items():
        if bucket in ignored:
            continue
        if not isinstance(knobs, dict) or not knobs:
            raise UserError(
                f"{path}: {quoted_repr(bucket)}: expected an object of knobs; fix or delete the file, it is unchanged"
            )
        given = {knob: value for knob, value in knobs.items() if value is not None or knob not in optional}
        for knob, value in given.items():
            check_knob(knob, value, f"{path}: {quoted_repr(bucket)}")
        found[bucket] = given
    return found


def check_knob(knob: str, value: object, where: str) -> None:
    """Raise UserError that begins with `where` for a value of this knob that no kernel accepts."""
    if not (value is None or isinstance(value, str | int | float)):
        raise UserError(f"{where}: {quoted_repr(knob)}: expected one value; fix or delete the file")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {quoted_repr(knob)}: {quoted_repr(value)}, expected a finite number")
    least, most = (
        (1, MAX_KNOB_VALUE)
        if knob in SIZE_KNOBS
        else (0, MAX_KNOB_VALUE)
        if knob in COUNT_KNOBS
        else (-MAX_KNOB_VALUE, MAX_KNOB_VALUE)
    )
    if knob in (*SIZE_KNOBS, *COUNT_KNOBS) and type(value) is not int:
        raise UserError(f"{where}: {knob}: {quoted_repr(value)}, expected a whole number from {least} to {most}")
    if isinstance(value, int) and not least <= value <= most:
        raise UserError(
            f"{where}: {quoted_repr(knob)}: {quoted_repr(value)}, expected a whole number from {least} to {most}"
        )


def render_buckets(buckets: Mapping[str, Mapping[str, Scalar]]) -> str:
    """The file's text: indented by 4, buckets in the order given."""
    return json.dumps(buckets, indent=4) + "\n"


def merge_buckets(
    path: Path, new: Mapping[str, Mapping[str, Scalar]], old: Buckets, order: Mapping[str, float]
) -> Buckets:
    """Write `old` updated by `new`, sorted by `order` (buckets not in it last); returns the written buckets.

    The caller has read `old` and holds the lock. Raises OSError with the old file unchanged.
    """
    merged: Buckets = {**old, **{name: dict(knobs) for name, knobs in new.items()}}
    ordered = {name: merged[name] for name in sorted(merged, key=lambda name: order.get(name, float("inf")))}
    write_atomic(path, render_buckets(ordered))
    return ordered


Limit = int | None | Mapping[str, Scalar]
"""The highest M of a bucket (None: no limit), or a mapping of `high` and required knob values."""

_WHERE = "format.triton_json.buckets"
_BUCKET_BOUNDS = (1, 4, 8, *(2**power for power in range(4, 14)))

PRESETS: Mapping[str, Mapping[str, Limit]] = {
    "aiter": {"small_M": 256, "medium_M": 2048, "large_M": None},
    "m_leq": {**{f"M_LEQ_{bound}": bound for bound in _BUCKET_BOUNDS}, "any": None},
    "atomic": {
        "small": 31,
        "medium_M32": {"high": 32, "BLOCK_SIZE_M": 32},
        "medium_M64": {"high": 64, "BLOCK_SIZE_M": 64},
        "medium_M128": {"high": 128, "BLOCK_SIZE_M": 128},
        "large": 256,
        "xlarge": None,
    },
}
"""Buckets of existing loaders."""


class TritonJson(Format):
    """Stores the Triton candidate of each bucket in `{device_name}-GEMM-{TAG}-N={N}-K={K}.json`.

    `device_name` defaults to the architecture. `buckets` is a preset's name (None: the family's) or a mapping, lowest
    first, of a name to the highest M, or to `{high: 32, BLOCK_SIZE_M: 32}` to store only candidates with these knobs.
    """

    name = "triton_json"

    def __init__(self, *, device_name: str | None, buckets: str | Mapping[str, Limit] | None) -> None:
        self.device_name = device_name
        if device_name is not None and not re.fullmatch(r"[^/\\\0\s][^/\\\0]*", device_name):
            raise UserError(f"format.triton_json.device_name: '{device_name}', expected a name such as gfx942 or R9700")
        self._ranges = None if buckets is None else bucket_ranges(buckets, _WHERE)

    def ranges(self, family: Family) -> tuple[Bucket, ...]:
        """The buckets of a family's files, lowest first."""
        return bucket_ranges(family.json_buckets, _WHERE) if self._ranges is None else self._ranges

    def constraints(self, family: Family) -> Mapping[str, tuple[str, ...]]:
        """Required knobs of its buckets, by configuration key."""
        return {f"{_WHERE}.{b.name}": tuple(name for name, _ in b.required_knobs) for b in self.ranges(family)}

    def buckets(self, family: Family, ms: Sequence[int]) -> tuple[Bucket, ...]:
        """The buckets that contain any of these Ms."""
        return tuple(bucket for bucket in self.ranges(family) if any(bucket.contains(m) for m in ms))

    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """One file per product and the default one; buckets that were not tuned this time are kept."""
        found = by_product(family, bucket_selections(family, selections, self.name, target.device.gfx), target.events)
        if not found:
            return []
        stem = f"{self.device_name or target.device.gfx}-GEMM-{family.json_tag}"
        order = {bucket.name: float(bucket.low) for bucket in self.ranges(family)}
        default = target.folder / f"{stem}.json"
        with locked(default):
            files = {target.folder / f"{stem}{_suffix(shape)}.json": chosen for shape, chosen in found.items()}
            old = {path: read_buckets(path) if path.exists() else {} for path in (*files, default)}
            record_run(sidecar_path(default), target.run_id, target.provenance, None, target.warn)
            for path, chosen in files.items():
                merge_buckets(path, _knobs_by_bucket(chosen), old[path], order)
            merge_buckets(default, _most_frequent(target.folder, stem), old[default], order)
        return [*files, default]


def bucket_ranges(buckets: str | Mapping[str, Limit], where: str) -> tuple[Bucket, ...]:
    """The buckets of a preset or a mapping, lowest first. Raises UserError that begins with `where`."""
    if isinstance(buckets, str):
        if buckets not in PRESETS:
            raise UserError(f"{where}: '{buckets}', expected a preset or a mapping{suggest_or_list(buckets, PRESETS)}")
        buckets = PRESETS[buckets]
    if not buckets:
        raise UserError(f"{where}: empty, expected {{name: highest M, ..., last: null}}")
    found: list[Bucket] = []
    low: int | None = 0
    for name, limit in buckets.items():
        knobs = dict(limit) if isinstance(limit, Mapping) else {"high": limit}
        high = knobs.pop("high", None)
        if low is None or (high is not None and (isinstance(high, bool) or not isinstance(high, int) or high <= low)):
            raise UserError(
                f"{where}.{name}: {high}, expected a whole number above the previous one, null only at the end"
            )
        required = tuple(knobs.items())
        found.append(
            Bucket(format=TritonJson.name, name=name, low=low, high=high, required_knobs=required, backends=("triton",))
        )
        low = high
    return tuple(found)


def _suffix(shape: ProductKey) -> str:
    return "".join(f"-{name}={value}" for name, value in shape)


def _knobs_by_bucket(chosen: Mapping[str, BucketSelection]) -> Buckets:
    for bucket, choice in chosen.items():
        if choice.libtype != "triton":
            raise GemmpipeError(f"triton_json: {bucket}: candidate of {choice.libtype}, expected triton")
    return {bucket: choice.knobs for bucket, choice in chosen.items()}


def _most_frequent(folder: Path, stem: str) -> Buckets:
    """The most frequent knobs per bucket over all products of this folder; a tie goes to the first file."""
    shape_file = re.compile(re.escape(stem) + r"(-\w+=[0-9]+)+\.json")
    counts: dict[str, Counter[str]] = {}
    for path in sorted(folder.glob(f"{glob.escape(stem)}-*.json")):
        if shape_file.fullmatch(path.name):
            for bucket, knobs in read_buckets(path).items():
                counts.setdefault(bucket, Counter())[json.dumps(knobs)] += 1
    return {bucket: json.loads(counter.most_common(1)[0][0]) for bucket, counter in counts.items()}
