"""The commands that are no pipelines: they read finished runs or files, and compose no configuration to do so.

A command's module has `run(line)` (see `Command`) and `HELP`, the text of `gemmpipe --help COMMAND`. Adding a command
is one entry of `COMMANDS` and its module.
"""

import difflib
import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from gemmpipe.cli.command_line import CommandLine
from gemmpipe.core.errors import UserError, suggest_or_list

COMMANDS: Mapping[str, str] = {
    "export": "write a run's or a table's choices in the form of an engine",
    "lint": "check engines' configuration files, yours or others'",
    "runs": "list the runs of this folder",
    "show": "show a finished run or a table again, or one of its problems",
    "diff": "compare two runs or tables; fail_above=2 makes it a gate of continuous integration",
    "report": "write the HTML report of a run or of tuned tables",
    "demo": "replay a search on times recorded on an H200, on any machine",
}
"""By name: the line of `gemmpipe --help`. The module of a command is `gemmpipe.cli.NAME`."""
_MODULES: Mapping[str, str] = {"runs": "run_list"}
"""Modules of another name: `gemmpipe.cli.runs` finds earlier runs for pipelines."""


_MISSPELT = 0.8
"""Likeness of a key that is a misspelt one for certain."""
_OF_ENGINE = ("args", "run", "target", "version", "package", "model")
"""Options of `gemmpipe doctor engine=...` that this machine's devices do not have."""


class Command(Protocol):
    """The module of a command."""

    HELP: str

    def run(self, line: CommandLine) -> int | CommandLine:
        """The exit code; or the line of a pipeline to compose, for what needs a configuration.

        Raises UserError for an option that the command does not have.
        """
        ...


def command_of(line: CommandLine) -> str | None:
    """The command of a line; None for a pipeline. `doctor engine=...` reads rules and files, no configuration.

    Raises UserError for an option of `doctor engine=...` without the engine.
    """
    if line.command == "doctor":
        keys = [option.partition("=")[0] for option in line.overrides]
        if "engine" in keys or "log" in keys:  # the log names its engine
            return "doctor_engine"
        for name in keys:
            if name not in _OF_ENGINE and difflib.get_close_matches(name, ["engine"], cutoff=_MISSPELT):
                raise UserError(f"doctor: {name}: no such option; did you mean 'engine'?")
        if (key := next((key for key in keys if key in _OF_ENGINE), None)) is not None:
            raise UserError(f"doctor: {key}: an option of doctor engine=vllm and engine=sglang; expected engine= too")
    return line.command if line.command in COMMANDS else None


def load_command(name: str) -> Command:
    """The module of a command, imported on use: each loads only what it needs."""
    return cast(Command, importlib.import_module(f"gemmpipe.cli.{_MODULES.get(name, name)}"))


def options(line: CommandLine, known: Mapping[str, str]) -> dict[str, str]:
    """The `key=value` options of a line by key, with the defaults of `known` for the others.

    Raises UserError for a key that is not in `known`, and for one without a value.
    """
    found = dict(known)
    for option in line.overrides:
        key, bound, value = option.partition("=")
        if key not in known:
            raise UserError(f"{line.command}: {key}: no such option{suggest_or_list(key, list(known))}")
        if not bound or not value:
            raise UserError(f"{option}: no value; expected {key}=VALUE")
        found[key] = value.strip("\"'")
    return found
