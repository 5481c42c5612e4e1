"""Parsing of a command line into flags, the pipeline or recipe, and overrides."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.core.shell import shell_quote

WATCH = "--watch"
"""The flag of `report` alone."""
_SWITCHES = {
    "-h": "--help",
    "-r": "--run",
    "-m": "--multirun",
    "-sc": "--shell-completion",
    "": "--hydra-help",
    "-V": "--version",
    " ": "--resolve",
    "  ": WATCH,
}
_VALUE_FLAGS = {"-c": "--cfg", "-p": "--package", "-cd": "--config-dir", "-i": "--info"}
CHOICES: Mapping[str, Sequence[str]] = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""The values of flags that accept only these."""
FLAGS = tuple(sorted([*_SWITCHES.values(), *_VALUE_FLAGS.values()]))
"""All flags, in their long form."""
_REFUSED = {
    "-cp": "--config-path",
    "-cn": "--config-name",
    "": "--experimental-rerun",
}
_ALTERNATIVES = {
    "--config-path": "--config-dir DIR adds a folder of your own options",
    "--config-name": "the pipeline is the first argument: gemmpipe quick ...",
    "--experimental-rerun": "resume=DIR resumes a run",
}
_KNOWN = frozenset([*_SWITCHES, *_VALUE_FLAGS, *_REFUSED, *FLAGS, *_REFUSED.values()])
_CFG_FLAGS = ("--package", "--resolve")
LINT = "lint"
EXPORT = "export"
WITH_PATHS = frozenset({LINT, EXPORT, "show", "diff", "report"})
"""The commands that take arguments without a key: paths, and names of runs."""
_WITHOUT_PATHS = ("runs", "demo")
_ENGINE_FILE = re.compile(r"(.*/)?[EN]=[^/,]*,[^/]*|.*\.json")
_MODES = ("--run", "--multirun", "--cfg", "--info", "--shell-completion", "--hydra-help")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A parsed command line; `flags` are Hydra's and ours in their long form, with their values."""

    flags: tuple[tuple[str, str | None], ...]
    command: str | None
    """The pipeline's name or the recipe's path."""
    overrides: tuple[str, ...]
    """The overrides, in order."""
    paths: tuple[str, ...] = ()
    """Arguments without a key after a command that takes them, and the values of `path=` there."""

    def has(self, flag: str) -> bool:
        """True if the flag was given."""
        return any(name == flag for name, _ in self.flags)

    def value(self, flag: str) -> str | None:
        """The flag's value, the last one given."""
        return next((value for name, value in reversed(self.flags) if name == flag), None)

    @property
    def config_dir(self) -> Path | None:
        """The user's folder of options. Raises UserError when there is none."""
        text = self.value("--config-dir")
        if text is None:
            return None
        folder = Path(text).expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {text}: no such folder")
        return folder

    @property
    def argv(self) -> list[str]:
        """The flags as arguments again; `=` binds a value, since argparse would take an override as the value."""
        return [name if value is None else f"{name}={value}" for name, value in self.flags]


def gemmpipe_command(config_dir: Path | None) -> list[str]:
    """The first arguments of a command to copy: with the user's folder of options, which the command may need."""
    return ["gemmpipe", *([] if config_dir is None else [f"--config-dir={config_dir}"])]


def is_recipe(argument: str) -> bool:
    """True if an argument without a key names a recipe: a YAML file, or any path."""
    if argument.endswith((".yaml", ".yml")):
        return "=" not in argument or Path(argument).expanduser().is_file()
    return "=" not in argument and "/" in argument


def _second_word(first: str, argument: str, overrides: Sequence[str], rest: Sequence[str]) -> UserError:
    """The error of an argument without a key after the pipeline's name."""
    if first == "help":
        return UserError(f"help {argument}: no such command; expected gemmpipe --help {argument}")
    if _is_key(first):
        return UserError(f"{first} {argument}: a key and its value are one argument: {first}={argument}")
    if first not in WITH_PATHS and not is_recipe(first) and (close := suggest(first, WITH_PATHS)):
        return UserError(f"{first}: no such command{close}")
    what = f"no option of '{first}'" if first in _WITHOUT_PATHS else f"the pipeline is '{first}' already"
    return _unquoted(argument, overrides, rest) or UserError(
        f"{argument}: {what}; expected {_as_key(first, argument, rest)}"
    )


def _as_key(first: str, argument: str, rest: Sequence[str]) -> str:
    """The key that a table without one is meant for; any key for other arguments and pipelines."""
    files = [argument, *(word for word in rest if "=" not in word)]
    if first == "merge" and all(file.endswith(".csv") for file in files):
        from gemmpipe.cli.overrides import quote  # not above: imports Hydra's grammar

        return shell_quote(f"inputs=[{','.join(map(quote, files))}]")
    if first in ("verify", "prebuild"):
        return shell_quote(f"table={argument if argument.endswith('.csv') else 'outputs/tuned/NAME.csv'}")
    return f"key=value (gemmpipe --help {first})"


def _late_word(argument: str, overrides: Sequence[str], rest: Sequence[str]) -> UserError:
    """The error of an argument without a key after the first override."""
    return _unquoted(argument, overrides, rest) or UserError(
        f"{argument}: a pipeline or a recipe comes before the first key=value; expected key=value"
    )


