"""What a table says of its family, and what nearly says it: told, instead of passed over in silence."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gemmpipe.errors import UserError, nearest, one_letter_apart
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.sources.products import OTHER
from gemmpipe.tables.names import told_by_name

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


def check_name(path: Path, wanted: str, family: Family) -> None:
    """Raises UserError for a file whose name is that of another shipped family's lists or tables.

    A family of the user's own takes any.
    """
    told = told_by_name(path.name, _families())
    if told not in (None, wanted) and family.name in _families():
        raise UserError(
            f"kernel={family.name}: {path} is by its name a list of {told}; expected kernel={told}, "
            f"or shapes.rows_of={told} to take its rows all the same"
        )


def foreign_sizes(header: Sequence[str], family: Family) -> tuple[int, ...]:
    """The places of columns that size other families' products and are none of this family's."""
    mine = {name.lower() for column in family.key_columns for name in (column.name, *column.aliases)}
    sizes = {name for other in _families().values() for name in _sizes(other)}
    return tuple(place for place, name in enumerate(header) if name.lower() in sizes - mine)


def check_sizes(row: Sequence[str], foreign: Sequence[int], header: Sequence[str], family: Family, where: str) -> None:
    """Raises UserError for a row of another family's sizes: without them it would be another product."""
    for place in foreign:
        if row[place] not in ("", "1"):
            column = header[place]
            of = " or ".join(name for name, other in _families().items() if column.lower() in _sizes(other))
            raise UserError(
                f"{where}: column {column}: {row[place]}, which {family.name} does not have; kernel={of} has"
            )


def _sizes(family: Family) -> set[str]:
    """The names in lower case of the columns that size its products."""
    sizing = [column for column in family.key_columns if column.kind == "int" and column.default is None]
    return {name.lower() for column in sizing for name in (column.name, *column.aliases)}


@cache
def _families() -> Mapping[str, Family]:
    return {name: load_family(name) for name in shipped_families()}
