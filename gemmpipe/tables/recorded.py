"""What a row of a tuned table says of its winner, held against the kernels and libraries that are installed."""

import json

from gemmpipe.asking import in_words
from gemmpipe.data import Candidate, Device, Knobs
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.tables.merging import Row


class Unusable(Exception):
    """Why a stored candidate does not run here; the first word says what kind of reason it is."""


class Misfit(Unusable):
    """It runs here, but does not compute this product."""


def recorded_candidate(
    implementation: Implementation, row: Row, spec: GemmSpec, device: Device, plain: Knobs | None = None
) -> Candidate:
    """The candidate of a row for this product and device; `plain` are the knobs of a row that states none.

    Raises Unusable: knobs that are none, a kernel whose source is another one now, or a rule that the knobs break.
    """
    label = implementation.label
    stored = _stored_knobs(row, label, plain)
    try:
        known = implementation.knob_names(spec, device)
        if unknown := [name for name in stored if known is not None and name not in known]:
            raise Unusable(f"knobs: {label} has no {', '.join(unknown)}")
        knobs = implementation.normalise(spec, stored, device)
        name = implementation.kernel_name(knobs)
        reason = implementation.misfit(spec, knobs, device)
    except Unusable:
        raise
    except Exception as error:  # noqa: BLE001 - nobody checked these knobs, and the code may be the user's
        raise Unusable(f"knobs: {label}: {in_words(implementation, error)}") from None
    before, now = hash_of(row), name.partition("@")[2]
    if before and before != now:
        raise Unusable(f"kernel: its source or library is {now or 'not known'} here, {before} was tuned")
    if reason:
        raise Misfit(f"misfit: {reason}")
    return Candidate.of(label, knobs)


def hash_of(row: Row) -> str:
    """The hash of the kernel's source that a row was tuned with; empty for libraries."""
    return str(row.get("kernelName") or "").partition("@")[2]


def kernel_changed(implementation: Implementation, row: Row) -> bool:
    """Whether the kernel that a row names has another source here; False where nobody can tell."""
    try:
        name = implementation.kernel_name(_stored_knobs(row, implementation.label, None))
    except Exception:  # noqa: BLE001 - the same
        return False
    return bool(hash_of(row)) and name.partition("@")[2] != hash_of(row)


def _stored_knobs(row: Row, label: str, plain: Knobs | None) -> Knobs:
    text = row.get("config")
    if isinstance(text, str) and text:
        knobs = json.loads(text)
        if isinstance(knobs, dict):
            return knobs
        raise Unusable(f"knobs: {text[:40]!r} is no JSON object")
    if plain is not None:
        return plain
    raise Unusable(f"knobs: the row of {label} has no config")
