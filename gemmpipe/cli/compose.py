"""Runs Hydra: with our pipelines on its search path, its errors raised, and all jobs of a sweep checked first.

Shell completion is Hydra's as well, on a line without our first argument, the pipeline.
"""

import contextlib
import copy
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.cli.command_line import CHOICES, FLAGS, CommandLine, long_form, parse_command_line
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.old_keys import read_old_keys
from gemmpipe.cli.runs import remove_empty_sweep
from gemmpipe.core.errors import GemmpipeError
from gemmpipe.core.paths import shipped

_FULL_ERROR_VARIABLE = "HYDRA_FULL_ERROR"
_NOTHING_SWEPT = "warning: -m: nothing is swept; a sweep has values with commas, as in -m search=halving,exhaustive"

SCRIPTS = {(f"{verb}={shell}",) for verb in ("install", "uninstall") for shell in ("bash", "zsh", "fish")}
"""The arguments after `-sc` that print a shell's script."""
_LINE = "COMP_LINE"

Check = Callable[[DictConfig, Path], object]
"""(configuration of a job of a sweep, its folder): raises an error in the configuration."""


class PipelineSearchPath(SearchPathPlugin):
    """Adds the folder of the pipelines to that of the options."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("gemmpipe", f"file://{shipped('pipelines')}")


@contextmanager
def _collect_job_results() -> Iterator[list[Any]]:
    """Yields the results of a sweep's jobs, also of those that a launcher runs elsewhere: Hydra's main drops them.

    Removes the folder of a sweep if no job of it began.
    """
    found: list[Any] = []
    multirun = Hydra.multirun

    def keeping(self: Hydra, *overrides: Any, **named: Any) -> Any:
        batches = multirun(self, *overrides, **named)
        jobs = [job for batch in batches or () for job in batch]
        found.extend(job.return_value for job in jobs)
        for folder in {Path(j.hydra_cfg.hydra.runtime.output_dir).parent for j in jobs if j.hydra_cfg is not None}:
            remove_empty_sweep(folder)
        return batches

    Hydra.multirun = keeping  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Hydra.multirun = multirun  # type: ignore[method-assign]


@contextmanager
def _mode_by_flags(argv: Sequence[str]) -> Iterator[None]:
    """Let `-m` alone decide between a run and a sweep, where nothing else can.

    Hydra composes the whole configuration once more to find `hydra.mode`, which no shipped file sets: that takes half
    of the time until a run begins. A user's folder or override may set it.
    """
    if any(argument.startswith(("--config-dir", "-cd")) or "hydra.mode" in argument for argument in argv):
        yield
        return
    get_mode = Hydra.get_mode
    Hydra.get_mode = lambda self, *names, **overrides: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = get_mode  # type: ignore[method-assign]


@contextmanager
def _check_all_jobs_first(check: Check) -> Iterator[None]:
    """Call `check` on all jobs of a sweep before the first is launched, where Hydra composes them.

    Removes the folder of the sweep if a job is refused.
    """
    composing = Sweeper.validate_batch_is_legal

    def checking(self: Any, batch: Sequence[Sequence[str]]) -> None:
        before = HydraConfig.instance().cfg
        _warn_of_single_job(self)
        try:
            for number, overrides in enumerate(batch):
                check(
                    *_launched_config(
                        self.hydra_context.config_loader.load_sweep_config(self.config, [*overrides]), number
                    )
                )
        except BaseException:
            remove_empty_sweep(Path(self.config.hydra.sweep.dir))
            raise
        finally:
            HydraConfig.instance().cfg = before

    Sweeper.validate_batch_is_legal = checking  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = composing  # type: ignore[method-assign]


def _warn_of_single_job(sweeper: Any) -> None:
    """Warn if -m sweeps nothing: a comma is missing, or is within brackets, which make a list."""
    chosen = sweeper.config.hydra.runtime.choices
    if any(chosen[f"hydra/{each}"] != "basic" for each in ("sweeper", "launcher")):  # others need -m for one run too
        return
    if sum(map(len, sweeper.overrides)) == 1:
        with tolerating_closed_pipes():
            print(_NOTHING_SWEPT, file=sys.stderr, flush=True)


def _launched_config(cfg: DictConfig, number: int) -> tuple[DictConfig, Path]:
    """A job's configuration and its folder (not created), as a launcher would have them."""
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.id, cfg.hydra.job.num = number, number
    HydraConfig.instance().set_config(cfg)  # values may refer to it
    folder = Path(str(OmegaConf.select(cfg, "hydra.sweep.dir")), str(OmegaConf.select(cfg, "hydra.sweep.subdir")))
    task = copy.deepcopy(cfg)
    with read_write(task), open_dict(task):
        del task["hydra"]
    return task, folder


