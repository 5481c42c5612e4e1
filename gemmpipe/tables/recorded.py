"""What a row of a tuned table says of its winner, held against the kernels and libraries that are installed."""

import json

from gemmpipe.core.data import Candidate, Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.guard import describe_error
from gemmpipe.launch.source_hash import same_kernel
from gemmpipe.tables.merge import Row


class UnusableRow(Exception):
    """Why a stored candidate does not run here; the first word says what kind of reason it is."""


class UnsupportedRow(UnusableRow):
    """It runs here, but does not compute this product."""


def candidate_of_row(
    implementation: Implementation, row: Row, spec: GemmSpec, device: Device, plain: Knobs | None = None
) -> Candidate:
    """The candidate of a row for this product and device; `plain` are the knobs of a row that states none.

    Raises Unusable: knobs that are none, a kernel whose source is another one now, or a rule that the knobs break.
    """
    label = implementation.label
    stored = _stored_knobs(row, label)
    if stored is None:
        meant = implementation.knobs_from_row(row, spec, device)
        stored = plain if meant is None else meant
    if stored is None:
        raise UnusableRow(f"knobs: the row of {label} has no config, and says too little without")
    try:
        known = implementation.knob_names(spec, device)
        if unknown := [name for name in stored if known is not None and name not in known]:
            raise UnusableRow(f"knobs: {label} has no {', '.join(unknown)}")
        knobs = implementation.normalise(spec, stored, device)
        name = implementation.kernel_name(knobs)
        reason = implementation.unsupported_reason(spec, knobs, device)
    except UnusableRow:
        raise
    except Exception as error:  # noqa: BLE001 - nobody checked these knobs, and the code may be the user's
        raise UnusableRow(f"knobs: {label}: {describe_error(implementation, error)}") from None
    before, now = source_hash_of(row), name.partition("@")[2]
    if before and not same_kernel(before, now):
        raise UnusableRow(f"kernel: its source or library is {now or 'not known'} here, {before} was tuned")
    if reason:
        raise UnsupportedRow(f"misfit: {reason}")
    return Candidate.of(label, knobs)


def libtype_of(row: Row, family: Family) -> str:
    """The `libtype` of a row; of aiter's rows without one what aiter means."""
    said = str(row.get("libtype") or "")
    return said if said or row.get("config") or family.aiter_table is None else family.aiter_table.library(row)


def source_hash_of(row: Row) -> str:
    """The hash of the kernel's source that a row was tuned with; empty for libraries."""
    return str(row.get("kernelName") or "").partition("@")[2]


def kernel_changed(implementation: Implementation, row: Row) -> bool:
    """Whether the kernel that a row names has another source here; False where nobody can tell."""
    try:
        name = implementation.kernel_name(_stored_knobs(row, implementation.label) or {})
    except Exception:  # noqa: BLE001 - the same
        return False
    return bool(source_hash_of(row)) and not same_kernel(source_hash_of(row), name.partition("@")[2])


def _stored_knobs(row: Row, label: str) -> Knobs | None:
    """The knobs that the row states, or None for a row of another program's."""
    text = row.get("config")
    if isinstance(text, str) and text:
        knobs = json.loads(text)
        if isinstance(knobs, dict):
            return knobs
        raise UnusableRow(f"knobs: {text[:40]!r} of {label} is no JSON object")
    return None
