"""From the text of a table, a list or a model to checked problems."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import NotComputed, UserError, closest, nearest
from gemmpipe.family import Family, KernelDefaults, KeyColumn
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
        raise UserError(f"{value!r}, expected a dtype such as bfloat16{nearest(word, (*DTYPES, *_ALIASES, 'fp8'))}")
    return name


def parse_bool(value: object) -> bool:
    """True/False, TRUE/FALSE, 1/0, yes/no. Raises UserError (what was expected)."""
    word = str(value).strip().lower()
    if word not in _BOOLS:
        raise UserError(f"{value!r}, expected True or False")
    return _BOOLS[word]


def parse_int(value: object) -> int:
    """A whole number from 1 to 2^31 - 1; a bool is none. Raises UserError (what was expected)."""
    expected = UserError(f"{value!r}, expected a whole number from 1 to {MAX_SIZE}")
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


_MOST_CALLS = 1e15
"""Sums of them stay exact, and are no infinity."""


def parse_weight(value: object) -> float:
    """A finite number above 0: how often a call is made. Raises UserError (what was expected)."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise UserError(f"{value!r}, expected a number above 0")
    if number > _MOST_CALLS:
        raise UserError(f"{value!r}, expected a number of calls up to {_MOST_CALLS:g}")
    return number


def missing(value: object) -> bool:
    """Whether a cell says nothing: None, empty text, NaN."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, float) and math.isnan(value))
    )


def parse_key(column: KeyColumn, value: object, gfx: str) -> Scalar:
    """A key column's value in its own type. Raises UserError (what was expected)."""
    if column.kind == "int":
        return parse_int(value)
    if column.kind == "bool":
        return parse_bool(value)
    if column.kind == "flag":
        return int(parse_bool(value))
    if column.kind == "dtype":
        return parse_dtype(value, gfx)
    return parse_word(column.words, value) if column.words else str(value).strip()


def parse_word(words: Sequence[tuple[str, str]], value: object) -> str:
    """What one of these words means, in any case. Raises UserError (what was expected)."""
    known = {**dict(words), **{meaning.lower(): meaning for _, meaning in words}}
    word = str(value).strip().lower()
    if word not in known:
        raise UserError(f"{value!r}, expected one of {', '.join(dict(words))}{closest(word, known)}")
    return known[word]


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
        if missing(value):
            fallback = _fallback(family, values, defaults, gfx) if fallback is None else fallback
            value = fallback.get(column.name, column.default)
        if missing(value) and column.kind != "str":
            raise UserError(f"{where}: column {column.name}: no value, expected {_expected(column)}")
        try:
            key.append((column.name, parse_key(column, "" if value is None else value, gfx)))
        except UserError as error:
            raise UserError(f"{where}: column {column.name}: {error}") from None
    problem = family.problem(tuple(key), weight, layer)
    try:
        family.spec(problem)
    except UserError as error:
        raise NotComputed(f"{where}: {error}") from None
    return problem


def _fallback(family: Family, values: Mapping[str, object], defaults: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Values for open columns; a row's own dtype decides the others as `kernel.dtype` would."""
    words = plain_words(defaults, gfx)
    chosen = {name: value for name, value in words.key.items() if value is not None}
    said = {
        name: value for name, value in values.items() if isinstance(value, str | int | float) and not missing(value)
    }
    words = replace(words, key={**chosen, **said})
    own = values.get("dtype")
    if not missing(own):
        try:
            return {**family.key_defaults(replace(words, dtype=parse_dtype(own, gfx)), gfx), **chosen}
        except UserError:
            pass  # a dtype that the family does not have: its spec says so, with the row
    return {**family.key_defaults(words, gfx), **chosen}


def plain_words(defaults: KernelDefaults, gfx: str) -> KernelDefaults:
    """The kernel's words with torch's dtype names. Raises UserError naming the word."""
    return replace(
        defaults,
        dtype=_word("dtype", defaults.dtype, gfx),
        out_dtype=_word("out_dtype", defaults.out_dtype, gfx),
    )


def _word(name: str, value: str | None, gfx: str) -> str | None:
    try:
        return None if value is None else parse_dtype(value, gfx)
    except UserError as error:
        raise UserError(f"kernel.{name}: {error}") from None


def _expected(column: KeyColumn) -> str:
    known = {"int": "a whole number from 1", "bool": "True or False", "flag": "1 or 0"}
    return known.get(column.kind, "a dtype such as bfloat16")


def unite(problems: Iterable[Problem]) -> list[Problem]:
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


def column_places(header: Sequence[str], family: Family, where: str) -> dict[str, int]:
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
                raise UserError(
                    f"{where}: no column '{column.name}', expected the key of {family.name} "
                    f"({', '.join(c.name for c in family.key_columns)}), found {', '.join(header) or 'an empty file'}"
                )
    return places
