"""Parsing of values from tables, lists and models into key columns and checked problems.

The `parse_*` functions raise UserError with a text that callers put after the place: `'x', expected ...`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gemmpipe.core.data import Problem, Scalar
from gemmpipe.core.errors import NotComputed, UserError, quoted_repr, shortened, suggest, suggest_or_list
from gemmpipe.core.files import is_formula, is_number
from gemmpipe.family import Family, KernelDefaults, KeyColumn, load_family, shipped_families
from gemmpipe.family.dtypes import FP4, native_fp8
from gemmpipe.family.routing import ROUTING, impossible_reason

T = TypeVar("T")

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
    FP4,
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
    "fp4": FP4,
    "fp4x2": FP4,
    "mxfp4": FP4,
    "i8": "int8",
    "i4": "int4",
}
_NATIVE_FP8_NAMES = ("fp8", "float8", "fp8_e4m3", "e4m3", "float8_e4m3")
"""Names of the architecture's native e4m3."""

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_MAX_CALLS = 1e15
"""Sums of weights up to this stay exact and finite."""
_MAX_NAMED = 3
_MAX_HEADER_CHARS = 120  # characters of a header in a message


def parse_dtype(value: object, gfx: str) -> str:
    """Torch's name without `torch.`; `fp8` is the architecture's native e4m3. Raises UserError (what was expected)."""
    text = str(value).strip().removeprefix("torch.").lower()
    if text in _NATIVE_FP8_NAMES:
        return native_fp8(gfx)
    name = _ALIASES.get(text, text)
    if name not in KNOWN_DTYPES:
        known = (*KNOWN_DTYPES, *_ALIASES, "fp8")
        raise UserError(
            f"{quoted_repr(value)}, expected a dtype such as bfloat16{suggest_or_list(shortened(text), known)}"
        )
    return name


def parse_bool(value: object) -> bool:
    """True/False, TRUE/FALSE, 1/0, yes/no. Raises UserError (what was expected)."""
    text = str(value).strip().lower()
    if text not in _BOOLS:
        raise UserError(f"{quoted_repr(value)}, expected True or False")
    return _BOOLS[text]


def parse_int(value: object) -> int:
    """A whole number from 1 to 2^31 - 1, not a bool. Raises UserError (what was expected)."""
    expected = UserError(f"{quoted_repr(value)}, expected a whole number from 1 to {MAX_SIZE}")
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise expected
    try:
        # int() alone also accepts "1_024" and digits of other scripts, which are errors in a table.
        number = int(value) if isinstance(value, int | float) else int(_digits(str(value)))
    except ValueError:
        raise expected from None
    if not 1 <= number <= MAX_SIZE:
        raise expected
    return number


def _digits(text: str) -> str:
    stripped = text.strip()
    if not stripped.isascii() or "_" in stripped or len(stripped) > 20:
        raise ValueError(stripped)
    return stripped.removesuffix(".0")


