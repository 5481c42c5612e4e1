"""The tuned rows that concern an engine's layers: those of a weight's sizes, and a digest of all tables in use.

Only rows with a candidate that reads the weight in the engine's own form count: engines replace weights in place
(reload, sleep mode) without a change that torch counts, so another form of a weight could be outdated.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import gemmpipe
from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import target_device
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_regular
from gemmpipe.family import Family, Implementation, load_family
from gemmpipe.plugins.scope import FAMILIES, unserved_reason
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.select import RunnableCandidate, first_usable, usable_candidate
from gemmpipe.runtime.tables import table_layers
from gemmpipe.tables.merge import Row
from gemmpipe.tables.recorded import UnusableRow

_MAX_TABLE_BYTES = 1_000_000_000
_KEPT_COPY = "_copy"
"""The end of torch's methods that keep a converted weight; its other methods keep nothing."""


def reads_weight_as_given(runnable: RunnableCandidate) -> bool:
    """True if the candidate multiplies by the engine's own weight and scales, without another form of them."""
    implementation, knobs = runnable.implementation, runnable.candidate.knobs
    if type(implementation).prepare is Implementation.prepare:
        return True
    return implementation.label == "torch" and not str(knobs.get("method", _KEPT_COPY)).endswith(_KEPT_COPY)


def usable_rows(family: Family, alternatives: Iterable[Row], device: Device) -> bool:
    """True if a call of an engine can use one of a key's rows on this device."""
    return any(
        found is not None and reads_weight_as_given(found[0])
        for found in (first_usable(family, (row,), device) for row in alternatives)
    )


def count_answering_rows(family: Family, rows: Iterable[Row]) -> tuple[int, Counter[str]]:
    """(number of rows with which a plug-in can compute a layer on the row's own device, number of others by reason)."""
    reasons = Counter(_unanswering_reason(family, row) for row in rows)
    return reasons.pop("", 0), reasons


def _unanswering_reason(family: Family, row: Row) -> str:
    """Why no layer of an engine is computed with the row; empty if one can be, with what is installed here."""
    gfx, units = str(row["gfx"]), row["cu_num"]
    if reason := unserved_reason(family.name, gfx):
        return reason
    try:
        device = replace(target_device(gfx), cu_num=int(str(units)))
        spec = family.spec(family.problem(tuple((c.name, row[c.name]) for c in family.key_columns)))
        found = usable_candidate(family, row, spec, device)
    except (UserError, UnusableRow) as reason:
        return str(reason)
    return "" if reads_weight_as_given(found) else f"{found.candidate.backend} keeps another form of the weight"


def has_rows(family: str, device: Device, wanted: Mapping[str, Scalar]) -> bool:
    """True if the tables have a usable row with these values, for any M."""
    dispatch = dispatch_of(family)
    rows = dispatch.tables().rows_with(device, dict(wanted))
    return any(usable_rows(dispatch.family, alternatives, device) for alternatives in rows)


def rows_text(family: str, device: Device, wanted: Mapping[str, Scalar] | None = None) -> str:
    """`90 rows for 5 sizes`: the tables' rows for this device with these values; empty if there is none.

    Whether their candidates run here is found out for each layer.
    """
    dispatch = dispatch_of(family)
    rows_column = dispatch.family.rows_column
    keys = [alternatives[0] for alternatives in dispatch.tables().rows_with(device, dict(wanted or {}))]
    names = [column.name for column in dispatch.family.key_columns if column.name != rows_column]
    sizes = {tuple(row[name] for name in names) for row in keys}
    return f"{len(keys)} rows for {len(sizes)} sizes" if keys else ""


def no_rows_reason(device: Device) -> str:
    """The reason if the tables have nothing for this device."""
    return f"no tuned rows for {device.gfx} with {device.cu_num} units"


@cache
def tables_digest(families: Sequence[str] = FAMILIES) -> str:
    """16 hexadecimal digits of gemmpipe's version and the contents of all tables in use, in their order.

    A compiled graph depends on them: a layer without rows has the engine's operator. Read once per process; a file
    that cannot be read counts as absent, as it does for the look-up.
    """
    digest = hashlib.sha256(gemmpipe.__version__.encode())
    for name in families:
        digest.update(f"\0{name}".encode())
        for path in (path for files in table_layers(load_family(name)) for path in files):
            try:
                content = read_regular(path, "a tuned table", _MAX_TABLE_BYTES)
            except (OSError, UserError):
                continue
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]
