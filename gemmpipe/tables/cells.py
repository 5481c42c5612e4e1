"""What the cells of a tuned table's columns mean, by column."""

import math
from collections.abc import Callable

from gemmpipe.data import ARCHITECTURE, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family
from gemmpipe.files.jsonfile import parse_object
from gemmpipe.parsing import parse_int, parse_key

_FLOATS = ("us", "err_ratio", "tflops", "bw", "baseline_us", "p20_us", "p80_us", "ratio_low", "ratio_high")
_INTS = ("solidx", "splitK", "near_ties")


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
    if column in _FLOATS:
        return _float
    if column in _INTS:
        return _int
    return _config if column == "config" else str


def _gfx(text: str) -> str:
    if not ARCHITECTURE.fullmatch(text):
        raise UserError(f"{text!r}, expected an architecture such as gfx942, sm_90 or cpu_avx2")
    return text


def _float(text: str) -> float:
    try:
        # aiter writes the errors of fused MoE as "0.3%".
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text!r}, expected a number")
    return value


def _int(text: str) -> int:
    try:
        return int(text.removesuffix(".0"))
    except ValueError:
        raise UserError(f"{text!r}, expected a whole number") from None


def _config(text: str) -> str:
    expected = f"{text[:60]!r}, expected the knobs as a JSON object"
    try:
        value = parse_object(text, "config")
    except UserError:
        raise UserError(expected) from None
    if any(isinstance(knob, dict | list) for knob in value.values()):
        raise UserError(expected)
    return text
