"""From the text of a table, a list or a model to checked problems.

From what a table, a list or a model says to the value of a key column.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import NotComputed, UserError, quoted_repr, shortened, suggest, suggest_or_list
from gemmpipe.core.files import is_formula, is_number
from gemmpipe.family import Family, KernelDefaults, KeyColumn, load_family, shipped_families
from gemmpipe.family.dtypes import native_fp8

MAX_SIZE = 2**31 - 1
"""Kernels index sizes with 32 bits."""

KNOWN_DTYPES = (
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
_NATIVE_FP8_NAMES = ("fp8", "float8", "fp8_e4m3", "e4m3", "float8_e4m3")
"""Names that mean the chip's own e4m3."""

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_dtype(value: object, gfx: str) -> str:
    """Torch's name without `torch.`; `fp8` is the architecture's own e4m3. Raises UserError (what was expected)."""
    word = str(value).strip().removeprefix("torch.").lower()
    if word in _NATIVE_FP8_NAMES:
        return native_fp8(gfx)
    name = _ALIASES.get(word, word)
    if name not in KNOWN_DTYPES:
        known = (*KNOWN_DTYPES, *_ALIASES, "fp8")
        raise UserError(
            f"{quoted_repr(value)}, expected a dtype such as bfloat16{suggest_or_list(shortened(word), known)}"
        )
    return name


def parse_bool(value: object) -> bool:
    """True/False, TRUE/FALSE, 1/0, yes/no. Raises UserError (what was expected)."""
    word = str(value).strip().lower()
    if word not in _BOOLS:
        raise UserError(f"{quoted_repr(value)}, expected True or False")
    return _BOOLS[word]


def parse_int(value: object) -> int:
    """A whole number from 1 to 2^31 - 1; a bool is none. Raises UserError (what was expected)."""
    expected = UserError(f"{quoted_repr(value)}, expected a whole number from 1 to {MAX_SIZE}")
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
        raise UserError(f"{quoted_repr(text)}, expected a number{_bounds_text(least, most)}")
    return value


def parse_bounded_int(text: str, least: int, most: int) -> int:
    """A whole number in ASCII within these bounds, also written `5.0`. Raises UserError (what was expected)."""
    digits = text.removesuffix(".0")
    if not (is_number(digits) and digits.lstrip("+-").isdigit() and least <= int(digits) <= most):
        raise UserError(f"{quoted_repr(text)}, expected a whole number{_bounds_text(least, most)}")
    return int(digits)


def _bounds_text(least: float, most: float) -> str:
    low, high = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, most))
    if math.isinf(most):
        return "" if math.isinf(least) else f" from {low}"
    return f" from {low} to {high}"


_MAX_CALLS = 1e15
"""Sums of them stay exact, and are no infinity."""


def parse_weight(value: object) -> float:
    """A finite number above 0: how often a call is made. Raises UserError (what was expected)."""
    text = str(value).strip()
    number = float(text) if is_number(text) else math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise UserError(f"{quoted_repr(value)}, expected a number above 0")
    if number > _MAX_CALLS:
        raise UserError(f"{quoted_repr(value)}, expected a number of calls up to {_MAX_CALLS:g}")
    return number


def is_missing(value: object) -> bool:
    """Whether a cell says nothing: None, empty text, NaN."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, float) and math.isnan(value))
    )


def parse_key_value(column: KeyColumn, value: object, gfx: str) -> Scalar:
    """A key column's value in its own type; None where an optional one says nothing. Raises UserError (expected)."""
    if column.optional and is_missing(value):
        return None
    if column.kind == "int":
        return parse_int(value)
    if column.kind == "bool":
        return parse_bool(value)
    if column.kind == "flag":
        return int(parse_bool(value))
    if column.kind == "dtype":
        return parse_dtype(value, gfx)
    return parse_choice(column.words, value, column.others) if column.words else parse_name(str(value).strip())


def parse_name(text: str) -> str:
    """A name that goes into tables, which people open in spreadsheets. Raises UserError (what was expected)."""
    if is_formula(text):
        raise UserError(f"{quoted_repr(text)}, expected a name: spreadsheets take it for a formula")
    return text


def parse_choice(words: Sequence[tuple[str, str]], value: object, others: Sequence[tuple[str, str]] = ()) -> str:
    """What one of these words means, in any case. Raises UserError (what was expected), which offers no `others`."""
    known = _by_alias(words)
    word = str(value).strip().lower()
    if word in (unoffered := _by_alias(others)):
        return unoffered[word]
    if word not in known:
        raise UserError(
            f"{quoted_repr(value)}, expected one of {', '.join(dict(words))}{suggest(shortened(word), known)}"
        )
    return known[word]


