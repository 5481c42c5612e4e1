"""Which kernel the tables and lists of shapes on a command line are of, where no `kernel=` stands beside them."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from gemmpipe.cli.folders import Folders
from gemmpipe.cli.words import key_of
from gemmpipe.errors import UserError
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.files.csvfile import named_files, read_cells
from gemmpipe.tables.names import told_by_name

KEYS = ("table", "inputs")
"""The keys that name tuned tables."""
SHAPES = "shapes.path"
"""The key that names lists of shapes, beside `shapes=csv`."""


def with_kernel(words: Sequence[str], folders: Folders) -> tuple[str, ...]:
    """The overrides, with the kernel of their tables in front when they name tables and no kernel.

    Raises UserError for tables of several kernels, for one whose name tells another kernel than the typed one, and
    where neither name nor columns of one say what it is of.
    """
    named = {key_of(word): word for word in words}
    asked = [named[key] for key in KEYS if key in named]
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
    return (*_one_kernel(found, "table"), *words)


def with_kernel_of_shapes(words: Sequence[str], folders: Folders) -> tuple[str, ...]:
    """The overrides, with the kernel of their lists of shapes in front when these tell it and none is named.

    A list of M, N and K is of no kernel. One that contradicts its kernel is told where it is read. Raises UserError
    for lists of several kernels.
    """
    named = {key_of(word): word for word in words}
    listed = named.get("shapes", "").partition("=")[2].strip("\"'") == "csv"
    if not listed or SHAPES not in named or {"kernel", "shapes.rows_of"} & set(named):
        return tuple(words)
    try:
        files = _files(named[SHAPES])
    except UserError:
        return tuple(words)  # the source says which file is not there
    kernels, found = _kernels(folders), dict[str, Path]()
    for path in files:
        told = told_by_name(path.name, kernels) or _told_by_rows(path, kernels)
        if told is not None:
            found.setdefault(told, path)
    return (*_one_kernel(found, "list"), *words)


def _told_by_rows(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """The kernel by the column `family`, else by the other columns; None where they fit several, or none."""
    try:
        lines = read_cells(path)
        header = [name.lower() for name in next(lines, (0, []))[1]]
        if "family" not in header:
            possible = _possible(set(header), kernels, tuned=False)
            return possible[0] if len(possible) == 1 else None
        place = header.index("family")
        said = {row[place] for _, row in lines if len(row) == len(header)}
    except UserError:
        return None
    families = [option for option, family in kernels.items() if family.name in said]
    return families[0] if len(families) == 1 else None


def _one_kernel(found: Mapping[str, Path], what: str) -> list[str]:
    if len(found) > 1:
        (one, a), (other, b), *_ = found.items()
        raise UserError(f"kernel: {a} is a {what} of {one}, {b} one of {other}; expected {what}s of one kernel")
    return [f"kernel={name}" for name in found]


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
        told = told_by_name(path.name, kernels)
        if told is not None and families.get(typed, families[told]) != families[told]:
            raise UserError(f"kernel={typed}: {path} is by its name a table of {told}; leave kernel= out, or rename it")


def _kernel_of(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """By the file's name, else by its columns; None where it cannot be read, which is told later."""
    told = told_by_name(path.name, kernels)
    if told is not None:
        return told
    try:
        header = {name.lower() for name in next(read_cells(path), (0, []))[1]}
    except UserError:
        return None
    possible = _possible(header, kernels, tuned=True)
    if len(possible) != 1:
        known = ", ".join(possible or kernels)
        raise UserError(f"kernel: missing, and {path} does not tell by its name; expected kernel= one of {known}")
    return possible[0]


def _possible(header: set[str], kernels: Mapping[str, Family], *, tuned: bool) -> list[str]:
    """The kernels whose key the columns can be, names in lower case; a list that is not tuned may leave out types."""
    families = list(kernels.values())
    return [option for option, family in kernels.items() if _is_key(family, header, families, tuned=tuned)]


def _is_key(family: Family, header: set[str], families: Sequence[Family], *, tuned: bool) -> bool:
    """Whether the header has what the family's key needs, and nothing of other keys."""
    names = [{n.lower() for n in (column.name, *column.aliases)} for column in family.key_columns]
    columns = zip(names, family.key_columns, strict=True)
    needed = [
        n for n, column in columns if column.default is None and not column.optional and (tuned or column.kind == "int")
    ]
    of_keys = {n.lower() for other in families for c in other.key_columns for n in (c.name, *c.aliases)}
    return all(n & header for n in needed) and (header & of_keys) <= set().union(*names)
