"""How many rows of a tuned table can answer on a device, and why the others cannot."""

from collections import Counter
from collections.abc import Iterable

from gemmpipe.data import Device
from gemmpipe.errors import UserError
from gemmpipe.family import Family
from gemmpipe.runtime.choosing import usable
from gemmpipe.tables.merging import Row
from gemmpipe.tables.recorded import Unusable


def runnable(family: Family, rows: Iterable[Row], device: Device) -> tuple[int, Counter[str]]:
    """(the rows whose candidate runs here, the reasons of the others by how often)."""
    count, reasons = 0, Counter[str]()
    for row in rows:
        reason = _reason(family, row, device)
        if reason:
            reasons[reason] += 1
        else:
            count += 1
    return count, reasons


def _reason(family: Family, row: Row, device: Device) -> str:
    place = (row["gfx"], row["cu_num"])
    if place != (device.gfx, device.cu_num):
        return f"for {place[0]}/{place[1]}, this is {device.gfx}/{device.cu_num}"
    try:
        problem = family.problem(tuple((c.name, row[c.name]) for c in family.key_columns))
        usable(family, row, family.spec(problem), device)
    except UserError as error:
        return str(error)
    except Unusable as reason:
        return str(reason)
    return ""
