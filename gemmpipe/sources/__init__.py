"""What a source is: where problems come from.

What a table says of its family, and what nearly says it: told, instead of passed over in silence.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError, one_letter_apart, suggest_or_list
from gemmpipe.family import Family, KernelDefaults, load_family, shipped_families
from gemmpipe.sources.products import UNSUPPORTED
from gemmpipe.tables.file_names import family_of_file_name


class Source(ABC):
    """A provider of problems; constructing it reads nothing."""

    @abstractmethod
    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: file, row, column, what was expected."""

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """What it holds beside these problems, for other kernels; a clause for the reader, or nothing."""
        return ""

    def recorded_us(self, family: Family, defaults: KernelDefaults, gfx: str) -> Mapping[str, float]:
        """By problem id, the time that all calls took together, where the source knows it."""
        return {}


OPERATOR_COLUMNS = ("op", "layout")
"""Columns of a capture that say how torch was called."""
_CAPTURE_COLUMNS = ("family", "weight", "count", "layer")
_DEVICE_COLUMNS = ("gfx", "cu_num")
_MIN_LETTERS = 3  # any letter is nearly M


def capture_columns() -> tuple[str, ...]:
    """`family`, the key columns of all shipped families, how torch was called, `count`, `layer`."""
    keys = [column.name for name in shipped_families() for column in load_family(name).key_columns]
    return (*dict.fromkeys(("family", *keys)), *OPERATOR_COLUMNS, "count", "layer")


def check_header(header: Sequence[str], family: Family, where: str) -> None:
    """Raises UserError for a column one letter away from one that is read, and in a capture for any unknown one."""
    mine = {name for column in family.key_columns for name in (column.name, *column.aliases)} | {*_CAPTURE_COLUMNS}
    known = {name.lower() for name in (*mine, *capture_columns(), *_DEVICE_COLUMNS)}
    captured = "family" in header or set(OPERATOR_COLUMNS) <= set(header)
    for name in header:
        if name.lower() in known:
            continue
        close = [each for each in mine if len(each) > _MIN_LETTERS and one_letter_apart(name.lower(), each.lower())]
        if close or captured:
            raise UserError(f"{where}: no such column '{name}'{suggest_or_list(name, close or known)}")


def check_family(word: str, wanted: str, where: str) -> None:
    """Raises UserError for a family that is none and nearly the wanted one."""
    if word != UNSUPPORTED and word not in shipped_families() and one_letter_apart(word, wanted):
        raise UserError(f"{where}: column family: '{word}'{suggest_or_list(word, [wanted])}")


def check_file_family(path: Path, wanted: str, family: Family) -> None:
    """Raises UserError for a file whose name is that of another shipped family's lists or tables.

    A family of the user's own takes any.
    """
    told = family_of_file_name(path.name, _families())
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
