"""What a command line asks for, once recipes and earlier runs are read: one pipeline and its overrides.

Which kernel the tables and lists of shapes on a command line are of, where no `kernel=` stands beside them.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from gemmpipe.cli.aiter_flags import check_aiter_overrides
from gemmpipe.cli.command_line import CommandLine, is_recipe
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.old_keys import current_overrides
from gemmpipe.cli.overrides import MAX_NESTING, check_group_overrides, hydra_overrides, is_too_deep, override_key, quote
from gemmpipe.cli.recipes import read_recipe
from gemmpipe.cli.runs import PreviousRun, find_run
from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.core.files import named_files, read_cells
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.pipeline.build import ROOT
from gemmpipe.tables.file_names import family_of_file_name

_DEFAULT_PIPELINE = "tune"
_RUN_KEYS = ("resume", "reuse")
_TIMING_KEYS = ("kernel", "shapes", "space", "search", "device", "backend", "stages.screen", "stages.bench")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One pipeline, its overrides in Hydra's grammar, and where they come from."""

    pipeline: str
    overrides: tuple[str, ...]
    multirun: bool
    folders: ConfigFolders
    recipe: str
    """The recipe's path, or nothing."""
    typed_keys: frozenset[str]
    """The keys that stand on the command line itself."""


def resolve_request(line: CommandLine) -> RunRequest:
    """Read what the words refer to. Raises UserError for a pipeline, recipe or run that is not there."""
    folders = ConfigFolders(config_dir=line.config_dir)
    groups = frozenset(folders.options)
    line = replace(line, overrides=current_overrides(line.overrides, folders.config_dir))
    pipeline, arguments, multirun = line.command, line.overrides, line.has("--multirun")
    recipe = None
    if line.command is not None and is_recipe(line.command):
        recipe = read_recipe(Path(line.command).expanduser(), groups)
        recipe_overrides = current_overrides(recipe.overrides, folders.config_dir)
        pipeline, arguments = recipe.pipeline, _last_of_each_key((*recipe_overrides, *line.overrides))
        multirun = multirun or recipe.multirun
    run, arguments = _with_previous_run(arguments, pipeline, folders.config_dir is not None)
    if run is not None:
        if multirun and any(word.startswith("resume=") for word in arguments):
            raise UserError("resume: goes on with one run; leave -m out")
        pipeline = pipeline or run.pipeline
        folders = folders if folders.config_dir else ConfigFolders(config_dir=run.config_dir)
    pipeline = pipeline or _DEFAULT_PIPELINE
    folders.check()
    if pipeline not in folders.pipelines:
        raise UserError(f"{pipeline}: no such pipeline{_unknown_pipeline_hint(pipeline, folders)}")
    where = "" if recipe is None else f"{recipe.path}: "
    _check_aiter_overrides(arguments, line.overrides, folders, where)
    try:
        overrides = _overrides(arguments, multirun, folders)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    if not multirun:
        overrides = _with_inferred_kernel(overrides, folders, pipeline)
    return RunRequest(
        pipeline=pipeline,
        overrides=overrides,
        multirun=multirun,
        folders=folders,
        recipe=str(recipe.path) if recipe else "",
        typed_keys=frozenset(override_key(word) for word in line.overrides),
    )


def _overrides(arguments: Sequence[str], multirun: bool, folders: ConfigFolders) -> tuple[str, ...]:
    """The words as Hydra can read them. Raises UserError for one that it cannot, or that chooses no option by name."""
    for word in arguments:
        if is_too_deep(word):
            raise UserError(f"{override_key(word)[:60]}: nested more than {MAX_NESTING} deep; expected key=value")
    overrides = hydra_overrides(_last_of_each_key(arguments), multirun=multirun)
    check_group_overrides(overrides, folders.options)
    return overrides


def _check_aiter_overrides(arguments: Sequence[str], typed: Sequence[str], folders: ConfigFolders, recipe: str) -> None:
    """Raises UserError for words of aiter's; with the recipe in front that has them."""
    check_aiter_overrides(typed, folders.options)
    try:
        check_aiter_overrides(arguments, folders.options)
    except UserError as error:
        raise UserError(f"{recipe}{error}") from None


def _with_inferred_kernel(arguments: tuple[str, ...], folders: ConfigFolders, pipeline: str) -> tuple[str, ...]:
    """The overrides with the kernel that the files among them tell, where none is typed."""
    keys = set(map(override_key, arguments))
    if keys & {"table", "inputs"}:
        return with_kernel_of_tables(arguments, folders)
    # A pipeline of the user's own may well name the kernel itself.
    if "shapes.path" in keys and folders.pipelines[pipeline].parent == shipped("pipelines"):
        return with_kernel_of_shapes(arguments, folders)
    return arguments


def _unknown_pipeline_hint(word: str, folders: ConfigFolders) -> str:
    """What was meant by a first word that names no pipeline."""
    if word.lower().endswith(".csv"):  # as other tuners take it
        return f"; a file of shapes is 'shapes=csv shapes.path={word}', a tuned one 'verify table={word}'"
    if word.split(".")[0].split("@")[0] in {*folders.options, *ROOT}:
        return f"; expected {word}=VALUE"
    return suggest_or_list(word, folders.pipelines)


