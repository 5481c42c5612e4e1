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
from gemmpipe.cli import completion
from gemmpipe.cli.argv import LINT, CommandLine, sort_words
from gemmpipe.cli.folders import Folders
from gemmpipe.cli.reports import INTERRUPTED, of_the_machine, report, report_bug
from gemmpipe.cli.streams import STDOUT, any_text_may_be_said, readers_may_leave, silence_the_lost, writing
from gemmpipe.cli.usage import about, asked_about, usage
from gemmpipe.errors import EnvironmentProblem, GemmpipeError, UserError
from gemmpipe.paths import RUNS, is_among_runs

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gemmpipe.cli.request import Request


def main(argv: Sequence[str]) -> int:
    """Do what the words say and return the exit code: 0, 1, 2, 3 or 130."""
    any_text_may_be_said()
    try:
        return _dispatch(argv)
    except GemmpipeError as error:
        return report(error)
    except KeyboardInterrupt as stopped:
        with readers_may_leave():
            print("; ".join(["gemmpipe: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        silence_the_lost()
        return 0
    except OSError as error:
        silence_the_lost()
        return report(of_the_machine(error), error)
    except Exception as error:  # noqa: BLE001 (the last line of defence)
        return report_bug(error)


def _dispatch(argv: Sequence[str]) -> int:
    line = sort_words(argv)
    if not argv or line.has("--help"):
        folders = Folders(config_dir=line.config_dir)
        text = "\n".join(about(word, folders) for word in asked_about(line, folders)) or usage(folders)
        with writing(STDOUT):
            print(text)
        return 0
    if line.has("--version"):
        with writing(STDOUT):
            print(f"gemmpipe {__version__}")
        return 0
    if line.has("--shell-completion"):
        with writing(STDOUT):
            return _complete(line)
    if line.first == LINT:
        from gemmpipe.cli.linting import as_overrides, check_files, is_static

        if is_static(line):
            return check_files(line)
        line = as_overrides(line)
    from gemmpipe.cli.request import understand

    request = understand(line)
    return _compose(line, request)


def _complete(line: CommandLine) -> int:
    from gemmpipe.cli.composing import run_hydra

    typed, current = completion.typed_line(os.environ)
    if not completion.is_query(line):
        if line.words not in completion.SCRIPTS:
            raise UserError("-sc: expected install=bash, zsh or fish, or uninstall=")
        run_hydra(["--shell-completion", *line.words], _no_job)
        return 0
    folders = Folders(config_dir=typed.config_dir)
    for word in completion.own_words(typed, current, folders):
        print(word)
    if completion.is_flag(typed, current):
        return 0
    completion.show_hydra(typed, current)
    pipeline = typed.first if typed.first in folders.pipelines else "tune"
    where = [f"--config-dir={folders.config_dir}"] if folders.config_dir else []
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_hydra(["--shell-completion", f"--config-name={pipeline}", *where, *line.words], _no_job)
    print(completion.for_users(said.getvalue()), end="")
    return 0


def _no_job(cfg: "DictConfig") -> None:
    """Completion runs nothing."""


def _job(request: "Request", codes: list[int]) -> "Callable[[DictConfig], int]":
    """What Hydra runs once or for each job of a sweep, here or elsewhere; the codes of those here are kept."""
    from gemmpipe.cli.job import run_job
    from gemmpipe.cli.submitted import carry_out, is_submitted, this_process
    from gemmpipe.interrupt import ending_with_the_sweep

    sweep = this_process()

    def job(cfg: "DictConfig") -> int:
        if is_submitted(sweep):
            return carry_out(lambda: run_job(cfg, request))
        with ending_with_the_sweep():
            codes.append(run_job(cfg, request))
        return codes[-1]

    return job


def _compose(line: CommandLine, request: "Request") -> int:
    """Let Hydra compose and run; the worst exit code of all runs is returned."""
    from gemmpipe.cli.composing import run_hydra
    from gemmpipe.cli.job import check_job
    from gemmpipe.cli.mistakes import MISTAKES, explain
    from gemmpipe.cli.sweeping import jobs_elsewhere
    from gemmpipe.cli.unbegun import empty_folders_removed
    from gemmpipe.cli.words import key_of

    codes: list[int] = []
    part, said = line.value("--package"), io.StringIO()
    try:
        with (
            writing(STDOUT if line.has("--cfg") or line.has("--info") else _run_folders(request)),
            empty_folders_removed(RUNS / request.pipeline),
            contextlib.redirect_stderr(said) if part else contextlib.nullcontext(),
            jobs_elsewhere(request.overrides if request.multirun else ()),
        ):
            argv = [*_for_hydra(line, request), *request.overrides]
            codes += run_hydra(argv, _job(request, codes), partial(check_job, request=request))
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(*_ways_on(stopped, request)) from None
    except SystemExit:
        if not part:
            raise
        # Hydra's way to say that there is no such part.
        raise UserError(f"--package {part}: no such part of the configuration; expected one such as space") from None
    except MISTAKES as error:
        raise explain(error, request.folders.options, request.overrides, request.recipe) from error
    except RuntimeError as error:  # jobs' own are told by then; a launcher that finds no SLURM here, say
        launcher = next((word for word in request.overrides if key_of(word) == "hydra/launcher"), None)
        if launcher is None:
            raise
        raise EnvironmentProblem(f"{launcher}: {error}") from error
    return max(codes, default=0)


def _run_folders(request: "Request") -> str:
    """Where Hydra writes what was typed for a run, or for a sweep."""
    from gemmpipe.cli.words import key_of

    key = "hydra.sweep.dir" if request.multirun else "hydra.run.dir"
    typed = [word.partition("=")[2].strip("\"'") for word in request.overrides if key_of(word) == key]
    return typed[-1] if typed else str(RUNS / request.pipeline)


def _ways_on(stopped: KeyboardInterrupt, request: "Request") -> list[str]:
    """How to go on with what was stopped; `last` would be an earlier run where this one had not begun."""
    line = _resuming(stopped.args[0], request) if stopped.args else ""
    if not request.multirun:
        return [f"{line} goes on"] if line else []
    if any(word.startswith("hydra/launcher=submitit") for word in request.overrides):
        return []  # told by then: the jobs are not stopped
    this = f"{line} goes on with this run, then " if line else ""
    return [f"{this}the same line does what is left of the sweep"]


def _resuming(run_dir: Path, request: "Request") -> str:
    """The line that goes on with a run, quoted: the last one where runs are looked for, else by its folder."""
    from gemmpipe.report import resume_line

    if is_among_runs(run_dir):
        return "'gemmpipe resume=last'"
    return f'"{resume_line(run_dir, request.folders.python_path)}"'


def _for_hydra(line: CommandLine, request: "Request") -> list[str]:
    """The flags, with what a recipe or an earlier run has its say in."""
    flags = [flag for flag in line.argv if not flag.startswith(("--config-dir", "--multirun"))]
    if request.multirun:
        flags.append("--multirun")
    if request.folders.config_dir:
        flags.append(f"--config-dir={request.folders.config_dir}")
    return [*flags, f"--config-name={request.pipeline}"]
