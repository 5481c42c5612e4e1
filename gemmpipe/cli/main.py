"""From command-line arguments to an exit code."""

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
from gemmpipe.cli.command_line import CommandLine, parse_command_line
from gemmpipe.cli.commands import command_of, load_command
from gemmpipe.cli.errors import print_notices, report_bug, report_error, system_error
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.help import help_text, help_topics, topic_help
from gemmpipe.core.errors import EXIT_INTERRUPTED, EnvironmentProblem, GemmpipeError, UserError, printable, shortened
from gemmpipe.core.paths import RUNS, is_in_runs_folder
from gemmpipe.core.shell import shell_join
from gemmpipe.core.text_table import fold_width, terminal_width
from gemmpipe.report.lines import Line, folded

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gemmpipe.cli.request import RunRequest
    from gemmpipe.cli.sweep_table import SweepJob


def main(argv: Sequence[str]) -> int:
    """Run the command of `argv` and return its exit code: 0, 1, 2, 3 or 130."""
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
    except Exception as error:  # noqa: BLE001 (reported as a bug)
        return report_bug(error)


def _dispatch(argv: Sequence[str]) -> int:
    line = parse_command_line(argv)
    if not argv or line.has("--help"):
        folders = ConfigFolders(config_dir=line.config_dir)
        text = "\n".join(topic_help(topic, folders) for topic in help_topics(line, folders)) or help_text(
            folders, terminal_width()
        )
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
    if (command := command_of(line)) is not None:
        result = load_command(command).run(line)
        if isinstance(result, int):
            return result
        line = result
    from gemmpipe.cli.request import resolve_request

    request = resolve_request(line)
    _announce(line, request)
    return _compose(line, request)


_MAX_ANNOUNCED = 300
"""Characters of the line that names what runs."""
_WITHOUT_RUN = ("--cfg", "--info", "--hydra-help")


def _is_for_a_program(request: "RunRequest") -> bool:
    """True if standard output has one JSON object per line."""
    from gemmpipe.cli.overrides import override_key

    return any(override_key(override) == "events" for override in request.overrides)


def _announce(line: CommandLine, request: "RunRequest") -> None:
    """Print what is about to run: composing and the first imports take seconds on a busy machine."""
    if any(map(line.has, _WITHOUT_RUN)) or _is_for_a_program(request):
        return
    shown = [override for override in request.overrides if not override.startswith("hydra.")]  # a resumed run's folder
    text = printable(shell_join([request.pipeline, *shown]))
    announced = Line(text=shortened(f"gemmpipe {__version__}: {text}", _MAX_ANNOUNCED))
    width = fold_width(sys.stdout)
    # A report that cannot be written is a failure; a run continues.
    with naming_write_errors(STDOUT) if request.pipeline == "doctor" else tolerating_closed_pipes():
        for part in [announced] if width is None else folded(announced, width):
            print(part.text, flush=True)


def _complete(line: CommandLine) -> int:
    from gemmpipe.cli import compose  # not above: imports Hydra

    typed, current = compose.typed_line(os.environ)
    if not compose.is_query(line):
        if line.overrides not in compose.SCRIPTS:
            raise UserError("-sc: expected install=bash, zsh or fish, or uninstall=")
        compose.run_hydra(["--shell-completion", *line.overrides], _skip_job)
        return 0
    folders = ConfigFolders(config_dir=typed.config_dir)
    for suggestion in compose.own_suggestions(typed, current, folders):
        print(suggestion)
    if compose.is_flag(typed, current):
        return 0
    compose.pass_to_hydra(typed, current)
    pipeline = typed.command if typed.command in folders.pipelines else "tune"
    where = [f"--config-dir={folders.config_dir}"] if folders.config_dir else []
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        compose.run_hydra(["--shell-completion", f"--config-name={pipeline}", *where, *line.overrides], _skip_job)
    print(compose.filter_suggestions(output.getvalue()), end="")
    return 0


def _skip_job(cfg: "DictConfig") -> None:
    """The job of a completion: nothing to run."""


