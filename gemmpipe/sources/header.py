"""Column and family names of a table that are nearly what they should be: said, instead of passed over in silence."""

from collections.abc import Sequence

from gemmpipe.errors import UserError, nearest, one_letter_apart
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.sources.products import OTHER

MARKS = ("op", "layout")
"""Columns of a capture that say how torch was called."""
_OWN = ("family", "weight", "count", "layer")
_PLACE = ("gfx", "cu_num")
_SHORT = 3  # any letter is nearly M


def capture_columns() -> tuple[str, ...]:
    """`family`, the key columns of all shipped families, how torch was called, `count`, `layer`."""
    keys = [column.name for name in shipped_families() for column in load_family(name).key_columns]
    return (*dict.fromkeys(("family", *keys)), *MARKS, "count", "layer")


def check_header(header: Sequence[str], family: Family, where: str) -> None:
    """Raises UserError for a column one letter away from one that is read, and in a capture for any unknown one."""
    mine = {name for column in family.key_columns for name in (column.name, *column.aliases)} | {*_OWN}
    known = {name.lower() for name in (*mine, *capture_columns(), *_PLACE)}
    captured = "family" in header or set(MARKS) <= set(header)
    for name in header:
        if name.lower() in known:
            continue
        close = [each for each in mine if len(each) > _SHORT and one_letter_apart(name.lower(), each.lower())]
        if close or captured:
            raise UserError(f"{where}: no such column '{name}'{nearest(name, close or known)}")


def check_family(word: str, wanted: str, where: str) -> None:
    """Raises UserError for a family that is none and nearly the wanted one."""
    if word != OTHER and word not in shipped_families() and one_letter_apart(word, wanted):
        raise UserError(f"{where}: column family: '{word}'{nearest(word, [wanted])}")
