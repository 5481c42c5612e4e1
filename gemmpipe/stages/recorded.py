"""What a tuned table says of its winners, held against the kernels as they are here and now."""

import json
from collections.abc import Iterable

from gemmpipe.errors import UserError
from gemmpipe.family import Family, Implementation
from gemmpipe.merging import Row

_ODD = (UserError, KeyError, TypeError, ValueError, ArithmeticError)
"""What knobs that nobody checked can raise."""


def implementation_of(label: str, family: Family, implementations: Iterable[Implementation]) -> Implementation | None:
    """Who computes candidates of this `libtype` in this run, else the family's own kernel of that label."""
    return next((i for i in (*implementations, *family.implementations) if i.label == label), None)


def hash_of_row(row: Row) -> str:
    """The hash of the kernel's source that a row was tuned with; empty for libraries."""
    return str(row.get("kernelName") or "").partition("@")[2]


def changed(family: Family, implementations: Iterable[Implementation], row: Row) -> bool:
    """Whether the kernel that a row names has another source here; False where nobody can tell."""
    before = hash_of_row(row)
    implementation = implementation_of(str(row.get("libtype")), family, implementations)
    if not before or implementation is None:
        return False
    try:
        name = implementation.kernel_name(json.loads(str(row.get("config") or "{}")))
    except _ODD:
        return False
    return name.partition("@")[2] != before