def _by_alias(words: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {**dict(words), **{meaning.lower(): meaning for _, meaning in words}}


_MAX_NAMED = 3
_MAX_HEADER_CHARS = 120  # characters of a header in a message

T = TypeVar("T")


def make_problem(
    family: Family,
    values: Mapping[str, object],
    defaults: KernelDefaults,
    gfx: str,
    where: str,
    weight: float = 1.0,
    layer: str = "",
) -> Problem:
    """The problem of these key values; what they leave open comes from the kernel's words, then the family.

    `where` (`file:row`) begins every UserError: a column that is missing or no value of its kind. NotComputed, where
    the family has no such product.
    """
    fallback: Mapping[str, Scalar] | None = None
    key: list[tuple[str, Scalar]] = []
    for column in family.key_columns:
        value = values.get(column.name)
        if is_missing(value):
            fallback = _open_columns(family, values, defaults, gfx) if fallback is None else fallback
            value = fallback.get(column.name, column.default)
        if is_missing(value) and column.kind != "str":
            raise UserError(f"{where}: column {column.name}: no value, expected {_expected_value(column)}")
        try:
            key.append((column.name, parse_key_value(column, "" if value is None else value, gfx)))
        except UserError as error:
            raise UserError(f"{where}: column {column.name}: {error}") from None
    problem = family.problem(tuple(key), weight, layer)
    try:
        family.spec(problem)
    except UserError as error:
        raise NotComputed(f"{where}: {error}") from None
    return problem


def _open_columns(
    family: Family, values: Mapping[str, object], defaults: KernelDefaults, gfx: str
) -> Mapping[str, Scalar]:
    """Values for open columns; a row's own dtype decides the others as `kernel.dtype` would."""
    words = resolve_dtypes(defaults, gfx)
    chosen = {name: value for name, value in words.key.items() if value is not None}
    said = {
        name: value for name, value in values.items() if isinstance(value, str | int | float) and not is_missing(value)
    }
    words = replace(words, key={**chosen, **said})
    own = values.get("dtype")
    if not is_missing(own):
        try:
            return {**family.key_defaults(replace(words, dtype=parse_dtype(own, gfx)), gfx), **chosen}
        except UserError:
            pass  # a dtype that the family does not have: its spec says so, with the row
    return {**family.key_defaults(words, gfx), **chosen}


def resolve_dtypes(defaults: KernelDefaults, gfx: str) -> KernelDefaults:
    """The kernel's words with torch's dtype names. Raises UserError naming the word."""
    return replace(
        defaults,
        dtype=_resolve_dtype("dtype", defaults.dtype, gfx),
        out_dtype=_resolve_dtype("out_dtype", defaults.out_dtype, gfx),
    )


def _resolve_dtype(name: str, value: str | None, gfx: str) -> str | None:
    try:
        return None if value is None else parse_dtype(value, gfx)
    except UserError as error:
        raise UserError(f"kernel.{name}: {error}") from None


def _expected_value(column: KeyColumn) -> str:
    known = {"int": "a whole number from 1", "bool": "True or False", "flag": "1 or 0"}
    return known.get(column.kind, "a dtype such as bfloat16")


def merge_duplicates(problems: Iterable[Problem]) -> list[Problem]:
    """Each key once, in order of first sight; weights are summed and different layer names joined by `+`."""
    united: dict[tuple[tuple[str, Scalar], ...], Problem] = {}
    for problem in problems:
        old = united.get(problem.key)
        if old is None:
            united[problem.key] = problem
            continue
        layers = [name for name in old.layer.split("+") if name]
        if problem.layer and problem.layer not in layers:
            layers.append(problem.layer)
        united[problem.key] = replace(old, weight=old.weight + problem.weight, layer="+".join(layers))
    return list(united.values())


def locate_key_columns(header: Sequence[str], family: Family, where: str) -> dict[str, int]:
    """Key column -> its place in the header, by exact name, alias or lower case.

    Raises UserError for a column without a default that is missing, and for one that is there twice.
    """
    lower = [name.lower() for name in header]
    places: dict[str, int] = {}
    for column in family.key_columns:
        for name in (column.name, *column.aliases):
            exact = [place for place, word in enumerate(header) if word == name]
            matches = exact or [place for place, word in enumerate(lower) if word == name.lower()]
            if len(matches) > 1:
                raise UserError(f"{where}: column '{name}' is there {len(matches)} times, expected once")
            if matches:
                places[column.name] = matches[0]
                break
        else:
            if column.kind == "int" and column.default is None:
                key = ", ".join(c.name for c in family.key_columns)
                found = shortened(", ".join(header), _MAX_HEADER_CHARS) or "an empty file"
                raise UserError(
                    f"{where}: no column '{column.name}', expected the key of {family.name} ({key}), found {found}"
                    f"{_header_hint(header)}"
                )
    return places


def _header_hint(header: Sequence[str]) -> str:
    """What may have been meant by a header that lacks the key: other families' columns, or another separator."""
    if len(header) == 1 and (odd := next((mark for mark in ";\t|" if mark in header[0]), None)):
        return f"; columns are separated by commas, not by {odd!r}"
    return families_hint(header)


def families_hint(columns: Iterable[str]) -> str:
    """The clause that names the shipped families whose key these columns have: "; kernel=x has these columns"."""
    here = {name.lower() for name in columns}
    fit = []
    for name in shipped_families():
        needed = [c for c in load_family(name).key_columns if c.kind == "int" and c.default is None]
        if all(here & {word.lower() for word in (c.name, *c.aliases)} for c in needed):
            fit.append(name)
    several = " ..." if len(fit) > _MAX_NAMED else ""
    return f"; they are of kernel={' or '.join(fit[:_MAX_NAMED])}{several}" if fit else ""


def group_by_shape(items: Iterable[T], problem_of: Callable[[T], Problem]) -> list[list[T]]:
    """Those whose problems differ in M alone, together; in the order in which they come."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(problem_of(item).shape_group, []).append(item)
    return list(groups.values())


def shape_groups(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Problems that differ in M alone, together; in the order in which they come."""
    return group_by_shape(problems, lambda problem: problem)
