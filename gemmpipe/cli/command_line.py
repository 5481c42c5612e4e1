"""The words of a command line, sorted: flags, the pipeline or recipe, and the overrides."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.core.errors import UserError, suggest, suggest_or_list

_SWITCHES = {
    "-h": "--help",
    "-r": "--run",
    "-m": "--multirun",
    "-sc": "--shell-completion",
    "": "--hydra-help",
    "-V": "--version",
    " ": "--resolve",
}
_VALUE_FLAGS = {"-c": "--cfg", "-p": "--package", "-cd": "--config-dir", "-i": "--info"}
CHOICES: Mapping[str, Sequence[str]] = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""The values of flags that have only these."""
FLAGS = tuple(sorted([*_SWITCHES.values(), *_VALUE_FLAGS.values()]))
"""In their long form."""
_REFUSED = {
    "-cp": "--config-path",
    "-cn": "--config-name",
    "": "--experimental-rerun",
}
_ALTERNATIVES = {
    "--config-path": "--config-dir DIR adds a folder of your own options",
    "--config-name": "the pipeline is the first word: gemmpipe quick ...",
    "--experimental-rerun": "resume=DIR goes on with a run",
}
_KNOWN = frozenset([*_SWITCHES, *_VALUE_FLAGS, *_REFUSED, *FLAGS, *_REFUSED.values()])
_CFG_FLAGS = ("--package", "--resolve")
LINT = "lint"
"""The pipeline after whose name paths stand without a key."""
_ENGINE_FILE = re.compile(r"(.*/)?[EN]=[^/]*|.*\.json")
_MODES = ("--run", "--multirun", "--cfg", "--info", "--shell-completion", "--hydra-help")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line, sorted; `flags` holds Hydra's own flags in their long form, with their values."""

    flags: tuple[tuple[str, str | None], ...]
    command: str | None
    """The pipeline's name or the recipe's path."""
    overrides: tuple[str, ...]
    """The overrides, in order."""
    paths: tuple[str, ...] = ()
    """What stands without a key after `lint`, and the values of `path=` there."""

    def has(self, flag: str) -> bool:
        """Whether the flag was given."""
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
        """The flags as words again; `=` binds a value, since argparse would take an override for one."""
        return [name if value is None else f"{name}={value}" for name, value in self.flags]


def is_recipe(word: str) -> bool:
    """Whether a word without a key names a recipe: a YAML file, or any path."""
    if word.endswith((".yaml", ".yml")):
        return "=" not in word or Path(word).expanduser().is_file()
    return "=" not in word and "/" in word


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Sort the words of a command line. Raises UserError for an unknown flag or a second first word."""
    _check_utf8(argv)
    flags: list[tuple[str, str | None]] = []
    first: str | None = None
    overrides: list[str] = []
    paths: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.strip():  # `gemmpipe "$UNSET"` must not tune whatever the defaults are
            raise UserError(f"'{word}': an empty word; expected a pipeline, a recipe, a flag or key=value")
        if word.startswith("-"):
            if word.partition("=")[0] not in _KNOWN or word.startswith("-i"):
                from gemmpipe.cli.aiter_flags import check_flags  # not above: other command lines do without

                check_flags(argv, _KNOWN)
            flags.append(_flag(word, rest))
        elif first == LINT and (path := _lint_path(word)):
            paths.append(path)
        elif is_recipe(word) or ("=" not in word and not word.startswith("~")):
            if first is not None:
                raise UserError(f"{word}: the pipeline is '{first}' already; expected key=value")
            if overrides:
                raise UserError(f"{word}: a pipeline or a recipe comes before the first key=value; expected key=value")
            first = word
        else:
            overrides.append(word)
    line = CommandLine(flags=tuple(flags), command=first, overrides=tuple(overrides), paths=tuple(paths))
    modes = [mode for mode in _MODES if line.has(mode)]
    if len(modes) > 1:
        raise UserError(f"{modes[1]}: cannot be combined with {modes[0]}")
    for flag in _CFG_FLAGS:
        if line.has(flag) and not line.has("--cfg"):  # Hydra would ignore it and start the run
            raise UserError(f"{flag}: says what --cfg prints; expected --cfg job {flag}")
    return line


def _lint_path(word: str) -> str:
    """The path that a word after `lint` is, or that `path=` gives; nothing for another override.

    An engine's file has `=` in its name; a word such as `engine=vllm` is a path only where it lies here.
    """
    key, bound, value = word.partition("=")
    if not bound:
        return "" if word.startswith("~") and not word.startswith("~/") else word
    if key == "path":
        return value
    return word if _ENGINE_FILE.fullmatch(word) or Path(word).expanduser().exists() else ""


def _check_utf8(argv: Sequence[str]) -> None:
    """What was typed is written down in UTF-8 (journal, manifest, sidecars), after hours of timing."""
    for word in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python holds bytes that are no text
            shown = os.fsencode(word).decode("utf-8", "backslashreplace")
            raise UserError(f"{shown}: bytes that are no UTF-8; expected text, also in names of files")


def long_form(flag: str) -> str:
    """A flag that may be short in its long form."""
    return (_SWITCHES | _VALUE_FLAGS | _REFUSED).get(flag, flag)


def _flag(word: str, rest: list[str]) -> tuple[str, str | None]:
    """The long name and the value of a flag, taking its value from `rest` where it has one."""
    short, bound, value = word.partition("=")
    if short.strip() in {"-", "--", ""}:
        raise UserError(f"{word}: expected a pipeline, a recipe, a flag or key=value")
    name = long_form(short)
    if name in _ALTERNATIVES:
        raise UserError(f"{short}: not available; {_ALTERNATIVES[name]}")
    if name in _SWITCHES.values() and not bound:
        return name, None
    if name not in _VALUE_FLAGS.values():
        raise UserError(f"{word}: no such flag{_unknown_flag_hint(word, short, rest)}")
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


def _unknown_flag_hint(word: str, flag: str, rest: Sequence[str]) -> str:
    """What was meant by a flag that there is not: a value, as other tools take them, or a flag with a like name."""
    from gemmpipe.pipeline.build import ROOT

    key = flag.lstrip("-").replace("-", "_")
    if key.split(".")[0] in {*ConfigFolders(config_dir=None).options, *ROOT}:
        value = word.partition("=")[2] or next((w for w in rest[:1] if not w.startswith("-")), "...")
        return f"; values have no dashes: {key}={value}"
    alike = suggest(key, [name.lstrip("-") for name in FLAGS])  # two dashes would make any two alike
    return suggest_or_list(flag, FLAGS) if alike else f"; known: {', '.join(FLAGS)}"
