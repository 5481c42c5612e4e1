"""`gemmpipe lint`: paths without a key, short keys, and a check without a device, which needs no configuration."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import LINT, CommandLine
from gemmpipe.core.errors import UserError
from gemmpipe.core.nvml import product_names
from gemmpipe.core.shell import shell_quote
from gemmpipe.formats.engine_lint import findings_of, lint
from gemmpipe.formats.findings import ERROR, summary
from gemmpipe.tables.file_names import kernel_of_table_name

_SHORT_KEYS: Mapping[str, str] = {name: f"stages.lint.{name}" for name in ("engine", "timed", "model_dim", "topk")}
"""Keys of this command only, and the keys of the configuration that they abbreviate."""
_DEVICE_KEYS = ("device", "device.index", "stages.lint.timed")


HELP = """gemmpipe lint FILE-OR-FOLDER ... [engine=vllm|sglang]

Checks configuration files of vLLM and SGLang: lost or unreachable keys, values that the engine cannot use, names that
it does not look up. Exit code 1 if any finding is an error. With `device=cuda` each entry is timed against the engine's
own default; `gemmpipe lint --cfg job` prints all keys of that form.
"""


def run(line: CommandLine) -> int | CommandLine:
    """Check files, or return the line of the pipeline `lint`, which times their entries on a device."""
    return check_files(line) if is_static(line) else as_overrides(line)


def is_static(line: CommandLine) -> bool:
    """True if the line checks files without a device and sets no key of the configuration."""
    keys = {override.partition("=")[0] for override in line.overrides}
    return line.command == LINT and bool(line.paths) and not line.flags and keys <= {"engine"}


def check_files(line: CommandLine) -> int:
    """Print the findings, one per line, and a summary. Returns 1 if any is an error, else 0.

    Raises UserError for a path that does not exist or has nothing to check.
    """
    if table := next(
        (path for path in line.paths if path.endswith(".csv") and Path(path).expanduser().is_file()), None
    ):
        kernel = "" if kernel_of_table_name(Path(table)) else " kernel=FAMILY"
        raise UserError(
            f"{table}: a tuned table, no engine's file; expected gemmpipe verify table={shell_quote(table)}{kernel}"
        )
    engine = next((override.partition("=")[2] for override in reversed(line.overrides)), None)
    files = lint([Path(path).expanduser() for path in line.paths], engine, product_names())
    found = findings_of(files)
    with naming_write_errors(STDOUT):
        for finding in found:
            print(finding.line)
        print(summary(len(files), found))
    return int(any(finding.severity == ERROR for finding in found))


def as_overrides(line: CommandLine) -> CommandLine:
    """The line with its paths and short keys as keys of the configuration; naming a device implies `timed=true`.

    Raises UserError for a short key without a value.
    """
    from gemmpipe.cli.overrides import (  # not above: imports Hydra's grammar, which a check of files does not need
        override_key,
        quote,
    )

    overrides: list[str] = []
    for override in line.overrides:
        key, bound, value = override.partition("=")
        if key in _SHORT_KEYS and bound and not value:
            raise UserError(f"{override}: no value; expected {key}=VALUE")
        overrides.append(f"{_SHORT_KEYS[key]}={value}" if key in _SHORT_KEYS else override)
    keys = {override_key(override) for override in overrides}
    if keys & set(_DEVICE_KEYS) and _SHORT_KEYS["timed"] not in keys:
        overrides.append(f"{_SHORT_KEYS['timed']}=true")
    if line.paths:
        overrides.append(f"stages.lint.paths=[{','.join(quote(path) for path in line.paths)}]")
    return replace(line, overrides=tuple(overrides), paths=())
