"""Overrides as typed, checked and converted for Hydra.

* `hydra_overrides`: quotes values that Hydra's grammar cannot read, and refuses arguments other than `key=value`.
* `check_group_overrides`: refuses values that cannot name an option, on which Hydra fails with an internal error.
* `is_too_deep`: a limit on nested brackets, on which the parsers of YAML and Hydra take seconds or recurse endlessly.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from gemmpipe.core.errors import UserError, shortened, suggest_or_list

_OVERRIDE = re.compile(r"(?P<key>[+~]{0,2}[^=\s]+)=(?P<value>.*)", re.DOTALL)
_HOME = re.compile(r"(^|[\[,]\s*)~(?=/)")
_OPEN_MAPPINGS = ("stages.select.prefer.", "kernel.key.")
"""Mappings in which a new key is valid: any backend may be preferred, and any key column of the kernel be set."""
_GROUP_OF_KEY = {"search.algorithm": "search", "stages.screen.timer": "timer", "stages.bench.timer": "timer"}
"""Keys with an option as their value, and its group."""
_PATH_KEYS = ("path", "file", "output", "profile", "table", "reuse", "resume", "inputs")


_PLAIN = re.compile(r"(?:\.{0,2}/)?[A-Za-z_][\w./-]*", re.ASCII)
_NOT_TEXT = ("null", "true", "false", "nan", "inf")


def quote(text: str) -> str:
    """A text as one value of Hydra's grammar, quoted unless it is a name or a path of letters."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    escaped = re.sub(r'(?<!\\)(\\*)"', lambda match: match[1] * 2 + '\\"', text)
    tail = "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f'"{escaped}{tail}"'


def hydra_overrides(overrides: Iterable[str], *, multirun: bool) -> tuple[str, ...]:
    """The overrides in Hydra's grammar. Raises UserError for one that is not key=value."""
    return tuple(_hydra_override(override, multirun) for override in overrides)


def override_key(override: str) -> str:
    """The key of an override, without the prefixes `+`, `++` and `~`."""
    return override.split("=", 1)[0].lstrip("+~")


def is_text_or_list(override: str) -> bool:
    """True if the value of an override is a text or a list: not a number, null, true or false."""
    parsed = _parsed(override)
    return parsed is None or isinstance(parsed.value(), str | QuotedString | list)


def _hydra_override(override: str, multirun: bool) -> str:
    parts = _OVERRIDE.fullmatch(override)
    if parts is None:
        if not override.startswith("~") or _parsed(override) is None:
            raise UserError(f"{override}: expected key=value")
        return override
    key, value = parts["key"], parts["value"]
    if key.startswith(_OPEN_MAPPINGS):
        key = f"++{key}"
    if key.lstrip("+~").split("/")[0].split("@")[0] in {"timer", "stage"} and "@" not in key:
        target = "stages.bench.timer" if key == "timer" else "stages.bench"
        raise UserError(f"{override}: chosen for one stage each, as in {key}@{target}={value}")
    if key in _GROUP_OF_KEY and value.isidentifier() and value != "null":
        raise UserError(f"{override}: an option, chosen by {_GROUP_OF_KEY[key]}@{key}={value}")
    value = _HOME.sub(lambda match: match[1] + str(Path.home()), value) if value[:1] in "~[" else value
    plain = f"{key}={value}"
    parsed = _parsed(plain)
    if parsed is not None and (multirun or not parsed.is_sweep_override()):
        return plain
    if parsed is not None and not _is_path(key, value):
        raise UserError(f"{override}: several values need -m (a sweep), or brackets for a list: '{key}=[{value}]'")
    quoted = f"{key}={quote(value)}"
    if _parsed(quoted) is None:
        raise UserError(f"{override}: cannot be read as key=value")
    return quoted


def _parsed(override: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def _is_path(key: str, value: str) -> bool:
    return "/" in value or key.rsplit(".", 1)[-1] in _PATH_KEYS


_HYDRA = "hydra/"
_MAX_SHOWN = 60
_MAX_NAME = 200
"""Characters of a name; the search for its file fails from 256 on."""


def check_group_overrides(overrides: Iterable[str], options: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError for a list with anything but names, in overrides of a group of `options` or of Hydra.

    An unknown name of an option is refused later, when Hydra composes.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        group = key.lstrip("+~").split("@")[0]
        if group in options and not set("[{") & set(value) and max(map(len, value.split(","))) > _MAX_NAME:
            hint = suggest_or_list("", options[group], f"gemmpipe --help {group}")
            raise UserError(f"{group}: no option '{shortened(value)}'{hint}")
        if not value.startswith(("[", "choice")) and "[" not in value:  # parsing takes milliseconds
            continue
        if group not in options and not group.startswith(_HYDRA):
            continue
        parsed = _parsed(override)
        if parsed is None:
            continue  # `hydra_overrides` reports it
        for chosen in _sweep_values(parsed):
            if isinstance(chosen, list) and (parsed.is_delete() or not all(map(_is_name, chosen))):
                shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
                known = suggest_or_list("", options.get(group, ()))
                raise UserError(f"{group}: {shown} given, expected the name of an option, or a list of names{known}")


def _sweep_values(parsed: Override) -> Sequence[object]:
    """The values of a sweep, or the single value."""
    value: object = parsed.value()
    return value.list if isinstance(value, ChoiceSweep) else [value]


def _is_name(value: object) -> bool:
    return isinstance(value, str | QuotedString)


MAX_NESTING = 32
"""Levels of nested values; options have only a few."""
_MAX_OPEN = 2 * MAX_NESTING  # brackets in quotes count too
_BRACKET = re.compile(r"[\[\]{}]")


def is_too_deep(text: str) -> bool:
    """True if more brackets are open at one position than any valid value has."""
    depth = 0
    for mark in _BRACKET.findall(text):
        depth = depth + 1 if mark in "[{" else max(0, depth - 1)
        if depth > _MAX_OPEN:
            return True
    return False
