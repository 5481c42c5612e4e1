"""Which kernel the tuned tables on a command line are of, for who does not type `kernel=` beside them."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from gemmpipe.cli.words import key_of
from gemmpipe.errors import UserError
from gemmpipe.family import Family, load_family
from gemmpipe.files.csvfile import named_files, read_cells

_KEYS = ("table", "inputs")


def with_kernel(words: Sequence[str], kernels: Iterable[str]) -> tuple[str, ...]:
    """The overrides, with the kernel of their tables in front when they name tables and no kernel.

    Raises UserError for tables of several kernels, and where neither name nor columns of one say what it is of.
    """
    named = {key_of(word): word for word in words}
    asked = [named[key] for key in _KEYS if key in named]
    if not asked or "kernel" in named:
        return tuple(words)
    families = [load_family(name) for name in kernels]
    found: dict[str, Path] = {}
    for word in asked:
        for path in _files(word):
            name = _kernel_of(path, families)
            if name is not None:
                found.setdefault(name, path)
    if len(found) > 1:
        (one, a), (other, b), *_ = found.items()
        raise UserError(f"kernel: {a} is a table of {one}, {b} one of {other}; expected tables of one kernel")
    return (*(f"kernel={name}" for name in found), *words)


def _files(word: str) -> list[Path]:
    """The files that `table=` or `inputs=` names; none where it names nothing."""
    value = OverridesParser.create().parse_override(word).value()
    texts = [str(getattr(item, "text", item)) for item in (value if isinstance(value, list) else [value])]
    return named_files(key_of(word), texts) if value not in (None, []) else []


def _kernel_of(path: Path, families: Sequence[Family]) -> str | None:
    """By the file's name, else by its columns; None where it cannot be read, which is told later."""
    stems = {family.csv_name.removesuffix(".csv"): family.name for family in families}
    fit = [stem for stem in stems if re.search(rf"(^|[^a-z0-9]){re.escape(stem)}([^a-z0-9]|$)", path.name)]
    if fit:
        return stems[max(fit, key=len)]
    try:
        header = {name.lower() for name in next(read_cells(path), (0, []))[1]}
    except UserError:
        return None
    possible = [family.name for family in families if _is_key(family, header, families)]
    if len(possible) != 1:
        known = ", ".join(possible or [family.name for family in families])
        raise UserError(f"kernel: missing, and {path} does not tell by its name; expected kernel= one of {known}")
    return possible[0]


def _is_key(family: Family, header: set[str], families: Sequence[Family]) -> bool:
    """Whether the header has what the family's key needs, and nothing of other keys."""
    names = [{n.lower() for n in (column.name, *column.aliases)} for column in family.key_columns]
    needed = [n for n, column in zip(names, family.key_columns, strict=True) if column.default is None]
    of_keys = {n.lower() for other in families for c in other.key_columns for n in (c.name, *c.aliases)}
    return all(n & header for n in needed) and (header & of_keys) <= set().union(*names)
