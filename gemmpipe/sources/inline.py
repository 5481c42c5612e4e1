"""Problems listed in the configuration itself."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError, quoted_repr, suggest_or_list
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.problem import check_routing, families_hint, make_problem, merge_duplicates, parse_weight
from gemmpipe.sources import Source
from gemmpipe.sources.model.source import batch_sizes

_MAX_PROBLEMS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class InlineShapes(Source):
    """Problems as `[M, N, K]` or as `{M: [1, 64], N: 1280, K: 8192}`, each item with its own Ms.

    A mapping may contain any key column, `weight` and `layer`; a list there, or in place of a size, expands to each of
    its values (`[[1, 64], 1280, 8192]`). `nsets` keeps only these Ms; null: all.
    """

    items: Sequence[object]
    nsets: Sequence[int] | int | str | None = None

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: item, column, what was expected."""
        if not isinstance(self.items, Sequence) or isinstance(self.items, str):
            raise UserError(f"shapes.items: {quoted_repr(self.items)}, expected a list such as [[1, 1280, 8192]]")
        if not self.items:
            raise UserError("shapes.items: empty, expected a list such as [[1, 1280, 8192]]")
        found: list[Problem] = []
        _refuse_flat(self.items, family)
        for index, item in enumerate(self.items):
            where = f"shapes.items[{index}]"
            for values in _expanded(item, family, where):
                found.append(_problem(values, family, defaults, gfx, where))
        return merge_duplicates(found if self.nsets is None else _with_sizes(found, batch_sizes(self.nsets)))


def _with_sizes(found: Sequence[Problem], sizes: Sequence[int]) -> list[Problem]:
    """The problems with these Ms. Raises UserError if there are none."""
    kept = [problem for problem in found if problem.rows in sizes]
    if not kept:
        present = ", ".join(map(str, sorted({problem.rows for problem in found})))
        raise UserError(f"shapes.nsets: no item has M of {', '.join(map(str, sizes))}; expected some of {present}")
    return kept


def _refuse_flat(items: Sequence[object], family: Family) -> None:
    """Raises UserError for sizes of a problem without the brackets around them."""
    if any(isinstance(item, Sequence | Mapping) and not isinstance(item, str) for item in items):
        return
    sizes = _sizes(family)
    given = _item_text(items[0] if len(items) == 1 else items)  # a single value has become a list
    hint = f"; one problem is [{given}]" if len(items) == len(sizes) else ""
    raise UserError(f"shapes.items: {given}, expected a list of problems [[{', '.join(sizes)}], ...]{hint}")


def _sizes(family: Family) -> list[str]:
    return [c.name for c in family.key_columns if c.kind == "int" and c.default is None]


def _problem(values: dict[str, object], family: Family, defaults: KernelDefaults, gfx: str, where: str) -> Problem:
    weight, layer = values.pop("weight", 1.0), values.pop("layer", "")
    try:
        number = parse_weight(weight)
    except UserError as error:
        raise UserError(f"{where}: weight: {error}") from None
    problem = make_problem(family, values, defaults, gfx, where, weight=number, layer=str(layer))
    check_routing(family, problem, values, defaults, where)
    return problem


def _expanded(item: object, family: Family, where: str) -> Iterator[dict[str, object]]:
    sizes = _sizes(family)
    if isinstance(item, Mapping):
        named = {_column(name, family, item, where): value for name, value in item.items()}
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == len(sizes):
        named = dict(zip(sizes, item, strict=True))
    else:
        raise UserError(f"{where}: {_item_text(item)}, expected [{', '.join(sizes)}] or a mapping with these keys")
    for name, value in named.items():
        if not _values(value):
            raise UserError(f"{where}: {name}: empty, expected a value or a list of them")
    count = math.prod(len(_values(value)) for value in named.values())
    if count > _MAX_PROBLEMS:
        raise UserError(f"{where}: {count:,} problems, expected at most {_MAX_PROBLEMS:,}")
    several = [[(name, each) for each in _values(value)] for name, value in named.items()]
    yield from (dict(pairs) for pairs in itertools.product(*several))


def _item_text(item: object) -> str:
    """The item as it was typed: sequences have become tuples."""
    listed = isinstance(item, Sequence) and not isinstance(item, str)
    return str(list(item)) if isinstance(item, Sequence) and listed else repr(item)


def _values(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _column(name: object, family: Family, item: Iterable[object], where: str) -> str:
    for column in family.key_columns:
        if name == column.name or name in column.aliases:
            return column.name
    if name in ("weight", "layer"):
        return str(name)
    known = [c.name for c in family.key_columns] + ["weight", "layer"]
    own = any(str(each) in known[:-2] for each in item)
    instead = suggest_or_list(str(name), known) if own else families_hint(map(str, item))
    raise UserError(f"{where}: no key column '{name}' in {family.name}{instead}")
