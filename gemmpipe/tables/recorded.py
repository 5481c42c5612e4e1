"""The winner of a tuned table's row, checked against the kernels and libraries that are installed."""

import json

from gemmpipe.core.data import Candidate, Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.guard import describe_error
from gemmpipe.launch.source_hash import same_kernel
from gemmpipe.tables.merge import Row


class UnusableRow(Exception):
    """The reason why a stored candidate does not run here; it begins with the kind: `knobs`, `kernel`, ..."""


class UnsupportedRow(UnusableRow):
    """The candidate runs here, but does not compute this product."""


def candidate_of_row(implementation: Implementation, row: Row, spec: GemmSpec, device: Device) -> Candidate:
    """The candidate of a row for this product and device.

    Rows of another program have no knobs of ours: the implementation reads their other columns (`knobs_from_row`).
    Raises UnusableRow for invalid knobs and a kernel with changed source, UnsupportedRow for a constraint that the
    knobs violate.
    """
    label = implementation.label
    stored = _stored_knobs(row, label)
    if stored is None:
        stored = implementation.knobs_from_row(row, spec, device)
    if stored is None:
        raise UnusableRow(f"knobs: the row of {label} has no config, and its other columns do not determine one")
    try:
        known = implementation.knob_names(spec, device)
        if unknown := [name for name in stored if known is not None and name not in known]:
            raise UnusableRow(f"knobs: {label} has no {', '.join(unknown)}")
        knobs = implementation.normalise(spec, stored, device)
        name = implementation.kernel_name(knobs)
        reason = implementation.unsupported_reason(spec, knobs, device)
    except UnusableRow:
        raise
    except Exception as error:  # noqa: BLE001 - these knobs are unchecked, and the code may be the user's
        raise UnusableRow(f"knobs: {label}: {describe_error(implementation, error)}") from None
    before, now = source_hash_of(row), name.partition("@")[2]
    if before and not same_kernel(before, now):
        raise UnusableRow(f"kernel: its source or library is {now or 'unknown'} here, the row was tuned with {before}")
    if reason:
        raise UnsupportedRow(f"unsupported: {reason}")
    return Candidate.of(label, knobs)


def libtype_of(row: Row, family: Family) -> str:
    """The `libtype` of a row; for aiter's rows without one, the library that aiter infers."""
    libtype = str(row.get("libtype") or "")
    return libtype if libtype or row.get("config") or family.aiter_table is None else family.aiter_table.library(row)


def source_hash_of(row: Row) -> str:
    """The hash of the kernel's source that a row was tuned with; empty for libraries."""
    return str(row.get("kernelName") or "").partition("@")[2]


def kernel_changed(implementation: Implementation, row: Row) -> bool:
    """True if the row's kernel has another source here; False where that is unknown."""
    try:
        name = implementation.kernel_name(_stored_knobs(row, implementation.label) or {})
    except Exception:  # noqa: BLE001 - as in candidate_of_row
        return False
    return bool(source_hash_of(row)) and not same_kernel(source_hash_of(row), name.partition("@")[2])


def _stored_knobs(row: Row, label: str) -> Knobs | None:
    """The row's knobs, or None for a row of another program."""
    text = row.get("config")
    if isinstance(text, str) and text:
        knobs = json.loads(text)
        if isinstance(knobs, dict):
            return knobs
        raise UnusableRow(f"knobs: {text[:40]!r} of {label} is not a JSON object")
    return None