def _job(request: "RunRequest", codes: list[int], jobs: "list[tuple[SweepJob, int]]") -> "Callable[[DictConfig], int]":
    """The function that Hydra runs once, or per job of a sweep, in any process.

    `codes` and `jobs` get those of this process.
    """
    from gemmpipe.cli.job import run_job
    from gemmpipe.cli.sweep import is_submitted, process_name, run_submitted
    from gemmpipe.cli.sweep_table import begin_job
    from gemmpipe.core.signals import stop_with_sweep

    sweep = process_name()

    def job(cfg: "DictConfig") -> int:
        if is_submitted(sweep):
            return run_submitted(lambda: run_job(cfg, request))
        started = begin_job() if request.multirun and not _is_for_a_program(request) else None
        with stop_with_sweep():
            codes.append(run_job(cfg, request))
        if started is not None:
            jobs.append((started, codes[-1]))
        return codes[-1]

    return job


def _compose(line: CommandLine, request: "RunRequest") -> int:
    """Compose and run through Hydra; returns the worst exit code of all runs."""
    from gemmpipe.cli.compose import run_hydra
    from gemmpipe.cli.hydra_errors import CONFIG_ERRORS, as_user_error
    from gemmpipe.cli.job import check_job
    from gemmpipe.cli.overrides import override_key
    from gemmpipe.cli.runs import removing_empty_folders
    from gemmpipe.cli.sweep import submitted_sweep
    from gemmpipe.cli.sweep_table import print_table

    codes: list[int] = []
    jobs: list[tuple[SweepJob, int]] = []
    part, discarded = line.value("--package"), io.StringIO()
    try:
        with (
            naming_write_errors(STDOUT if line.has("--cfg") or line.has("--info") else _run_folders(request)),
            removing_empty_folders(RUNS / request.pipeline),
            contextlib.redirect_stderr(discarded) if part else contextlib.nullcontext(),
            submitted_sweep(request.overrides if request.multirun else ()),
        ):
            argv = [*_hydra_argv(line, request), *request.overrides]
            codes += run_hydra(argv, _job(request, codes, jobs), partial(check_job, request=request))
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(*_resume_hints(stopped, request)) from None
    except SystemExit:
        if not part:
            raise
        # Hydra exits if there is no such part.
        raise UserError(f"--package {part}: no such part of the configuration; expected one such as space") from None
    except CONFIG_ERRORS as error:
        raise as_user_error(error, request.folders.options, request.overrides, request.recipe) from error
    except RuntimeError as error:  # not a job's, those are reported by then; such as a launcher that finds no SLURM
        launcher = next(
            (override for override in request.overrides if override_key(override) == "hydra/launcher"), None
        )
        if launcher is None:
            raise
        raise EnvironmentProblem(f"{launcher}: {error}") from error
    if any(map(line.has, _WITHOUT_RUN)):  # a run prints them itself
        with tolerating_closed_pipes():
            print_notices()
    print_table(jobs)
    return max(codes, default=0)


def _run_folders(request: "RunRequest") -> str:
    """The folder where Hydra records the overrides of a run or a sweep."""
    from gemmpipe.cli.overrides import override_key

    key = "hydra.sweep.dir" if request.multirun else "hydra.run.dir"
    typed = [override.partition("=")[2].strip("\"'") for override in request.overrides if override_key(override) == key]
    return typed[-1] if typed else str(RUNS / request.pipeline)


def _resume_hints(stopped: KeyboardInterrupt, request: "RunRequest") -> list[str]:
    """How to resume an interrupted run or sweep; empty for a run that had not begun (`last` would be another run)."""
    line = _resume_command(stopped.args[0], request) if stopped.args else ""
    if not request.multirun:
        return [f"resume with {line}"] if line else []
    if any(override.startswith("hydra/launcher=submitit") for override in request.overrides):
        return []  # its jobs keep running, which is reported by then
    this = f"resume this run with {line}, then " if line else ""
    return [f"{this}run the same command for the rest of the sweep"]


def _resume_command(run_dir: Path, request: "RunRequest") -> str:
    """The command that resumes a run, quoted: `last` for a run in the runs folder, else its path."""
    from gemmpipe.pipeline.summary import resume_line

    if is_in_runs_folder(run_dir):
        return "'gemmpipe resume=last'"
    return f'"{resume_line(run_dir, request.folders.python_path)}"'


def _hydra_argv(line: CommandLine, request: "RunRequest") -> list[str]:
    """The flags for Hydra; a recipe or an earlier run may add --multirun, --config-dir and the pipeline."""
    flags = [flag for flag in line.argv if not flag.startswith(("--config-dir", "--multirun"))]
    if request.multirun:
        flags.append("--multirun")
    if request.folders.config_dir:
        flags.append(f"--config-dir={request.folders.config_dir}")
    return [*flags, f"--config-name={request.pipeline}"]