def run_hydra(argv: Sequence[str], job: Callable[[DictConfig], object], check: Check | None = None) -> list[Any]:
    """Run Hydra's main on `argv` and return the results of a sweep's jobs; all pass `check` before the first runs.

    Raises CONFIG_ERRORS of `cli.hydra_errors`, and the errors of `job` and `check`.
    """
    Plugins.instance().register(PipelineSearchPath)
    read_old_keys()
    overrides, before = sys.argv, os.environ.get(_FULL_ERROR_VARIABLE)
    sys.argv = [overrides[0], *argv]
    os.environ[_FULL_ERROR_VARIABLE] = "1"  # the only way to get exceptions instead of several printed lines
    try:
        checked = _check_all_jobs_first(check) if check else contextlib.nullcontext()
        with _mode_by_flags(argv), _collect_job_results() as returned, checked:
            hydra.main(config_path=str(shipped("conf")), config_name="tune", version_base="1.3")(job)()
    finally:
        sys.argv = overrides
        os.environ.pop(_FULL_ERROR_VARIABLE)
        if before is not None:
            os.environ[_FULL_ERROR_VARIABLE] = before
    return returned


def is_query(line: CommandLine) -> bool:
    """True if a shell asks for completions of its line."""
    return line.has("--shell-completion") and any(argument.startswith("query=") for argument in line.overrides)


def typed_line(environ: Mapping[str, str]) -> tuple[CommandLine, str]:
    """The incomplete line, parsed as far as possible, and the argument under the cursor ("" for a new one)."""
    text = environ.get(_LINE, "")
    arguments = text.split()[1:]
    current = arguments.pop() if arguments and not text.endswith(" ") else ""
    if arguments and arguments[-1].startswith("-") and long_form(arguments[-1]) in CHOICES:
        return CommandLine(flags=((long_form(arguments[-1]), None),), command=None, overrides=()), current
    try:
        return parse_command_line(arguments), current
    except GemmpipeError:
        return CommandLine(
            flags=(), command=None, overrides=tuple(w for w in arguments if not w.startswith("-"))
        ), current


def is_flag(line: CommandLine, current: str) -> bool:
    """True if the argument under the cursor is a flag, or the value of one."""
    needs_value = bool(line.flags) and line.flags[-1][1] is None and line.flags[-1][0] in CHOICES
    return needs_value or current.startswith("-")


def own_suggestions(line: CommandLine, current: str, folders: ConfigFolders) -> list[str]:
    """Completions that Hydra does not offer: flags, their values, pipelines, options of a `group@key`."""
    if is_flag(line, current):
        found: Iterable[str] = FLAGS if current.startswith("-") else CHOICES[line.flags[-1][0]]
    elif "@" in current and "=" in current:  # timer@stages.bench.timer=
        key = current.partition("=")[0]
        found = [f"{key}={name}" for name in folders.options.get(key.partition("@")[0], ())]
    elif line.command is not None or line.overrides or "=" in current:
        found = ()
    else:
        found = folders.pipelines
    return sorted(argument for argument in found if argument.startswith(current))


def pass_to_hydra(line: CommandLine, current: str) -> None:
    """Rewrite the line that Hydra's completion reads: its own flags and overrides only."""
    mode = ["-m"] if line.has("--multirun") else []
    os.environ[_LINE] = " ".join(["gemmpipe", *mode, *line.overrides, current])


def filter_suggestions(arguments: str) -> str:
    """Hydra's suggestions without `_target_` keys, set in files only, and options that only others include."""
    return re.sub(r"\S*_target_=\S*[ \t]*|[\w@./]+=_\w+[ \t]*", "", arguments)
