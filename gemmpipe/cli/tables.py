"""Which kernel the tuned tables on a command line are of, for who does not type `kernel=` beside them."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from gemmpipe.cli.folders import Folders
from gemmpipe.cli.words import key_of
from gemmpipe.errors import UserError
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.files.csvfile import named_files, read_cells

_KEYS = ("table", "inputs")


def with_kernel(words: Sequence[str], folders: Folders) -> tuple[str, ...]:
    """The overrides, with the kernel of their tables in front when they name tables and no kernel.

    Raises UserError for tables of several kernels, for one whose name tells another kernel than the typed one, and
    where neither name nor columns of one say what it is of.
    """
    named = {key_of(word): word for word in words}
    asked = [named[key] for key in _KEYS if key in named]
    if not asked:
        return tuple(words)
    kernels = _kernels(folders)
    files = [path for word in asked for path in _files(word)]
    if "kernel" in named:
        _same_kernel(named["kernel"].split("=", 1)[-1].strip("\"'"), files, kernels, folders.kernels)
        return tuple(words)
    found: dict[str, Path] = {}
    for path in files:
        name = _kernel_of(path, kernels)
        if name is not None:
            found.setdefault(name, path)
    if len(found) > 1:
        (one, a), (other, b), *_ = found.items()
        raise UserError(f"kernel: {a} is a table of {one}, {b} one of {other}; expected tables of one kernel")
    return (*(f"kernel={name}" for name in found), *words)


def _kernels(folders: Folders) -> dict[str, Family]:
    """The families, the user's among them, each by the option of `kernel` named as it is, or by the first."""
    folders.make_importable()
    options: dict[str, str] = {}
    for option, name in folders.kernels.items():
        if option == name or name not in options:
            options[name] = option
    kernels = {}
    for name, option in options.items():
        # A shipped family is sound; a user's module that is broken is told of when it is chosen.
        with contextlib.nullcontext() if name in shipped_families() else contextlib.suppress(Exception):
            kernels[option] = load_family(name)
    return kernels


def _files(word: str) -> list[Path]:
    """The files that `table=` or `inputs=` names; none where it names nothing."""
    value = OverridesParser.create().parse_override(word).value()
    texts = [str(getattr(item, "text", item)) for item in (value if isinstance(value, list) else [value])]
    return named_files(key_of(word), texts) if value not in (None, []) else []


def _same_kernel(typed: str, files: Sequence[Path], kernels: Mapping[str, Family], families: Mapping[str, str]) -> None:
    """Refuse tables that are another family's by their names: rows would be read as what they are not."""
    for path in files:
        told = _told_by_name(path, kernels)
        if told is not None and families.get(typed, families[told]) != families[told]:
            raise UserError(f"kernel={typed}: {path} is by its name a table of {told}; leave kernel= out, or rename it")


def _told_by_name(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """The kernel whose table's name is the longest in the file's."""
    stems = {family.csv_name.removesuffix(".csv"): option for option, family in kernels.items()}
    fit = [stem for stem in stems if re.search(rf"(^|[^a-z0-9]){re.escape(stem)}([^a-z0-9]|$)", path.name)]
    return stems[max(fit, key=len)] if fit else None


def _kernel_of(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """By the file's name, else by its columns; None where it cannot be read, which is told later."""
    told = _told_by_name(path, kernels)
    if told is not None:
        return told
    try:
        header = {name.lower() for name in next(read_cells(path), (0, []))[1]}
    except UserError:
        return None
    families = list(kernels.values())
    possible = [option for option, family in kernels.items() if _is_key(family, header, families)]
    if len(possible) != 1:
        known = ", ".join(possible or kernels)
        raise UserError(f"kernel: missing, and {path} does not tell by its name; expected kernel= one of {known}")
    return possible[0]


def _is_key(family: Family, header: set[str], families: Sequence[Family]) -> bool:
    """Whether the header has what the family's key needs, and nothing of other keys."""
    names = [{n.lower() for n in (column.name, *column.aliases)} for column in family.key_columns]
    needed = [n for n, column in zip(names, family.key_columns, strict=True) if column.default is None]
    of_keys = {n.lower() for other in families for c in other.key_columns for n in (c.name, *c.aliases)}
    return all(n & header for n in needed) and (header & of_keys) <= set().union(*names)
