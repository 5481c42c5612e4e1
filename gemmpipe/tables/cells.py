"""What the cells of a tuned table's columns mean, by column."""

import math
from collections.abc import Callable

from gemmpipe.data import ARCHITECTURE, Scalar
from gemmpipe.errors import UserError, quoted
from gemmpipe.family import Family
from gemmpipe.files.celltext import is_formula
from gemmpipe.files.jsonfile import parse_object
from gemmpipe.parsing import MAX_SIZE, parse_int, parse_key, parse_name, parse_number, parse_whole
from gemmpipe.table import RESULT

_FLOATS = {
    "err_ratio": (0.0, 1.0),
    **dict.fromkeys(("tflops", "bw", "ratio_low", "ratio_high"), (0.0, math.inf)),
    **dict.fromkeys(("baseline_us", "p20_us", "p80_us"), (0.0, 1e12)),
}
"""Columns of numbers with the least and the most that each can hold; times in microseconds."""
_INTS = {"solidx": (-(2**63), 2**63 - 1), "splitK": (0, 2**16), "near_ties": (0, MAX_SIZE)}
_UNTIMED = (-1.0, 0.0)
"""What tuners write into `us` for a candidate that they did not time, besides nothing, `inf` and `nan`."""


class Cells(dict[str, Scalar]):
    """The values of one column's cells, each distinct text parsed once: a table has many cells and few texts."""

    def __init__(self, column: str, family: Family) -> None:
        super().__init__({"": None})
        self._column = column
        self._parse = _parser(column, family)

    def __missing__(self, cell: str) -> Scalar:
        try:
            value = self[cell] = self._parse(cell)
        except UserError as error:
            raise UserError(f"column {self._column}: {error}") from None
        return value


def _parser(column: str, family: Family) -> Callable[[str], Scalar]:
    for key in family.key_columns:
        if key.name == column:
            # A table says its dtypes in full; should it say `fp8`, the row's gfx would be needed to know which.
            return lambda text: parse_key(key, text, "")
    if column == "gfx":
        return _gfx
    if column == "cu_num":
        return parse_int
    if column == "us":
        return _time_us
    if column == "err_ratio":
        return _share
    if column in _FLOATS:
        return lambda text: parse_number(text, *_FLOATS[column])
    if column in _INTS:
        return lambda text: parse_whole(text, *_INTS[column])
    if column == "config":
        return _config
    return parse_name if column in RESULT else _foreign


def _gfx(text: str) -> str:
    if not ARCHITECTURE.fullmatch(text):
        raise UserError(f"{quoted(text)}, expected an architecture such as gfx942, sm_90 or cpu_avx2")
    return text


def _time_us(text: str) -> float | None:
    """None for `inf` and `nan`; -1 and 0 stay, which `store.timed` takes for not timed too."""
    if text.lower() in ("inf", "+inf", "nan"):
        return None
    value = parse_number(text)
    if value < 0 and value not in _UNTIMED:
        raise UserError(f"{quoted(text)}, expected microseconds above 0, or -1, 0, inf, nan or nothing for not timed")
    return value


def _share(text: str) -> float:
    """aiter writes the errors of fused MoE as `0.3%`."""
    value = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise UserError(f"{quoted(text)}, expected a share from 0 to 1, or 0% to 100%")
    return value


def _foreign(text: str) -> str | None:
    """A comment of somebody else's is left out where it would be a formula in the table that is written."""
    return None if is_formula(text) else text


def _config(text: str) -> str:
    expected = f"{quoted(text)}, expected the knobs as a JSON object"
    try:
        value = parse_object(text, "config")
    except UserError:
        raise UserError(expected) from None
    if any(isinstance(knob, dict | list) for knob in value.values()):
        raise UserError(expected)
    return text
