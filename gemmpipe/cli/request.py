"""What a command line asks for, once recipes and earlier runs are read: one pipeline and its overrides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.cli.aiter_words import check_words
from gemmpipe.cli.argv import CommandLine, is_recipe
from gemmpipe.cli.chosen import check_choices
from gemmpipe.cli.earlier import EarlierRun, find
from gemmpipe.cli.folders import Folders
from gemmpipe.cli.nesting import MOST_DEEP, is_too_deep
from gemmpipe.cli.words import key_of, quote, readable
from gemmpipe.config import ROOT
from gemmpipe.errors import UserError, nearest
from gemmpipe.paths import shipped
from gemmpipe.recipe import read_recipe

_DEFAULT = "tune"
_EARLIER = ("resume", "reuse")
_TIMED = ("kernel", "shapes", "space", "search", "device", "backend", "stages.screen", "stages.bench")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One pipeline, its overrides in Hydra's grammar, and where they come from."""

    pipeline: str
    overrides: tuple[str, ...]
    multirun: bool
    folders: Folders
    recipe: str
    """The recipe's path, or nothing."""
    typed: frozenset[str]
    """The keys that stand on the command line itself."""


def understand(line: CommandLine) -> Request:
    """Read what the words refer to. Raises UserError for a pipeline, recipe or run that is not there."""
    folders = Folders(config_dir=line.config_dir)
    groups = frozenset(folders.options)
    pipeline, words, multirun = line.first, line.words, line.has("--multirun")
    recipe = None
    if line.first is not None and is_recipe(line.first):
        recipe = read_recipe(Path(line.first).expanduser(), groups)
        pipeline, words = recipe.pipeline, _later_wins((*recipe.overrides, *line.words))
        multirun = multirun or recipe.multirun
    run, words = _with_earlier(words, pipeline, folders.config_dir is not None)
    if run is not None:
        if multirun and any(word.startswith("resume=") for word in words):
            raise UserError("resume: goes on with one run; leave -m out")
        pipeline = pipeline or run.pipeline
        folders = folders if folders.config_dir else Folders(config_dir=run.config_dir)
    pipeline = pipeline or _DEFAULT
    folders.check()
    if pipeline not in folders.pipelines:
        raise UserError(f"{pipeline}: no such pipeline{_instead(pipeline, folders)}")
    where = "" if recipe is None else f"{recipe.path}: "
    _check_words(words, line.words, folders, where)
    try:
        overrides = _overrides(words, multirun, folders)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    if not multirun:
        overrides = _with_kernel(overrides, folders, pipeline)
    return Request(
        pipeline=pipeline,
        overrides=overrides,
        multirun=multirun,
        folders=folders,
        recipe=str(recipe.path) if recipe else "",
        typed=frozenset(key_of(word) for word in line.words),
    )


def _overrides(words: Sequence[str], multirun: bool, folders: Folders) -> tuple[str, ...]:
    """The words as Hydra can read them. Raises UserError for one that it cannot, or that chooses no option by name."""
    for word in words:
        if is_too_deep(word):
            raise UserError(f"{key_of(word)[:60]}: nested more than {MOST_DEEP} deep; expected key=value")
    overrides = readable(_later_wins(words), multirun=multirun)
    check_choices(overrides, folders.options)
    return overrides


def _check_words(words: Sequence[str], typed: Sequence[str], folders: Folders, recipe: str) -> None:
    """Raises UserError for words of aiter's; with the recipe in front that has them."""
    check_words(typed, folders.options)
    try:
        check_words(words, folders.options)
    except UserError as error:
        raise UserError(f"{recipe}{error}") from None


def _with_kernel(words: tuple[str, ...], folders: Folders, pipeline: str) -> tuple[str, ...]:
    """The overrides with the kernel that the files among them tell, where none is typed."""
    keys = set(map(key_of, words))
    if keys & {"table", "inputs"}:
        from gemmpipe.cli.tables import with_kernel

        return with_kernel(words, folders)
    # A pipeline of the user's own may well name the kernel itself.
    if "shapes.path" in keys and folders.pipelines[pipeline].parent == shipped("pipelines"):
        from gemmpipe.cli.tables import with_kernel_of_shapes

        return with_kernel_of_shapes(words, folders)
    return words


def _instead(word: str, folders: Folders) -> str:
    """What was meant by a first word that names no pipeline."""
    if word.lower().endswith(".csv"):  # as other tuners take it
        return f"; a file of shapes is 'shapes=csv shapes.path={word}', a tuned one 'verify table={word}'"
    if word.split(".")[0].split("@")[0] in {*folders.options, *ROOT}:
        return f"; expected {word}=VALUE"
    return nearest(word, folders.pipelines)


def _with_earlier(
    words: Sequence[str], pipeline: str | None, config_dir_typed: bool
) -> tuple[EarlierRun | None, tuple[str, ...]]:
    """The words with those of the run that `resume=` or `reuse=` names in front, so that later words win."""
    asked = [(key_of(word), word.split("=", 1)[1]) for word in words if "=" in word and key_of(word) in _EARLIER]
    asked = [(key, value.strip("\"'")) for key, value in asked if value not in {"", "null"}]
    if not asked:
        return None, tuple(words)
    if len(asked) > 1:
        raise UserError("resume and reuse: expected one of them")
    key, value = asked[0]
    run = find(key, value, pipeline, config_dir_typed)
    rest = [word for word in words if key_of(word) != key]
    place = [f"{key}={quote(str(run.folder))}"]
    forgotten = set(_EARLIER)
    if key == "resume":
        forgotten = {"resume"}  # what it reused, it still does
        _same_configuration(rest, run)
        place += [f"hydra.run.dir={quote(str(run.folder))}", "hydra.output_subdir=null"]
    kept = [word for word in run.overrides if key_of(word) not in forgotten]
    return run, (*kept, *rest, *place)


def _same_configuration(words: Sequence[str], run: EarlierRun) -> None:
    """Refuse words that would change what an unfinished run times: its journal would mix two runs."""
    for word in words:
        if key_of(word).startswith(_TIMED) and word not in run.overrides:
            raise UserError(f"resume: {word}: a run goes on with its own configuration; start anew, or reuse= it")


def _later_wins(words: Sequence[str]) -> tuple[str, ...]:
    """Of several overrides of one key the last one."""
    last = {key_of(word): index for index, word in enumerate(words)}
    return tuple(word for index, word in enumerate(words) if last[key_of(word)] == index)
