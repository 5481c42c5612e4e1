"""The Python API: `gemmpipe.run` executes a pipeline in this process, `gemmpipe.load` reads a finished run."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.errors import EXIT_INTERRUPTED, GemmpipeError, UserError, short_repr
from gemmpipe.core.events import counted
from gemmpipe.core.files import MAX_MANIFEST_BYTES, read_object
from gemmpipe.core.paths import MANIFEST, REPORT, RUNS, SELECTIONS
from gemmpipe.core.shell import shell_join

if TYPE_CHECKING:
    import pandas as pd
    from omegaconf import DictConfig

    from gemmpipe.cli.request import RunRequest
    from gemmpipe.report.data import RunData
    from gemmpipe.report.diff import Difference, DiffRules

_TEXT_COLUMNS = ("format", "bucket", "layer", "error", "reason")
"""Columns in which an empty cell is an empty text, not a missing number."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run: its folder, selections, written files and exit code."""

    pipeline: str
    folder: Path
    """Absolute path; contains the journal, `manifest.json` and the tables as CSV."""
    exit_code: int
    """0: done; 1: a problem has no valid candidate, or a row is stale; 130: interrupted."""
    table: "pd.DataFrame" = field(repr=False, compare=False)
    """One row per problem (`format` "") and per bucket of a format: key columns, `libtype`, `config`, `us`
    (microseconds) and others. Where all problems were tuned already, the rows of their table. Empty if the pipeline
    selects nothing."""
    artifacts: tuple[Path, ...]
    """The files that inference engines load, as absolute paths."""
    unsolved: tuple[str, ...]
    """Problems without a valid candidate, or with a stale recorded one."""
    wall_s: float

    def read(self, name: str) -> "pd.DataFrame":
        """A table of the run by name: `problems`, `trials`, `selections` ... Raises UserError for an unknown one."""
        from gemmpipe.core.errors import suggest_or_list

        path = self.folder / f"{name}.csv"
        if not path.is_file():
            if self.exit_code == EXIT_INTERRUPTED:
                resume = shell_join(["gemmpipe", f"resume={self.folder}"])
                raise UserError(f"{self.folder}: no table '{name}' before the run is finished: {resume}")
            known = [each.stem for each in self.folder.glob("*.csv")]
            raise UserError(f"{self.folder}: no table '{name}'{suggest_or_list(name, known)}")
        return _table(path)

    @property
    def problems(self) -> "pd.DataFrame":
        """The problems: `problem` (the id), the key columns, `weight` (calls), `layer`."""
        return self.read("problems")

    @property
    def trials(self) -> "pd.DataFrame":
        """The last trial of every candidate, with those that were not tried: status, times in microseconds, error."""
        return self.read("trials")

    @property
    def selections(self) -> "pd.DataFrame":
        """The selections, which `table` is as well."""
        return self.table

    @property
    def products(self) -> "pd.DataFrame":
        """One row per product: the key, its choice, `us`, `library_us`, `speedup` over the library, `floor_us`."""
        return self._data().products

    def report(self, path: str | Path | None = None) -> Path:
        """Write the HTML report and return its path: `report.html` in the run's folder, unless `path` names a file.

        Raises UserError for a run without problems and EnvironmentProblem if the file cannot be written.
        """
        from gemmpipe.report import html

        page = self.folder / REPORT if path is None else _path("report", path)
        html.write(self._data(), page)
        return page

    def diff(self, before: "RunResult | str | Path", rules: "DiffRules | None" = None) -> "Difference":
        """The comparison of this run (after) with another run, a tuned table, "last" or "shipped" (before).

        `rules`: the options of the comparison. `print` shows the result as `gemmpipe diff` does.
        Raises UserError for a side that cannot be read or is of another kernel.
        """
        from gemmpipe.report.choices import read_sides
        from gemmpipe.report.diff import DiffRules, compare

        other = before.folder if isinstance(before, RunResult) else before
        if not isinstance(other, str | Path):
            raise UserError(f"diff: {short_repr(other)} given; expected a run, a table, 'last' or 'shipped'")
        return compare(*read_sides(str(other), str(self.folder), "diff"), rules or DiffRules())

    def _data(self) -> "RunData":
        from gemmpipe.report.reading import read_run

        return read_run(self.folder)

    def __repr__(self) -> str:
        own = self.table["format"].fillna("").eq("") if "format" in self.table else [True] * len(self.table)
        chosen, unsolved = counted(int(sum(own)), "choice"), f", {len(self.unsolved):,} unsolved" * bool(self.unsolved)
        return f"<gemmpipe {self.pipeline}: {chosen}{unsolved}, exit code {self.exit_code}, {self.folder}>"

    def _repr_html_(self) -> str:
        from gemmpipe.report.notebook import plain_run_html, run_html

        with contextlib.suppress(UserError):  # a run without problems, such as a merge
            return run_html(self._data())
        files = [str(file) for file in self.artifacts]
        return plain_run_html(self.pipeline, str(self.folder), self.exit_code, self.wall_s, files)