def parse_number(text: str, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number in ASCII within these bounds. Raises UserError (what was expected).

    float() alone also accepts `1_0.5`, full-width digits and `infinity`, which are errors in a table.
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


def parse_weight(value: object) -> float:
    """A number of calls: finite, above 0, at most _MAX_CALLS. Raises UserError (what was expected)."""
    text = str(value).strip()
    number = float(text) if is_number(text) else math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise UserError(f"{quoted_repr(value)}, expected a number above 0")
    if number > _MAX_CALLS:
        raise UserError(f"{quoted_repr(value)}, expected a number of calls up to {_MAX_CALLS:g}")
    return number


def is_missing(value: object) -> bool:
    """True for a cell without a value: None, empty text, NaN."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, float) and math.isnan(value))
    )


def parse_key_value(column: KeyColumn, value: object, gfx: str) -> Scalar:
    """A key column's value in its own type; None for a missing optional value. Raises UserError (what was expected)."""
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
    return parse_choice(column.choices, value, column.others) if column.choices else parse_name(str(value).strip())


def parse_name(text: str) -> str:
    """A name for tables, which users open in spreadsheets. Raises UserError (what was expected)."""
    if is_formula(text):
        raise UserError(f"{quoted_repr(text)}, expected a name: spreadsheets take it for a formula")
    return text


def parse_choice(choices: Sequence[tuple[str, str]], value: object, others: Sequence[tuple[str, str]] = ()) -> str:
    """The meaning of one of the (alias, meaning) `choices` or `others`, in any case.

    Raises UserError (what was expected), which lists the `choices` alone.
    """
    known = _by_alias(choices)
    alias = str(value).strip().lower()
    if alias in (unlisted := _by_alias(others)):
        return unlisted[alias]
    if alias not in known:
        raise UserError(
            f"{quoted_repr(value)}, expected one of {', '.join(dict(choices))}{suggest(shortened(alias), known)}"
        )
    return known[alias]


def _by_alias(choices: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {**dict(choices), **{meaning.lower(): meaning for _, meaning in choices}}


def make_problem(
    family: Family,
    values: Mapping[str, object],
    defaults: KernelDefaults,
    gfx: str,
    where: str,
    weight: float = 1.0,
    layer: str = "",
) -> Problem:
    """The problem of these key values; missing values come from the kernel's options (`defaults`), then the family.

    Raises UserError for a missing column or an invalid value, NotComputed for a product that the family does not
    have; both messages begin with `where` (`file:row`), or with `kernel.key.*` for a condition that was given there.
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
        name, _, reason = str(error).partition(": ")
        if any(column.name == name for column in family.key_columns if column.condition):
            raise UserError(f"{_place(name, values, defaults, where)}: {reason}") from None
        raise NotComputed(f"{where}: {error}") from None
    return problem


def _place(column: str, values: Mapping[str, object], defaults: KernelDefaults, where: str) -> str:
    """Where the value of a column is from: `kernel.key.routing`, or the source's `file:row: column routing`."""
    option = is_missing(values.get(column)) and not is_missing(defaults.key.get(column))
    return f"kernel.key.{column}" if option else f"{where}: column {column}"


def check_routing(
    family: Family, problem: Problem, values: Mapping[str, object], defaults: KernelDefaults, where: str
) -> None:
    """Raises UserError for a profile of loads that the experts of a new problem cannot have.

    Rows of tables are not checked: a time that was measured under such a profile is that of the rows that were made.
    """
    experts = family.spec(problem).experts
    if experts is None or experts.routing is None:
        return
    if reason := impossible_reason(experts.routing, experts.count, experts.topk):
        place = _place(ROUTING, values, defaults, where)
        raise UserError(f"{place}: {quoted_repr(experts.routing)} {reason}")


def _open_columns(
    family: Family, values: Mapping[str, object], defaults: KernelDefaults, gfx: str
) -> Mapping[str, Scalar]:
    """Values for missing columns; a row's own dtype determines the others, like `kernel.dtype`."""
    resolved = resolve_dtypes(defaults, gfx)
    chosen = {name: value for name, value in resolved.key.items() if value is not None}
    given = {
        name: value for name, value in values.items() if isinstance(value, str | int | float) and not is_missing(value)
    }
    resolved = replace(resolved, key={**chosen, **given})
    own = values.get("dtype")
    if not is_missing(own):
        try:
            return {**family.key_defaults(replace(resolved, dtype=parse_dtype(own, gfx)), gfx), **chosen}
        except UserError:
            pass  # a dtype that the family does not have: its spec raises an error with the row
    return {**family.key_defaults(resolved, gfx), **chosen}


def resolve_dtypes(defaults: KernelDefaults, gfx: str) -> KernelDefaults:
    """The kernel's options with torch's dtype names. Raises UserError with the option's key."""
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
    """Problems with distinct keys, in order of first occurrence; weights are summed, distinct layers joined by `+`."""
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
    """The index in the header of each key column, found by exact name, alias or lower case.

    Raises UserError for a missing column without a default, and for a duplicate column.
    """
    lower = [name.lower() for name in header]
    indices: dict[str, int] = {}
    for column in family.key_columns:
        for name in (column.name, *column.aliases):
            exact = [index for index, cell in enumerate(header) if cell == name]
            matches = exact or [index for index, cell in enumerate(lower) if cell == name.lower()]
            if len(matches) > 1:
                raise UserError(f"{where}: column '{name}' occurs {len(matches)} times, expected once")
            if matches:
                indices[column.name] = matches[0]
                break
        else:
            if column.kind == "int" and column.default is None:
                key = ", ".join(c.name for c in family.key_columns)
                found = shortened(", ".join(header), _MAX_HEADER_CHARS) or "an empty file"
                raise UserError(
                    f"{where}: no column '{column.name}', expected the key of {family.name} ({key}), found {found}"
                    f"{_header_hint(header)}"
                )
    return indices


def _header_hint(header: Sequence[str]) -> str:
    """A hint for a header without the key: another separator, or the families with these columns."""
    if len(header) == 1 and (odd := next((mark for mark in ";\t|" if mark in header[0]), None)):
        return f"; columns are separated by commas, not by {odd!r}"
    return families_hint(header)


def families_hint(columns: Iterable[str]) -> str:
    """The clause "; they are of kernel=x" with the shipped families that have their key sizes in `columns`, or ""."""
    present = {name.lower() for name in columns}
    fit = []
    for name in shipped_families():
        needed = [c for c in load_family(name).key_columns if c.kind == "int" and c.default is None]
        if all(present & {alias.lower() for alias in (c.name, *c.aliases)} for c in needed):
            fit.append(name)
    several = " ..." if len(fit) > _MAX_NAMED else ""
    return f"; they are of kernel={' or '.join(fit[:_MAX_NAMED])}{several}" if fit else ""


def group_by_shape(items: Iterable[T], problem_of: Callable[[T], Problem]) -> list[list[T]]:
    """Items grouped by their problem's `shape_group` (problems that differ in M alone), in order of occurrence."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(problem_of(item).shape_group, []).append(item)
    return list(groups.values())


def shape_groups(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Problems grouped by `shape_group` (they differ in M alone), in order of occurrence."""
    return group_by_shape(problems, lambda problem: problem)
