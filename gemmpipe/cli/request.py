"""From a parsed command line to a run request: one pipeline and its overrides, with recipes and earlier runs read.

Without `kernel=` the kernel is inferred from the tables or lists of shapes on the command line.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from gemmpipe.cli.aiter_flags import check_aiter_overrides
from gemmpipe.cli.command_line import CommandLine, is_recipe
from gemmpipe.cli.commands import COMMANDS
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.old_keys import current_overrides
from gemmpipe.cli.overrides import MAX_NESTING, check_group_overrides, hydra_overrides, is_too_deep, override_key, quote
from gemmpipe.cli.recipes import read_recipe
from gemmpipe.cli.runs import PreviousRun, find_run
from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.core.files import named_files, read_cells
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.pipeline.build import ROOT
from gemmpipe.tables.file_names import family_of_file_name

_DEFAULT_PIPELINE = "tune"
_RUN_KEYS = ("resume", "reuse")
_TIMING_KEYS = ("kernel", "shapes", "space", "search", "device", "backend", "stages.screen", "stages.bench")
TABLE_KEYS = ("table", "inputs")
"""The keys that name tuned tables."""
SHAPES_KEY = "shapes.path"
"""The key that names lists of shapes, with `shapes=csv`."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One pipeline, its overrides in Hydra's grammar, and where they come from."""

    pipeline: str
    overrides: tuple[str, ...]
    multirun: bool
    folders: ConfigFolders
    recipe: str
    """The recipe's path, or ""."""
    typed_keys: frozenset[str]
    """The keys given on the command line itself."""


def resolve_request(line: CommandLine) -> RunRequest:
    """Resolve a command line. Raises UserError for an unknown pipeline, recipe or run."""
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
        if multirun and any(override.startswith("resume=") for override in arguments):
            raise UserError("resume: resumes one run; leave -m out")
        pipeline = pipeline or run.pipeline
        folders = folders if folders.config_dir else ConfigFolders(config_dir=run.config_dir)
    pipeline = pipeline or _DEFAULT_PIPELINE
    folders.check()
    if pipeline not in folders.pipelines:
        raise UserError(f"{pipeline}: no such pipeline{_unknown_pipeline_hint(pipeline, folders)}")
    # A user's own pipeline may have the values in hydra.sweeper.params.
    if multirun and not arguments and folders.pipelines[pipeline].parent == shipped("pipelines"):
        raise UserError("-m: nothing is swept; expected values with commas, as in -m search=halving,exhaustive")
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
        typed_keys=frozenset(override_key(override) for override in line.overrides),
    )


def _overrides(arguments: Sequence[str], multirun: bool, folders: ConfigFolders) -> tuple[str, ...]:
    """The arguments in Hydra's grammar. Raises UserError for one that does not fit, or a group without a name."""
    for override in arguments:
        if is_too_deep(override):
            raise UserError(f"{override_key(override)[:60]}: nested more than {MAX_NESTING} deep; expected key=value")
    overrides = hydra_overrides(_last_of_each_key(arguments), multirun=multirun)
    check_group_overrides(overrides, folders.options)
    return overrides


def _check_aiter_overrides(arguments: Sequence[str], typed: Sequence[str], folders: ConfigFolders, recipe: str) -> None:
    """Raises UserError for keys and libtypes of aiter, naming the recipe that has them."""
    check_aiter_overrides(typed, folders.options)
    try:
        check_aiter_overrides(arguments, folders.options)
    except UserError as error:
        raise UserError(f"{recipe}{error}") from None


def _with_inferred_kernel(arguments: tuple[str, ...], folders: ConfigFolders, pipeline: str) -> tuple[str, ...]:
    """The overrides, with a kernel inferred from the files that they name if none is given."""
    keys = set(map(override_key, arguments))
    if keys & {"table", "inputs"}:
        return with_kernel_of_tables(arguments, folders)
    # A user's own pipeline may set the kernel itself.
    if "shapes.path" in keys and folders.pipelines[pipeline].parent == shipped("pipelines"):
        return with_kernel_of_shapes(arguments, folders)
    return arguments