def _table(path: Path) -> "pd.DataFrame":
    import pandas as pd

    frame = pd.read_csv(path)
    texts = [name for name in _TEXT_COLUMNS if name in frame]
    return frame.assign(**{name: frame[name].astype(object).where(frame[name].notna(), "") for name in texts})


def run(
    pipeline: str | Path = "tune",
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    **options: object,
) -> RunResult:
    """Executes a pipeline as `gemmpipe PIPELINE key=value ...` does, in this process.

    `pipeline` is the name of a pipeline or the path of a recipe. `options` are overrides by key: scalars, paths, lists,
    None for null; a mapping sets the keys below its own (`search={"trial_fraction": 0.2}`). `overrides` are overrides
    as typed on the command line (`"timer@stages.bench.timer=quick"`); they come first. `config_dir` is a folder with
    the user's options and Python modules. Output goes to stdout and stderr as on the command line.

    Raises UserError for errors with exit code 2 on the command line, EnvironmentProblem for those with 3, and
    KeyboardInterrupt for an interrupted run. A run with unsolved problems returns a result with exit code 1.
    """
    from gemmpipe.cli.command_line import LINT, parse_command_line
    from gemmpipe.cli.commands import COMMANDS
    from gemmpipe.cli.lint import as_overrides
    from gemmpipe.cli.request import resolve_request

    if not isinstance(pipeline, str | Path):
        raise UserError(f"pipeline: {short_repr(pipeline)} given; expected a name such as 'tune', or a recipe's path")
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise UserError(f"overrides: {short_repr(overrides)} given; expected a list such as ['shapes.tp=4']")
    as_typed = list(map(_checked, overrides))
    by_key = [override for key, value in options.items() for override in _overrides(key, value)]
    flags = [] if config_dir is None else [f"--config-dir={config_dir}"]
    line = parse_command_line([*flags, str(pipeline), *as_typed, *by_key])
    if line.command in COMMANDS and line.command != LINT:
        raise UserError(f"{line.command}: makes no run; expected on the command line, or a method of the result")
    request = resolve_request(as_overrides(line) if line.command == LINT else line)
    if request.multirun:
        raise UserError(f"{pipeline}: a sweep; expected one run per call of gemmpipe.run")
    if request.pipeline == "doctor":
        raise UserError("doctor: makes no run; expected on the command line")
    folder, code = _run_here(request)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(str(folder))
    return _result(folder)


def load(run: str | Path = "last") -> RunResult:
    """The result of the finished run in a folder; for "last" of the newest one in `outputs/runs` that timed something.

    "last~1" is the one before it. Raises UserError if there is none.
    """
    from gemmpipe.report.last_run import ENDED, WITH_OWN_RESULTS, last_run, names_last

    if isinstance(run, str) and names_last(run):
        return _result(last_run(run, (WITH_OWN_RESULTS, ENDED), f"load: {run}", "the folder of a run"))
    folder = _path("load", run)
    if folder.is_file():
        raise UserError(f"load: {folder}: a file; expected the folder of a run (pandas.read_csv reads a table)")
    if not folder.is_dir():
        raise UserError(f"load: no folder {folder}; expected the folder of a run, or 'last'")
    return _result(folder)


def _path(argument: str, given: object) -> Path:
    """The path that a caller gives. Raises UserError for anything that is none."""
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"{argument}: {short_repr(given)} given; expected a path, or 'last'")
    try:
        return Path(given).expanduser()
    except RuntimeError:  # ~USER of an unknown user
        raise UserError(f"{argument}: {given}: no such home directory; expected a path") from None


