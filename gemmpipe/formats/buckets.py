"""JSON files that map a bucket's name to its knobs: read with suspicion, merged with what is there."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, quoted
from gemmpipe.files.jsonfile import read_object
from gemmpipe.paths import write_atomic

SIZES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "NUM_KSPLIT", "SPLIT_K", "num_warps")
"""Knobs that are whole numbers from 1."""
COUNTS = ("num_stages", "waves_per_eu", "kpack", "matrix_instr_nonkdim")
"""Knobs that are whole numbers from 0, which leaves the choice to the compiler."""
MOST = 2**16
"""More than any knob is; a tile of more rows or columns fits no device."""

Buckets = dict[str, dict[str, Scalar]]
"""Bucket -> knob -> value."""


def read_buckets(path: Path, ignored: Sequence[str] = (), optional: Sequence[str] = ()) -> Buckets:
    """The buckets of a file, without the `ignored` names, and without `optional` knobs that are null.

    Raises UserError: file, bucket, knob, what was expected.
    """
    found: Buckets = {}
    buckets = read_object(path)
    if not buckets:
        raise UserError(f"{path}: an empty object, expected a name of a bucket or an M, and its knobs")
    for bucket, knobs in buckets.items():
        if bucket in ignored:
            continue
        if not isinstance(knobs, dict) or not knobs:
            raise UserError(
                f"{path}: {quoted(bucket)}: expected an object of knobs; mend or delete the file, it was not touched"
            )
        given = {knob: value for knob, value in knobs.items() if value is not None or knob not in optional}
        for knob, value in given.items():
            check_knob(knob, value, f"{path}: {quoted(bucket)}")
        found[bucket] = given
    return found


def check_knob(knob: str, value: object, where: str) -> None:
    """Raise UserError that begins with `where` for what no kernel can take as the value of this knob."""
    if not (value is None or isinstance(value, str | int | float)):
        raise UserError(f"{where}: {quoted(knob)}: expected one value; mend or delete the file")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {quoted(knob)}: {quoted(value)}, expected a finite number")
    least, most = (1, MOST) if knob in SIZES else (0, MOST) if knob in COUNTS else (-MOST, MOST)
    if knob in (*SIZES, *COUNTS) and type(value) is not int:
        raise UserError(f"{where}: {knob}: {quoted(value)}, expected a whole number from {least} to {most}")
    if isinstance(value, int) and not least <= value <= most:
        raise UserError(f"{where}: {quoted(knob)}: {quoted(value)}, expected a whole number from {least} to {most}")


def render_buckets(buckets: Mapping[str, Mapping[str, Scalar]]) -> str:
    """The file's text: indented by 4, buckets in the order given."""
    return json.dumps(buckets, indent=4) + "\n"


def merge_into(
    path: Path, new: Mapping[str, Mapping[str, Scalar]], old: Buckets, order: Mapping[str, float]
) -> Buckets:
    """Write `old` with `new` put in, sorted by `order` (buckets not in it last); returns what stands there now.

    The caller has read `old` and holds the lock. Raises OSError with the old file untouched.
    """
    merged: Buckets = {**old, **{name: dict(knobs) for name, knobs in new.items()}}
    ordered = {name: merged[name] for name in sorted(merged, key=lambda name: order.get(name, float("inf")))}
    write_atomic(path, render_buckets(ordered))
    return ordered
