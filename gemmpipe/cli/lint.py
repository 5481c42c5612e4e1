"""The words of `gemmpipe lint`: paths stand without a key, and a check without a device needs no configuration."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import LINT, CommandLine
from gemmpipe.core.errors import UserError
from gemmpipe.core.nvml import product_names
from gemmpipe.formats.engine_lint import findings_of, lint
from gemmpipe.formats.findings import ERROR, summary

_SHORT_KEYS: Mapping[str, str] = {name: f"stages.lint.{name}" for name in ("engine", "timed", "model_dim", "topk")}
"""Words of this command alone, and the keys that they stand for."""
_DEVICE_KEYS = ("device", "device.index", "stages.lint.timed")


def is_static(line: CommandLine) -> bool:
    """Whether the line checks files without a device, and says nothing of the configuration."""
    keys = {word.partition("=")[0] for word in line.overrides}
    return line.command == LINT and bool(line.paths) and not line.flags and keys <= {"engine"}


def check_files(line: CommandLine) -> int:
    """Print what is wrong with the files, a line each, and a summary; 1 where one is an error, else 0.

    Raises UserError for a path that is not there, and one without anything to check.
    """
    engine = next((word.partition("=")[2] for word in reversed(line.overrides)), None)
    files = lint([Path(path).expanduser() for path in line.paths], engine, product_names())
    found = findings_of(files)
    with naming_write_errors(STDOUT):
        for finding in found:
            print(finding.line)
        print(summary(len(files), found))
    return int(any(finding.severity == ERROR for finding in found))


def as_overrides(line: CommandLine) -> CommandLine:
    """The line with its paths and short words as keys of the configuration; naming a device means to time there.

    Raises UserError for a short word without a value.
    """
    from gemmpipe.cli.overrides import (  # not above: Hydra's grammar, which a check of files does without
        override_key,
        quote,
    )

    overrides: list[str] = []
    for word in line.overrides:
        key, bound, value = word.partition("=")
        if key in _SHORT_KEYS and bound and not value:
            raise UserError(f"{word}: no value; expected {key}=VALUE")
        overrides.append(f"{_SHORT_KEYS[key]}={value}" if key in _SHORT_KEYS else word)
    keys = {override_key(word) for word in overrides}
    if keys & set(_DEVICE_KEYS) and _SHORT_KEYS["timed"] not in keys:
        overrides.append(f"{_SHORT_KEYS['timed']}=true")
    if line.paths:
        overrides.append(f"stages.lint.paths=[{','.join(quote(path) for path in line.paths)}]")
    return replace(line, overrides=tuple(overrides), paths=())
