"""Problems from CSV tables, untuned and tuned, ours and aiter's."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import NotComputed, UserError
from gemmpipe.core.files import named_files, read_cells
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.problem import check_routing, locate_key_columns, make_problem, merge_duplicates, parse_weight
from gemmpipe.family.routing import ROUTING
from gemmpipe.sources import (
    Source,
    check_family,
    check_file_family,
    check_formats,
    check_header,
    check_sizes,
    families_of_row,
    foreign_formats,
    foreign_sizes,
)
from gemmpipe.sources.routing_counts import SIZES, profiles, routing_file

_WEIGHTS = ("weight", "count")
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class CsvShapes(Source):
    """Tables with a column per part of the key; of the others only weight, count, layer and family are read.

    `path` is a file, a glob, or a list of these. Rows of another family than the kernel's (or `rows_of`) are left out;
    so are rows of formats that the kernel's family does not compute, which aiter's tables contain. With
    `skip_bad_rows` a row with an invalid cell is left out too, instead of an error.
    """

    path: str | Sequence[str] | None
    rows_of: str | None
    skip_bad_rows: bool = False
    counts_calls: ClassVar[bool] = True  # with a column of weights

    _refused: list[tuple[UserError, "_Row"]] = field(default_factory=list, init=False, repr=False, compare=False)
    _other_families: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    _captured: dict[tuple[str, tuple[int, ...]], str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: `file:row`, column, what was expected."""
        wanted = self.rows_of or family.name
        files = named_files("shapes.path", self.path)
        self._refused.clear()
        self._other_families.clear()
        self._captured.clear()
        found = [problem for path in files for problem in self._read(path, wanted, family, defaults, gfx)]
        if not found and self._refused:
            error, row = self._refused[0]
            raise UserError(f"{error}{_other_kernels(row, gfx)}")
        if not found:
            but = f", but {_count_text(self._other_families)}" if self._other_families else ""
            raise UserError(f"shapes.path: no problem of {wanted} in {', '.join(map(str, files))}{but}")
        return merge_duplicates(found)

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """The calls of other families' rows; the number of other rows left out, with the reason of the first."""
        count = len(self._refused)
        refused = f"{count} row{'s' * (count != 1)}, the first: {self._refused[0][0]}" if count else ""
        return "; ".join(part for part in (_count_text(self._other_families), refused) if part)

    def assumed(self, gfx: str) -> str:
        """The captured routings of the problems: their file, and the busiest expert's load of each."""
        busiest = list(dict.fromkeys(self._captured.values()))
        if not busiest:
            return ""
        more = ", ..." if len(busiest) > _MAX_NAMED else ""
        loads = f"{', '.join(busiest[:_MAX_NAMED])}{more}"
        files = ", ".join(dict.fromkeys(name for name, _ in self._captured))
        return f"routing as captured ({files}): {loads}; kernel.key.routing= sets another"

    def _read(self, path: Path, wanted: str, family: Family, defaults: KernelDefaults, gfx: str) -> Iterator[Problem]:
        routed = any(column.condition for column in family.key_columns) and not defaults.key.get(ROUTING)
        captured = profiles(path) if routed else {}
        for row in _rows(path, wanted, family, self._other_families):
            values = row.values
            if captured and not values.get(ROUTING):
                sizes = tuple(int(values[name]) for name in SIZES if values.get(name, "").isdigit())
                profile = captured.get(sizes, "")
                values = {**values, ROUTING: profile}
                if profile:
                    load = f"busiest of {values['expert']} experts {profile.partition('/')[0]} times the mean"
                    self._captured[routing_file(path).name, sizes] = load
            try:
                problem = make_problem(family, values, defaults, gfx, row.where, weight=row.weight, layer=row.layer)
                row.check(problem)
                check_routing(family, problem, values, defaults, row.where)
                yield problem
            except UserError as error:
                if str(error).startswith("kernel.key."):  # of no row
                    raise
                if not (self.skip_bad_rows or isinstance(error, NotComputed)):
                    raise UserError(f"{error}{_other_kernels(row, gfx)}") from None
                self._refused.append((error, row))


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the wanted family."""

    where: str
    """`file:row`."""
    values: Mapping[str, str]
    """The cells of the key."""
    weight: float
    layer: str
    check: Callable[[Problem], None]
    """Raises NotComputed for a problem that contradicts other cells."""
    cells: Mapping[str, str]
    """All cells by the header."""


def _other_kernels(row: _Row, gfx: str) -> str:
    """The clause "; the row is one of kernel=x" with the families that compute this row, or ""."""
    names = families_of_row(row.cells, gfx)
    several = " ..." if len(names) > _MAX_NAMED else ""
    return f"; the row is one of kernel={' or '.join(names[:_MAX_NAMED])}{several}" if names else ""


def _count_text(others: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(others.items()))


def _rows(path: Path, wanted: str, family: Family, others: Counter[str]) -> Iterator[_Row]:
    """The rows of that family; those of other families are counted."""
    lines = read_cells(path)
    _, header = next(lines, (1, []))
    columns = locate_key_columns(header, family, f"{path}:1")
    check_header(header, family, f"{path}:1")
    if "family" not in header:
        check_file_family(path, wanted, family)
    foreign = foreign_sizes(header, family)
    formats = foreign_formats(header, family) if wanted == family.name else ()
    extra = {name.lower(): index for index, name in reversed(list(enumerate(header)))}
    weight_at = next((extra[name] for name in _WEIGHTS if name in extra), None)
    for line, row in lines:
        where = f"{path}:{line}"
        if len(row) != len(header):
            raise UserError(f"{where}: {len(row)} cells, expected {len(header)} as in the header")
        weight = row[weight_at] if weight_at is not None else ""
        try:
            number = parse_weight(weight) if weight else 1.0
        except UserError as error:
            raise UserError(f"{where}: column {header[weight_at or 0]}: {error}") from None
        if "family" in extra and row[extra["family"]] not in ("", wanted):
            check_family(row[extra["family"]], wanted, where)
            others[row[extra["family"]]] += round(number)
            continue
        check_sizes(row, foreign, header, family, where)
        layer = row[extra["layer"]] if "layer" in extra else ""
        check = partial(check_formats, row, formats, header, family, where=where)
        values = {name: row[index] for name, index in columns.items()}
        cells = dict(zip(header, row, strict=True))
        yield _Row(where=where, values=values, weight=number, layer=layer, check=check, cells=cells)