def _unquoted(argument: str, overrides: Sequence[str], rest: Sequence[str]) -> UserError | None:
    """The error of a value with blanks that the shell has split: the last override has an open bracket."""
    if not overrides or _open_brackets(overrides[-1]) <= 0:
        return None
    value = f"{overrides[-1]} {argument}"
    for part in rest:
        if _open_brackets(value) <= 0:
            break
        value += f" {part}"
    return UserError(f"{overrides[-1]}: a value with blanks is one argument; expected quotes: {shell_quote(value)}")


def _open_brackets(text: str) -> int:
    return sum(text.count(mark) for mark in "[{(") - sum(text.count(mark) for mark in "]})")


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse a command line. Raises UserError for an unknown flag or a second pipeline."""
    _check_utf8(argv)
    flags: list[tuple[str, str | None]] = []
    first: str | None = None
    overrides: list[str] = []
    paths: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.strip():  # `gemmpipe "$UNSET"` must not tune whatever the defaults are
            raise UserError(f"'{argument}': empty argument; expected a pipeline, a recipe, a flag or key=value")
        if argument.startswith("-"):
            if argument.partition("=")[0] not in _KNOWN or argument.startswith("-i"):
                from gemmpipe.cli.aiter_flags import check_flags  # not above: needed for this error only

                check_flags(argv, _KNOWN)
            flags.append(_flag(argument, rest))
        elif first in WITH_PATHS and (path := _path(argument)):
            paths.append(path)
        elif is_recipe(argument) or ("=" not in argument and not argument.startswith("~")):
            if first is not None:
                raise _second_word(first, argument, overrides, rest)
            if overrides:
                raise _late_word(argument, overrides, rest)
            first = argument
        else:
            overrides.append(argument)
    line = CommandLine(flags=tuple(flags), command=first, overrides=tuple(overrides), paths=tuple(paths))
    modes = [mode for mode in _MODES if line.has(mode)]
    if len(modes) > 1:
        raise UserError(f"{modes[1]}: cannot be combined with {modes[0]}")
    if line.has(WATCH) and first != "report":
        raise UserError(f"{WATCH}: a flag of gemmpipe report; expected gemmpipe report last {WATCH}")
    for flag in _CFG_FLAGS:
        if line.has(flag) and not line.has("--cfg"):  # Hydra would ignore it and start the run
            raise UserError(f"{flag}: applies to --cfg only; expected --cfg job {flag}")
    return line


def _path(argument: str) -> str:
    """The path of an argument after a command that takes paths, also of `path=`; "" for another override.

    An engine's file has `=` in its name; an argument such as `engine=vllm` is a path only if such a file exists.
    """
    key, bound, value = argument.partition("=")
    if not bound:
        return "" if argument.startswith("~") and not argument.startswith("~/") else argument
    if key == "path":
        return value
    return argument if _ENGINE_FILE.fullmatch(argument) or Path(argument).expanduser().exists() else ""


def _check_utf8(argv: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8: journal, manifest and sidecars, written after hours of timing, have them."""
    for argument in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):  # how Python represents undecodable bytes
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            raise UserError(f"{shown}: not valid UTF-8; expected text, also in file names")


def long_form(flag: str) -> str:
    """The long form of a flag, short or long."""
    return (_SWITCHES | _VALUE_FLAGS | _REFUSED).get(flag, flag)


def _flag(argument: str, rest: list[str]) -> tuple[str, str | None]:
    """The long name and the value of a flag, which may consume its value from `rest`."""
    short, bound, value = argument.partition("=")
    if short.strip() in {"-", "--", ""}:
        raise UserError(f"{argument}: expected a pipeline, a recipe, a flag or key=value")
    name = long_form(short)
    if name in _ALTERNATIVES:
        raise UserError(f"{short}: not available; {_ALTERNATIVES[name]}")
    if name in _SWITCHES.values() and not bound:
        return name, None
    if name not in _VALUE_FLAGS.values():
        raise UserError(f"{argument}: no such flag{_unknown_flag_hint(argument, short, rest)}")
    if not bound:
        if name == "--info" and (not rest or rest[0] not in CHOICES[name]):
            return name, "all"
        if not rest:
            raise UserError(f"{short}: expected a value after it")
        value = rest.pop(0)
    choices = CHOICES.get(name)
    if choices and value not in choices:
        raise UserError(f"{short} {value}: expected one of {', '.join(choices)}{suggest(value, choices)}")
    return name, value


def _is_key(argument: str) -> bool:
    """True if an argument begins with a group of options or a root key, and is no pipeline."""
    from gemmpipe.pipeline.build import ROOT

    folders = ConfigFolders(config_dir=None)
    return argument not in folders.pipelines and argument.split(".")[0] in {*folders.options, *ROOT}


def _unknown_flag_hint(argument: str, flag: str, rest: Sequence[str]) -> str:
    """The hint for an unknown flag: an override typed with dashes, as in other tools, or a flag of similar name."""
    from gemmpipe.pipeline.build import ROOT

    key = flag.lstrip("-").replace("-", "_")
    if key.split(".")[0] in {*ConfigFolders(config_dir=None).options, *ROOT}:
        value = argument.partition("=")[2] or next((w for w in rest[:1] if not w.startswith("-")), "...")
        return f"; values have no dashes: {key}={value}"
    alike = suggest(key, [name.lstrip("-") for name in FLAGS])  # two dashes would make any two alike
    return suggest_or_list(flag, FLAGS) if alike else f"; known: {', '.join(FLAGS)}"
