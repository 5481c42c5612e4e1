"""The source interface, a provider of problems, and checks of tables for another family or misspelt columns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import NotComputed, UserError, one_letter_apart, suggest_or_list
from gemmpipe.core.schema import DEVICE_COLUMNS
from gemmpipe.engines.launch import ServerArguments
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family, shipped_families
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.family.problem import check_routing, locate_key_columns, make_problem, parse_dtype
from gemmpipe.sources.products import UNSUPPORTED
from gemmpipe.tables.file_names import family_of_file_name


class Source(ABC):
    """A provider of problems; constructing it reads nothing."""

    counts_calls: ClassVar[bool] = False
    """True if weights are numbers of calls that a program made, so that their sums are times of that program."""

    @abstractmethod
    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: file, row, column, what was expected."""

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """A clause on products of other kernels in the source, for the user; empty if there are none."""
        return ""

    def assumed(self, gfx: str) -> str:
        """A clause on what the problems assume about the device, for the user; empty if nothing."""
        return ""

    def recorded_us(self, family: Family, defaults: KernelDefaults, gfx: str) -> Mapping[str, float]:
        """Problem id -> the total time (us) of all its calls, where the source has it."""
        return {}

    def engine_libraries(self, family: Family, defaults: KernelDefaults, gfx: str) -> tuple[str, ...]:
        """The labels of the backends that time the own libraries of the engine that the problems are for."""
        return ()

    def server(self) -> ServerArguments | None:
        """The server that the problems are for, if they are those of one."""
        return None


OPERATOR_COLUMNS = ("op", "layout")
"""Columns of a capture that record how torch was called."""
_CAPTURE_COLUMNS = ("family", "weight", "count", "layer")
_MIN_LETTERS = 3  # any single letter is one letter away from M


def capture_columns() -> tuple[str, ...]:
    """`family`, the key columns of all shipped families, how torch was called, `count`, `layer`."""
    keys = [column.name for name in shipped_families() for column in load_family(name).key_columns]
    return (*dict.fromkeys(("family", *keys)), *OPERATOR_COLUMNS, "count", "layer")


def check_header(header: Sequence[str], family: Family, where: str) -> None:
    """Raises UserError for a column one letter away from a known one, and in a capture for any unknown one."""
    own = {name for column in family.key_columns for name in (column.name, *column.aliases)} | {*_CAPTURE_COLUMNS}
    known = {name.lower() for name in (*own, *capture_columns(), *DEVICE_COLUMNS)}
    captured = "family" in header or set(OPERATOR_COLUMNS) <= set(header)
    for name in header:
        if name.lower() in known:
            continue
        close = [each for each in own if len(each) > _MIN_LETTERS and one_letter_apart(name.lower(), each.lower())]
        if close or captured:
            raise UserError(f"{where}: no such column '{name}'{suggest_or_list(name, close or known)}")


def check_family(name: str, expected: str, where: str) -> None:
    """Raises UserError for an unknown family that is one letter away from the expected one."""
    if name != UNSUPPORTED and name not in shipped_families() and one_letter_apart(name, expected):
        raise UserError(f"{where}: column family: '{name}'{suggest_or_list(name, [expected])}")


def check_file_family(path: Path, wanted: str, family: Family) -> None:
    """Raises UserError for a file with the name of another shipped family's lists or tables.

    The user's own families accept any name.
    """
    file_family = family_of_file_name(path.name, _families())
    if file_family not in (None, wanted) and family.name in _families():
        raise UserError(
            f"kernel={family.name}: {path} is a list of {file_family} by its name; expected kernel={file_family}, "
            f"or shapes.rows_of={file_family} to use its rows anyway"
        )


def foreign_sizes(header: Sequence[str], family: Family) -> tuple[int, ...]:
    """The indices of columns with sizes of other families' products that this family does not have."""
    own = {name.lower() for column in family.key_columns for name in (column.name, *column.aliases)}
    sizes = {name for other in _families().values() for name in _sizes(other)}
    return tuple(index for index, name in enumerate(header) if name.lower() in sizes - own)


def check_sizes(row: Sequence[str], foreign: Sequence[int], header: Sequence[str], family: Family, where: str) -> None:
    """Raises UserError for a row with sizes of another family: without them it would be another product."""
    for index in foreign:
        if row[index] not in ("", "1"):
            column = header[index]
            of = " or ".join(name for name, other in _families().items() if column.lower() in _sizes(other))
            raise UserError(
                f"{where}: column {column}: {row[index]}, which {family.name} does not have; expected kernel={of}"
            )


_NO_DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)
_FORMATS: Mapping[str, Callable[[GemmSpec], object]] = {
    "bias": lambda spec: spec.bias,
    "scaleab": lambda spec: spec.x_scale is not None,
    "bpreshuffle": lambda spec: spec.w_layout != ROW_MAJOR,
    "granularity": lambda spec: None if spec.w_scale is None else spec.w_scale.granularity,
    "dtype": lambda spec: spec.x_dtype,
    "q_dtype_a": lambda spec: spec.x_dtype,
    "q_dtype_w": lambda spec: spec.w_dtype,
}
"""Columns of a product's format in lower case, and what a product has there."""


def foreign_formats(header: Sequence[str], family: Family) -> tuple[int, ...]:
    """The indices of columns with formats of other families' products that this family's key does not have."""
    own = {name.lower() for column in family.key_columns for name in (column.name, *column.aliases)}
    return tuple(index for index, name in enumerate(header) if name.lower() in _FORMATS.keys() - own)


def check_formats(
    row: Sequence[str], foreign: Sequence[int], header: Sequence[str], family: Family, problem: Problem, where: str
) -> None:
    """Raises NotComputed for a row with another format than the family's product, such as a bias.

    A false flag has no meaning: lists of aiter have all flags.
    """
    spec = family.spec(problem) if foreign else None
    for index in foreign:
        name, cell = header[index].lower(), row[index].strip()
        if spec is None or cell.lower() in ("", "false", "0"):
            continue
        has = _FORMATS[name](spec)
        given: object = cell.lower() in ("true", "1") if isinstance(has, bool) else _dtype_or_text(cell)
        if given != has:
            raise NotComputed(f"{where}: column {header[index]}: {cell}, which {family.name} does not compute")


def families_of_row(cells: Mapping[str, str], gfx: str) -> list[str]:
    """The shipped families that compute the product of a row with these cells, by the header."""
    header, row = list(cells), list(cells.values())
    found = []
    for name, family in _families().items():
        try:
            columns = locate_key_columns(header, family, "row")
            check_sizes(row, foreign_sizes(header, family), header, family, "row")
            values = {column: row[index] for column, index in columns.items()}
            problem = make_problem(family, values, _NO_DEFAULTS, gfx, "row")
            check_formats(row, foreign_formats(header, family), header, family, problem, "row")
            check_routing(family, problem, values, _NO_DEFAULTS, "row")
        except UserError:
            continue
        found.append(name)
    return found


def _dtype_or_text(cell: str) -> str:
    try:
        return parse_dtype(cell, "")
    except UserError:
        return cell


def _sizes(family: Family) -> set[str]:
    """The lower-case names of the columns with the sizes of its products."""
    sizing = [column for column in family.key_columns if column.kind == "int" and column.default is None]
    return {name.lower() for column in sizing for name in (column.name, *column.aliases)}


@cache
def _families() -> Mapping[str, Family]:
    return {name: load_family(name) for name in shipped_families()}
