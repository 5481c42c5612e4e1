"""The cells of tuned tables: a parser per column, which checks its values and their ranges."""

import math
from collections.abc import Callable

from gemmpipe.core.data import ARCH_PATTERN, Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.core.files import is_formula, parse_object
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family
from gemmpipe.family.problem import MAX_SIZE, parse_bounded_int, parse_int, parse_key_value, parse_name, parse_number

_FLOATS = {
    "err_ratio": (0.0, 1.0),
    **dict.fromkeys(("tflops", "bw", "ratio", "ratio_low", "ratio_high"), (0.0, math.inf)),
    **dict.fromkeys(("baseline_us", "p20_us", "p80_us"), (0.0, 1e12)),
}
"""Columns of numbers with their lowest and highest value; times in microseconds."""
_INTS = {"solidx": (-(2**63), 2**63 - 1), "splitK": (0, 2**16), "near_ties": (0, MAX_SIZE)}
_MAX_RATIO = 1e9  # of two times
_UNTIMED = (-1.0, 0.0)
"""Values of `us` that tuners write for a candidate that they did not time, in addition to nothing, `inf`, `nan`."""


class CellParser(dict[str, Scalar]):
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
            # Tables have full names of dtypes: `fp8` would need the row's gfx to know which one is meant.
            return lambda text: parse_key_value(key, text, "")
    if column == "gfx":
        return _gfx
    if column == "cu_num":
        return parse_int
    if column == "us":
        return _time_us
    if column == "err_ratio":
        return _fraction
    if column in _FLOATS:
        return lambda text: parse_number(text, *_FLOATS[column])
    if column in _INTS:
        return lambda text: parse_bounded_int(text, *_INTS[column])
    if column == "config":
        return _config
    if column == "backend_ratios":
        return _ratios
    return parse_name if column in RESULT else _comment


def _gfx(text: str) -> str:
    if not ARCH_PATTERN.fullmatch(text):
        raise UserError(f"{quoted_repr(text)}, expected an architecture such as gfx942, sm_90 or cpu_avx2")
    return text


def _time_us(text: str) -> float | None:
    """None for `inf` and `nan`; -1 and 0 stay, `store.is_timed` treats them as not timed."""
    if text.lower() in ("inf", "+inf", "nan"):
        return None
    value = parse_number(text)
    if value < 0 and value not in _UNTIMED:
        raise UserError(
            f"{quoted_repr(text)}, expected microseconds above 0, or -1, 0, inf, nan or nothing for not timed"
        )
    return value


def _fraction(text: str) -> float:
    """aiter writes the errors of fused MoE as `0.3%`."""
    value = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise UserError(f"{quoted_repr(text)}, expected a fraction from 0 to 1, or 0% to 100%")
    return value


def _comment(text: str) -> str | None:
    """The text of a foreign column; None for text that a spreadsheet would run as a formula."""
    return None if is_formula(text) else text


def _config(text: str) -> str:
    return _object_text(text, "config", "the knobs", lambda knob: not isinstance(knob, dict | list))


def _ratios(text: str) -> str:
    return _object_text(text, "backend_ratios", "ratios by backend", _is_ratio)


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 / _MAX_RATIO < value < _MAX_RATIO


def _object_text(text: str, column: str, content: str, fits: Callable[[object], bool]) -> str:
    """The text of a JSON object whose values fit."""
    expected = UserError(f"{quoted_repr(text)}, expected {content} as a JSON object")
    try:
        value = parse_object(text, column)
    except UserError:
        raise expected from None
    if not all(map(fits, value.values())):
        raise expected
    return text