def _with_previous_run(
    arguments: Sequence[str], pipeline: str | None, config_dir_typed: bool
) -> tuple[PreviousRun | None, tuple[str, ...]]:
    """The words with those of the run that `resume=` or `reuse=` names in front, so that later words win."""
    asked = [
        (override_key(word), word.split("=", 1)[1])
        for word in arguments
        if "=" in word and override_key(word) in _RUN_KEYS
    ]
    asked = [(key, value.strip("\"'")) for key, value in asked if value not in {"", "null"}]
    if not asked:
        return None, tuple(arguments)
    if len(asked) > 1:
        raise UserError("resume and reuse: expected one of them")
    key, value = asked[0]
    run = find_run(key, value, pipeline, config_dir_typed)
    rest = [word for word in arguments if override_key(word) != key]
    place = [f"{key}={quote(str(run.folder))}"]
    forgotten = set(_RUN_KEYS)
    if key == "resume":
        forgotten = {"resume"}  # what it reused, it still does
        _check_same_configuration(rest, run)
        place += [f"hydra.run.dir={quote(str(run.folder))}", "hydra.output_subdir=null"]
    kept = [word for word in run.overrides if override_key(word) not in forgotten]
    return run, (*kept, *rest, *place)


def _check_same_configuration(arguments: Sequence[str], run: PreviousRun) -> None:
    """Refuse words that would change what an unfinished run times: its journal would mix two runs."""
    for word in arguments:
        if override_key(word).startswith(_TIMING_KEYS) and word not in run.overrides:
            raise UserError(f"resume: {word}: a run goes on with its own configuration; start anew, or reuse= it")


def _last_of_each_key(arguments: Sequence[str]) -> tuple[str, ...]:
    """Of several overrides of one key the last one."""
    last = {override_key(word): index for index, word in enumerate(arguments)}
    return tuple(word for index, word in enumerate(arguments) if last[override_key(word)] == index)


TABLE_KEYS = ("table", "inputs")
"""The keys that name tuned tables."""
SHAPES_KEY = "shapes.path"
"""The key that names lists of shapes, beside `shapes=csv`."""


def with_kernel_of_tables(overrides: Sequence[str], folders: ConfigFolders) -> tuple[str, ...]:
    """The overrides, with the kernel of their tables in front when they name tables and no kernel.

    Raises UserError for tables of several kernels, for one whose name tells another kernel than the typed one, and
    where neither name nor columns of one say what it is of.
    """
    named = {override_key(word): word for word in overrides}
    asked = [named[key] for key in TABLE_KEYS if key in named]
    if not asked:
        return tuple(overrides)
    kernels = _kernels(folders)
    files = [path for word in asked for path in _files(word)]
    if "kernel" in named:
        _check_same_kernel(named["kernel"].split("=", 1)[-1].strip("\"'"), files, kernels, folders.kernels)
        return tuple(overrides)
    found: dict[str, Path] = {}
    for path in files:
        name = _kernel_of_file(path, kernels)
        if name is not None:
            found.setdefault(name, path)
    return (*_one_kernel(found, "table"), *overrides)


def with_kernel_of_shapes(overrides: Sequence[str], folders: ConfigFolders) -> tuple[str, ...]:
    """The overrides, with the kernel of their lists of shapes in front when these tell it and none is named.

    A list of M, N and K is of no kernel. One that contradicts its kernel is told where it is read. Raises UserError
    for lists of several kernels.
    """
    named = {override_key(word): word for word in overrides}
    listed = named.get("shapes", "").partition("=")[2].strip("\"'") == "csv"
    if not listed or SHAPES_KEY not in named or {"kernel", "shapes.rows_of"} & set(named):
        return tuple(overrides)
    try:
        files = _files(named[SHAPES_KEY])
    except UserError:
        return tuple(overrides)  # the source says which file is not there
    kernels, found = _kernels(folders), dict[str, Path]()
    for path in files:
        told = family_of_file_name(path.name, kernels) or _kernel_of_rows(path, kernels)
        if told is not None:
            found.setdefault(told, path)
    return (*_one_kernel(found, "list"), *overrides)


def _kernel_of_rows(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """The kernel by the column `family`, else by the other columns; None where they fit several, or none."""
    try:
        lines = read_cells(path)
        header = [name.lower() for name in next(lines, (0, []))[1]]
        if "family" not in header:
            possible = _matching_kernels(set(header), kernels, tuned=False)
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


def _kernels(folders: ConfigFolders) -> dict[str, Family]:
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
    return named_files(override_key(word), texts) if value not in (None, []) else []


def _check_same_kernel(
    typed: str, files: Sequence[Path], kernels: Mapping[str, Family], families: Mapping[str, str]
) -> None:
    """Refuse tables that are another family's by their names: rows would be read as what they are not."""
    for path in files:
        told = family_of_file_name(path.name, kernels)
        if told is not None and families.get(typed, families[told]) != families[told]:
            raise UserError(f"kernel={typed}: {path} is by its name a table of {told}; leave kernel= out, or rename it")


def _kernel_of_file(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """By the file's name, else by its columns; None where it cannot be read, which is told later."""
    told = family_of_file_name(path.name, kernels)
    if told is not None:
        return told
    try:
        header = {name.lower() for name in next(read_cells(path), (0, []))[1]}
    except UserError:
        return None
    possible = _matching_kernels(header, kernels, tuned=True)
    if len(possible) != 1:
        known = ", ".join(possible or kernels)
        raise UserError(f"kernel: missing, and {path} does not tell by its name; expected kernel= one of {known}")
    return possible[0]


def _matching_kernels(header: set[str], kernels: Mapping[str, Family], *, tuned: bool) -> list[str]:
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