def _unknown_pipeline_hint(name: str, folders: ConfigFolders) -> str:
    """The hint for an unknown pipeline."""
    if name.lower().endswith(".csv"):  # the form of other tuners
        return f"; a file of shapes is 'shapes=csv shapes.path={name}', a tuned one 'verify table={name}'"
    if name.split(".")[0].split("@")[0] in {*folders.options, *ROOT}:
        return f"; expected {name}=VALUE"
    if name in ("help", "version"):
        return f"; expected gemmpipe --{name}"
    close = suggest(name, [*folders.pipelines, *COMMANDS])
    return close or suggest_or_list(name, folders.pipelines)


def _with_previous_run(
    arguments: Sequence[str], pipeline: str | None, config_dir_typed: bool
) -> tuple[PreviousRun | None, tuple[str, ...]]:
    """The run of `resume=` or `reuse=`, and the overrides: the run's first, so that later ones win."""
    asked = [
        (override_key(override), override.split("=", 1)[1])
        for override in arguments
        if "=" in override and override_key(override) in _RUN_KEYS
    ]
    asked = [(key, value.strip("\"'")) for key, value in asked if value not in {"", "null"}]
    if not asked:
        return None, tuple(arguments)
    if len(asked) > 1:
        raise UserError("resume and reuse: expected one of them")
    key, value = asked[0]
    run = find_run(key, value, pipeline, config_dir_typed)
    rest = [override for override in arguments if override_key(override) != key]
    pinned = [f"{key}={quote(str(run.folder))}"]
    forgotten = set(_RUN_KEYS)
    if key == "resume":
        forgotten = {"resume"}  # a resumed run keeps its reuse=
        _check_same_configuration(rest, run)
        pinned += [f"hydra.run.dir={quote(str(run.folder))}", "hydra.output_subdir=null"]
    kept = [override for override in run.overrides if override_key(override) not in forgotten]
    return run, (*kept, *rest, *pinned)


def _check_same_configuration(arguments: Sequence[str], run: PreviousRun) -> None:
    """Refuse overrides that change what an unfinished run times: its journal would mix two runs."""
    for override in arguments:
        if override_key(override).startswith(_TIMING_KEYS) and override not in run.overrides:
            raise UserError(
                f"resume: {override}: a run resumes with its own configuration; expected a new run, or reuse="
            )


def _last_of_each_key(arguments: Sequence[str]) -> tuple[str, ...]:
    """The last override of each key."""
    last = {override_key(override): index for index, override in enumerate(arguments)}
    return tuple(override for index, override in enumerate(arguments) if last[override_key(override)] == index)


def with_kernel_of_tables(overrides: Sequence[str], folders: ConfigFolders) -> tuple[str, ...]:
    """The overrides, with the kernel of their tables first if they name tables and no kernel.

    Raises UserError for tables of several kernels, for a table named for another kernel than the given one, and for one
    without a kernel in its name or columns.
    """
    named = {override_key(override): override for override in overrides}
    asked = [named[key] for key in TABLE_KEYS if key in named]
    if not asked:
        return tuple(overrides)
    kernels = _kernels(folders)
    files = [path for override in asked for path in _files(override)]
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
    """The overrides, with the kernel of their lists of shapes first if it can be inferred and none is given.

    A list of M, N and K fits any kernel. A list that contradicts its kernel is refused where it is read. Raises
    UserError for lists of several kernels.
    """
    named = {override_key(override): override for override in overrides}
    source = named.get("shapes", "").partition("=")[2].strip("\"'")
    if source == "engine" and SHAPES_KEY in named and "kernel" not in named:
        return with_kernel_of_checkpoint(overrides, named[SHAPES_KEY], folders)
    listed = source == "csv"
    if not listed or SHAPES_KEY not in named or {"kernel", "shapes.rows_of"} & set(named):
        return tuple(overrides)
    try:
        files = _files(named[SHAPES_KEY])
    except UserError:
        return tuple(overrides)  # the source reports the missing file
    kernels, found = _kernels(folders), dict[str, Path]()
    for path in files:
        kernel = family_of_file_name(path.name, kernels) or _kernel_of_rows(path, kernels)
        if kernel is not None:
            found.setdefault(kernel, path)
    return (*_one_kernel(found, "list"), *overrides)