def _result(folder: Path) -> RunResult:
    import pandas as pd

    from gemmpipe.report.run_folder import REUSED

    folder = folder.absolute()
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder}: no {MANIFEST}; expected a finished run (resume= continues an unfinished one)")
    manifest = read_object(path, MAX_MANIFEST_BYTES)
    tables = [path for name in (SELECTIONS, REUSED) if (path := folder / name).is_file()]
    try:
        return RunResult(
            pipeline=str(manifest["pipeline"]),
            folder=folder,
            exit_code=int(str(manifest["exit_code"])),
            table=_table(tables[0]) if tables else pd.DataFrame(),
            artifacts=tuple(_started_in(folder) / str(file) for file in _listed(manifest["files"])),
            unsolved=tuple(map(str, _listed(manifest["unsolved"]))),
            wall_s=float(str(manifest["wall_s"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a run's manifest ({error}); expected one that gemmpipe wrote") from None


def _listed(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _started_in(folder: Path) -> Path:
    """The working directory of a run, to which paths in its manifest are relative."""
    return next((path for path in folder.parents if folder.is_relative_to(path / RUNS)), Path.cwd())


def _run_here(request: "RunRequest") -> tuple[Path, int]:
    """Composes and executes one run; returns its folder and exit code. Raises GemmpipeError for any failure."""
    from gemmpipe.cli.compose import run_hydra
    from gemmpipe.cli.hydra_errors import CONFIG_ERRORS, as_user_error
    from gemmpipe.cli.runs import removing_empty_folders

    ended: list[tuple[Path, int] | GemmpipeError] = []
    folders = [] if request.folders.config_dir is None else [f"--config-dir={request.folders.config_dir}"]
    argv = [*folders, f"--config-name={request.pipeline}", *request.overrides]
    try:
        with removing_empty_folders(RUNS / request.pipeline), _without_main_module(), _own_hydra():
            run_hydra(argv, partial(_job, request, ended))
    except CONFIG_ERRORS as error:
        raise as_user_error(error, request.folders.options, request.overrides, request.recipe) from error
    (end,) = ended
    if isinstance(end, GemmpipeError):
        raise end
    return end


def _job(request: "RunRequest", ended: list[tuple[Path, int] | GemmpipeError], cfg: "DictConfig") -> None:
    """Appends the outcome of the run to `ended`, also an error: Hydra would print overrides if the run raised."""
    from hydra.core.hydra_config import HydraConfig

    from gemmpipe.cli.errors import as_bug, system_error
    from gemmpipe.cli.job import execute
    from gemmpipe.cli.runs import remove_empty_run

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        ended.append((folder, execute(cfg, request, folder)))
        return
    except GemmpipeError as error:
        ended.append(error)
    except OSError as error:
        ended.append(_caused(system_error(error), error))
    except Exception as error:  # noqa: BLE001 (as the command line does; the cause has the traceback)
        ended.append(_caused(as_bug(error, request.folders.config_dir), error))
    remove_empty_run(folder)


def _caused(error: GemmpipeError, cause: Exception) -> GemmpipeError:
    error.__cause__ = cause
    return error


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps worker processes from importing the running script, so that it needs no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    kept = {name: vars(main)[name] for name in names if name in vars(main)}
    for name in kept:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


@contextlib.contextmanager
def _own_hydra() -> Iterator[None]:
    """Saves and restores the state of Hydra, for programs that use it themselves."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    instance, config = GlobalHydra.instance(), HydraConfig.instance()
    kept = (instance.hydra, config.cfg)
    instance.hydra = None
    try:
        yield
    finally:
        instance.hydra, config.cfg = kept


def _checked(override: object) -> str:
    """The override as typed. Raises UserError for a flag, an argument without `=`, and anything but a text."""
    if not isinstance(override, str):
        raise UserError(f"overrides: {short_repr(override)} given; expected texts such as 'shapes.tp=4'")
    if override.startswith("-") or ("=" not in override and not override.startswith("~")):
        raise UserError(f"{override}: expected key=value")
    return override


def _overrides(key: str, value: object) -> list[str]:
    """The overrides of a keyword argument: a mapping sets the keys below its own."""
    if isinstance(value, Mapping) and value:
        return [each for name, item in value.items() for each in _overrides(f"{key}.{name}", item)]
    return [f"{key}={_text(key, value)}"]


def _text(key: str, value: object) -> str:
    """A value in Hydra's grammar. Raises UserError for an unsupported type."""
    from gemmpipe.cli.overrides import quote

    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return quote(str(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return f"[{','.join(_text(key, item) for item in value)}]"
    raise UserError(f"{key}: {type(value).__name__} given, expected text, a number, a list, a mapping or None")
