"""JSON files that map a bucket's name to its knobs: read with suspicion, merged with what is there."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError
from gemmpipe.files.jsonfile import read_object
from gemmpipe.paths import write_atomic

Buckets = dict[str, dict[str, Scalar]]
"""Bucket -> knob -> value."""


def read_buckets(path: Path, ignored: Sequence[str] = ()) -> Buckets:
    """The buckets of a file, the `ignored` names left out. Raises UserError: file, bucket, knob, what was expected."""
    found: Buckets = {}
    for bucket, knobs in read_object(path).items():
        if bucket in ignored:
            continue
        if not isinstance(knobs, dict) or not knobs:
            raise UserError(
                f"{path}: '{bucket}': expected an object of knobs; mend or delete the file, it was not touched"
            )
        for knob, value in knobs.items():
            if isinstance(value, dict | list):
                raise UserError(f"{path}: '{bucket}': {knob}: expected one value; mend or delete the file")
        found[bucket] = dict(knobs)
    return found


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