def with_kernel_of_checkpoint(overrides: Sequence[str], path: str, folders: ConfigFolders) -> tuple[str, ...]:
    """The overrides, with the kernel of most linear layers of the model at `path` (`shapes.path=DIR`) first."""
    from gemmpipe.sources.model.engine import family_of_checkpoint  # not above: needed for this source only

    family = family_of_checkpoint(Path(path.partition("=")[2].strip("\"'")).expanduser())
    kernel = next((name for name, found in folders.kernels.items() if found == family), None)
    return tuple(overrides) if kernel is None else (f"kernel={kernel}", *overrides)


def _kernel_of_rows(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """The kernel by the column `family`, else by the other columns; None if they fit several kernels or none."""
    try:
        lines = read_cells(path)
        header = [name.lower() for name in next(lines, (0, []))[1]]
        if "family" not in header:
            possible = _matching_kernels(set(header), kernels, tuned=False)
            return possible[0] if len(possible) == 1 else None
        column = header.index("family")
        values = {row[column] for _, row in lines if len(row) == len(header)}
    except UserError:
        return None
    families = [option for option, family in kernels.items() if family.name in values]
    return families[0] if len(families) == 1 else None


def _one_kernel(found: Mapping[str, Path], what: str) -> list[str]:
    if len(found) > 1:
        (one, a), (other, b), *_ = found.items()
        raise UserError(f"kernel: {a} is a {what} of {one}, {b} one of {other}; expected {what}s of one kernel")
    return [f"kernel={name}" for name in found]


def _kernels(folders: ConfigFolders) -> dict[str, Family]:
    """All families, by the option of `kernel` with the family's name, else by its first option."""
    folders.make_importable()
    options: dict[str, str] = {}
    for option, name in folders.kernels.items():
        if option == name or name not in options:
            options[name] = option
    kernels = {}
    for name, option in options.items():
        # Errors of a user's broken module are reported when it is selected; shipped families raise.
        with contextlib.nullcontext() if name in shipped_families() else contextlib.suppress(Exception):
            kernels[option] = load_family(name)
    return kernels


def _files(override: str) -> list[Path]:
    """The files of a `table=`, `inputs=` or `shapes.path=` override; [] if its value is null or []."""
    value = OverridesParser.create().parse_override(override).value()
    texts = [str(getattr(item, "text", item)) for item in (value if isinstance(value, list) else [value])]
    return named_files(override_key(override), texts) if value not in (None, []) else []


def _check_same_kernel(
    typed: str, files: Sequence[Path], kernels: Mapping[str, Family], families: Mapping[str, str]
) -> None:
    """Refuse tables named for another family: their rows would be misread."""
    for path in files:
        named = family_of_file_name(path.name, kernels)
        if named is not None and families.get(typed, families[named]) != families[named]:
            raise UserError(
                f"kernel={typed}: {path} is by its name a table of {named}; leave kernel= out, or rename it"
            )


def _kernel_of_file(path: Path, kernels: Mapping[str, Family]) -> str | None:
    """The kernel by the file's name, else by its columns; None if it cannot be read, which is reported later."""
    named = family_of_file_name(path.name, kernels)
    if named is not None:
        return named
    try:
        header = {name.lower() for name in next(read_cells(path), (0, []))[1]}
    except UserError:
        return None
    possible = _matching_kernels(header, kernels, tuned=True)
    if len(possible) != 1:
        known = ", ".join(possible or kernels)
        raise UserError(f"kernel: missing, and the name of {path} has none; expected kernel= one of {known}")
    return possible[0]


def _matching_kernels(header: set[str], kernels: Mapping[str, Family], *, tuned: bool) -> list[str]:
    """The kernels with key columns that match the lower-case header; an untuned list may leave out dtypes."""
    families = list(kernels.values())
    return [option for option, family in kernels.items() if _is_key(family, header, families, tuned=tuned)]


def _is_key(family: Family, header: set[str], families: Sequence[Family], *, tuned: bool) -> bool:
    """True if the header has the required key columns of the family and none of other families'."""
    names = [{n.lower() for n in (column.name, *column.aliases)} for column in family.key_columns]
    columns = zip(names, family.key_columns, strict=True)
    needed = [
        n for n, column in columns if column.default is None and not column.optional and (tuned or column.kind == "int")
    ]
    of_keys = {n.lower() for other in families for c in other.key_columns for n in (c.name, *c.aliases)}
    return all(n & header for n in needed) and (header & of_keys) <= set().union(*names)
