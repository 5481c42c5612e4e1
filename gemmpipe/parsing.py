"""From what a table, a list or a model says to the value of a key column."""

import math
from collections.abc import Sequence

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, closest, nearest, quoted, shortened
from gemmpipe.family import KeyColumn
from gemmpipe.files.celltext import is_formula, is_number
from gemmpipe.operand_types import native_fp8

MAX_SIZE = 2**31 - 1
"""Kernels index sizes with 32 bits."""

DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
    "int8",
    "int4",
    "int32",
    "uint8",
)

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "e4m3fn": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn_x2",
    "fp4x2": "float4_e2m1fn_x2",
    "mxfp4": "float4_e2m1fn_x2",
    "i8": "int8",
    "i4": "int4",
}
_FP8 = ("fp8", "float8", "fp8_e4m3", "e4m3", "float8_e4m3")
"""Names that mean the chip's own e4m3."""

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_dtype(value: object, gfx: str) -> str:
    """Torch's name without `torch.`; `fp8` is the architecture's own e4m3. Raises UserError (what was expected)."""
    word = str(value).strip().removeprefix("torch.").lower()
    if word in _FP8:
        return native_fp8(gfx)
    name = _ALIASES.get(word, word)
    if name not in DTYPES:
        known = (*DTYPES, *_ALIASES, "fp8")
        raise UserError(f"{quoted(value)}, expected a dtype such as bfloat16{nearest(shortened(word), known)}")
    return name


def parse_bool(value: object) -> bool:
    """True/False, TRUE/FALSE, 1/0, yes/no. Raises UserError (what was expected)."""
    word = str(value).strip().lower()
    if word not in _BOOLS:
        raise UserError(f"{quoted(value)}, expected True or False")
    return _BOOLS[word]


def parse_int(value: object) -> int:
    """A whole number from 1 to 2^31 - 1; a bool is none. Raises UserError (what was expected)."""
    expected = UserError(f"{quoted(value)}, expected a whole number from 1 to {MAX_SIZE}")
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise expected
    try:
        # int() takes "1_024" and other scripts' digits, which no table of numbers means.
        number = int(value) if isinstance(value, int | float) else int(_digits(str(value)))
    except ValueError:
        raise expected from None
    if not 1 <= number <= MAX_SIZE:
        raise expected
    return number


def _digits(text: str) -> str:
    word = text.strip()
    if not word.isascii() or "_" in word or len(word) > 20:
        raise ValueError(word)
    return word.removesuffix(".0")


def parse_number(text: str, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number in ASCII within these bounds. Raises UserError (what was expected).

    float() alone also takes `1_0.5`, full-width digits and `infinity`, which no table of numbers means.
    """
    value = float(text) if is_number(text) else math.nan
    if not (math.isfinite(value) and least <= value <= most):
        raise UserError(f"{quoted(text)}, expected a number{_range(least, most)}")
    return value


def parse_whole(text: str, least: int, most: int) -> int:
    """A whole number in ASCII within these bounds, also written `5.0`. Raises UserError (what was expected)."""
    digits = text.removesuffix(".0")
    if not (is_number(digits) and digits.lstrip("+-").isdigit() and least <= int(digits) <= most):
        raise UserError(f"{quoted(text)}, expected a whole number{_range(least, most)}")
    return int(digits)


def _range(least: float, most: float) -> str:
    low, high = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, most))
    if math.isinf(most):
        return "" if math.isinf(least) else f" from {low}"
    return f" from {low} to {high}"


_MOST_CALLS = 1e15
"""Sums of them stay exact, and are no infinity."""


def parse_weight(value: object) -> float:
    """A finite number above 0: how often a call is made. Raises UserError (what was expected)."""
    text = str(value).strip()
    number = float(text) if is_number(text) else math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise UserError(f"{quoted(value)}, expected a number above 0")
    if number > _MOST_CALLS:
        raise UserError(f"{quoted(value)}, expected a number of calls up to {_MOST_CALLS:g}")
    return number


def missing(value: object) -> bool:
    """Whether a cell says nothing: None, empty text, NaN."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, float) and math.isnan(value))
    )


def parse_key(column: KeyColumn, value: object, gfx: str) -> Scalar:
    """A key column's value in its own type; None where an optional one says nothing. Raises UserError (expected)."""
    if column.optional and missing(value):
        return None
    if column.kind == "int":
        return parse_int(value)
    if column.kind == "bool":
        return parse_bool(value)
    if column.kind == "flag":
        return int(parse_bool(value))
    if column.kind == "dtype":
        return parse_dtype(value, gfx)
    return parse_word(column.words, value, column.others) if column.words else parse_name(str(value).strip())


def parse_name(text: str) -> str:
    """A name that goes into tables, which people open in spreadsheets. Raises UserError (what was expected)."""
    if is_formula(text):
        raise UserError(f"{quoted(text)}, expected a name: spreadsheets take it for a formula")
    return text


def parse_word(words: Sequence[tuple[str, str]], value: object, others: Sequence[tuple[str, str]] = ()) -> str:
    """What one of these words means, in any case. Raises UserError (what was expected), which offers no `others`."""
    known = _meanings(words)
    word = str(value).strip().lower()
    if word in (unoffered := _meanings(others)):
        return unoffered[word]
    if word not in known:
        raise UserError(f"{quoted(value)}, expected one of {', '.join(dict(words))}{closest(shortened(word), known)}")
    return known[word]


def _meanings(words: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {**dict(words), **{meaning.lower(): meaning for _, meaning in words}}
