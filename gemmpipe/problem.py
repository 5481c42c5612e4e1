"""From the text of a table, a list or a model to checked problems."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import NotComputed, UserError, shortened
from gemmpipe.family import Family, KernelDefaults, KeyColumn, load_family, shipped_families
from gemmpipe.parsing import missing, parse_dtype, parse_key

_MOST_NAMED = 3
_MOST_FOUND = 120  # characters of a header in a message

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
                key = ", ".join(c.name for c in family.key_columns)
                found = shortened(", ".join(header), _MOST_FOUND) or "an empty file"
                raise UserError(
                    f"{where}: no column '{column.name}', expected the key of {family.name} ({key}), found {found}"
                    f"{_instead(header)}"
                )
    return places


def _instead(header: Sequence[str]) -> str:
    """What may have been meant by a header that lacks the key: other families' columns, or another separator."""
    if len(header) == 1 and (odd := next((mark for mark in ";\t|" if mark in header[0]), None)):
        return f"; columns are separated by commas, not by {odd!r}"
    return families_with(header)


def families_with(columns: Iterable[str]) -> str:
    """The clause that names the shipped families whose key these columns have: "; kernel=x has these columns"."""
    here = {name.lower() for name in columns}
    fit = []
    for name in shipped_families():
        needed = [c for c in load_family(name).key_columns if c.kind == "int" and c.default is None]
        if all(here & {word.lower() for word in (c.name, *c.aliases)} for c in needed):
            fit.append(name)
    several = " ..." if len(fit) > _MOST_NAMED else ""
    return f"; they are of kernel={' or '.join(fit[:_MOST_NAMED])}{several}" if fit else ""


def by_siblings(items: Iterable[T], problem_of: Callable[[T], Problem]) -> list[list[T]]:
    """Those whose problems differ in M alone, together; in the order in which they come."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(problem_of(item).siblings, []).append(item)
    return list(groups.values())


def siblings(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Problems that differ in M alone, together; in the order in which they come."""
    return by_siblings(problems, lambda problem: problem)
