"""From the words of a command line to an exit code."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe import __version__
from gemmpipe.cli import (
    STDOUT,
    escape_unencodable,
    naming_write_errors,
    silence_lost_streams,
    tolerating_closed_pipes,
)
from gemmpipe.cli.command_line import LINT, CommandLine, parse_command_line
from gemmpipe.cli.errors import EXIT_INTERRUPTED, report_bug, report_error, system_error
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.help import help_text, help_topics, topic_help
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, UserError
from gemmpipe.core.paths import RUNS, is_in_runs_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gemmpipe.cli.request import RunRequest


def main(argv: Sequence[str]) -> int:
    """Do what the words say and return the exit code: 0, 1, 2, 3 or 130."""
    escape_unencodable()
    try:
        return _dispatch(argv)
    except GemmpipeError as error:
        return report_error(error)
    except KeyboardInterrupt as stopped:
        with tolerating_closed_pipes():
            print("; ".join(["gemmpipe: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_lost_streams()
        return 0
    except OSError as error:
        silence_lost_streams()
        return report_error(system_error(error), error)
    except Exception as error:  # noqa: BLE001 (the last line of defence)
        return report_bug(error)


def _dispatch(argv: Sequence[str]) -> int:
    line = parse_command_line(argv)
    if not argv or line.has("--help"):
        folders = ConfigFolders(config_dir=line.config_dir)
        text = "\n".join(topic_help(word, folders) for word in help_topics(line, folders)) or help_text(folders)
        with naming_write_errors(STDOUT):
            print(text)
        return 0
    if line.has("--version"):
        with naming_write_errors(STDOUT):
            print(f"gemmpipe {__version__}")
        return 0
    if line.has("--shell-completion"):
        with naming_write_errors(STDOUT):
            return _complete(line)
    if line.command == LINT:
        from gemmpipe.cli.lint import as_overrides, check_files, is_static

        if is_static(line):
            return check_files(line)
        line = as_overrides(line)
    from gemmpipe.cli.request import resolve_request

    request = resolve_request(line)
    return _compose(line, request)


def _complete(line: CommandLine) -> int:
    from gemmpipe.cli import compose
    from gemmpipe.cli.compose import run_hydra

    typed, current = compose.typed_line(os.environ)
    if not compose.is_query(line):
        if line.overrides not in compose.SCRIPTS:
            raise UserError("-sc: expected install=bash, zsh or fish, or uninstall=")
        run_hydra(["--shell-completion", *line.overrides], _skip_job)
        return 0
    folders = ConfigFolders(config_dir=typed.config_dir)
    for word in compose.own_suggestions(typed, current, folders):
        print(word)
    if compose.is_flag(typed, current):
        return 0
    compose.pass_to_hydra(typed, current)
    pipeline = typed.command if typed.command in folders.pipelines else "tune"
    where = [f"--config-dir={folders.config_dir}"] if folders.config_dir else []
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_hydra(["--shell-completion", f"--config-name={pipeline}", *where, *line.overrides], _skip_job)
    print(compose.filter_suggestions(said.getvalue()), end="")
    return 0


def _skip_job(cfg: "DictConfig") -> None:
    """Completion runs nothing."""


def _job(request: "RunRequest", codes: list[int]) -> "Callable[[DictConfig], int]":
    """What Hydra runs once or for each job of a sweep, here or elsewhere; the codes of those here are kept."""
    from gemmpipe.cli.job import run_job
    from gemmpipe.cli.sweep import is_submitted, process_name, run_submitted
    from gemmpipe.core.signals import stop_with_sweep

    sweep = process_name()

    def job(cfg: "DictConfig") -> int:
        if is_submitted(sweep):
            return run_submitted(lambda: run_job(cfg, request))
        with stop_with_sweep():
            codes.append(run_job(cfg, request))
        return codes[-1]

    return job


def _compose(line: CommandLine, request: "RunRequest") -> int:
    """Let Hydra compose and run; the worst exit code of all runs is returned."""
    from gemmpipe.cli.compose import run_hydra
    from gemmpipe.cli.errors import as_user_error, config_errors
    from gemmpipe.cli.job import check_job
    from gemmpipe.cli.overrides import override_key
    from gemmpipe.cli.runs import removing_empty_folders
    from gemmpipe.cli.sweep import submitted_sweep

    codes: list[int] = []
    part, said = line.value("--package"), io.StringIO()
    try:
        with (
            naming_write_errors(STDOUT if line.has("--cfg") or line.has("--info") else _run_folders(request)),
            removing_empty_folders(RUNS / request.pipeline),
            contextlib.redirect_stderr(said) if part else contextlib.nullcontext(),
            submitted_sweep(request.overrides if request.multirun else ()),
        ):
            argv = [*_hydra_argv(line, request), *request.overrides]
            codes += run_hydra(argv, _job(request, codes), partial(check_job, request=request))
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(*_resume_hints(stopped, request)) from None
    except SystemExit:
        if not part:
            raise
        # Hydra's way to say that there is no such part.
        raise UserError(f"--package {part}: no such part of the configuration; expected one such as space") from None
    except config_errors() as error:
        raise as_user_error(error, request.folders.options, request.overrides, request.recipe) from error
    except RuntimeError as error:  # jobs' own are told by then; a launcher that finds no SLURM here, say
        launcher = next((word for word in request.overrides if override_key(word) == "hydra/launcher"), None)
        if launcher is None:
            raise
        raise EnvironmentProblem(f"{launcher}: {error}") from error
    return max(codes, default=0)


def _run_folders(request: "RunRequest") -> str:
    """Where Hydra writes what was typed for a run, or for a sweep."""
    from gemmpipe.cli.overrides import override_key

    key = "hydra.sweep.dir" if request.multirun else "hydra.run.dir"
    typed = [word.partition("=")[2].strip("\"'") for word in request.overrides if override_key(word) == key]
    return typed[-1] if typed else str(RUNS / request.pipeline)


def _resume_hints(stopped: KeyboardInterrupt, request: "RunRequest") -> list[str]:
    """How to go on with what was stopped; `last` would be an earlier run where this one had not begun."""
    line = _resume_command(stopped.args[0], request) if stopped.args else ""
    if not request.multirun:
        return [f"{line} goes on"] if line else []
    if any(word.startswith("hydra/launcher=submitit") for word in request.overrides):
        return []  # told by then: the jobs are not stopped
    this = f"{line} goes on with this run, then " if line else ""
    return [f"{this}the same line does what is left of the sweep"]


def _resume_command(run_dir: Path, request: "RunRequest") -> str:
    """The line that goes on with a run, quoted: the last one where runs are looked for, else by its folder."""
    from gemmpipe.pipeline.report import resume_line

    if is_in_runs_folder(run_dir):
        return "'gemmpipe resume=last'"
    return f'"{resume_line(run_dir, request.folders.python_path)}"'


def _hydra_argv(line: CommandLine, request: "RunRequest") -> list[str]:
    """The flags, with what a recipe or an earlier run has its say in."""
    flags = [flag for flag in line.argv if not flag.startswith(("--config-dir", "--multirun"))]
    if request.multirun:
        flags.append("--multirun")
    if request.folders.config_dir:
        flags.append(f"--config-dir={request.folders.config_dir}")
    return [*flags, f"--config-name={request.pipeline}"]
