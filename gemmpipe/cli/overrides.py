"""One override as the user types it, made readable for Hydra: quoted where its grammar would stumble.

Words that choose options, looked at before Hydra composes: it fails inside on a value that can name none.

How deep brackets stand in a text: parsers of YAML and of Hydra's words take seconds, or recurse without end.
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
_OPEN_MAPPING = "stages.select.prefer."
"""A mapping whose keys are the user's: any backend may be preferred, so that a new key is no mistake there."""
_GROUP_OF_KEY = {"search.algorithm": "search", "stages.screen.timer": "timer", "stages.bench.timer": "timer"}
"""Keys that hold an option, and its group."""
_PATH_KEYS = ("path", "file", "output", "profile", "table", "reuse", "resume", "inputs")


def quote(text: str) -> str:
    """A text as one quoted value of Hydra's grammar."""
    escaped = re.sub(r'(?<!\\)(\\*)"', lambda match: match[1] * 2 + '\\"', text)
    tail = "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f'"{escaped}{tail}"'


def hydra_overrides(overrides: Iterable[str], *, multirun: bool) -> tuple[str, ...]:
    """The overrides as Hydra can read them. Raises UserError for one that is no key=value."""
    return tuple(_hydra_override(word, multirun) for word in overrides)


def override_key(word: str) -> str:
    """The key of an override, without the signs that add or delete."""
    return word.split("=", 1)[0].lstrip("+~")


def is_text_or_list(word: str) -> bool:
    """Whether an override's value is a text, or a list: neither a number nor null, true or false."""
    parsed = _parsed(word)
    return parsed is None or isinstance(parsed.value(), str | QuotedString | list)


def _hydra_override(word: str, multirun: bool) -> str:
    parts = _OVERRIDE.fullmatch(word)
    if parts is None:
        if not word.startswith("~") or _parsed(word) is None:
            raise UserError(f"{word}: expected key=value")
        return word
    key, value = parts["key"], parts["value"]
    if key.startswith(_OPEN_MAPPING):
        key = f"++{key}"
    if key.lstrip("+~").split("/")[0].split("@")[0] in {"timer", "stage"} and "@" not in key:
        place = "stages.bench.timer" if key == "timer" else "stages.bench"
        raise UserError(f"{word}: chosen for one stage each, as in {key}@{place}={value}")
    if key in _GROUP_OF_KEY and value.isidentifier() and value != "null":
        raise UserError(f"{word}: an option, chosen by {_GROUP_OF_KEY[key]}@{key}={value}")
    value = _HOME.sub(lambda match: match[1] + str(Path.home()), value) if value[:1] in "~[" else value
    plain = f"{key}={value}"
    parsed = _parsed(plain)
    if parsed is not None and (multirun or not parsed.is_sweep_override()):
        return plain
    if parsed is not None and not _is_path(key, value):
        raise UserError(f"{word}: several values need -m (a sweep), or brackets for a list: '{key}=[{value}]'")
    quoted = f"{key}={quote(value)}"
    if _parsed(quoted) is None:
        raise UserError(f"{word}: cannot be read as key=value")
    return quoted


def _parsed(word: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _is_path(key: str, value: str) -> bool:
    return "/" in value or key.rsplit(".", 1)[-1] in _PATH_KEYS


_HYDRA = "hydra/"
_MAX_SHOWN = 60
_MAX_NAME = 200
"""Characters of a name; from 256 on looking for its file fails."""


def check_group_overrides(overrides: Iterable[str], options: Mapping[str, Sequence[str]]) -> None:
    """Refuse a list that holds anything but names, in overrides of a group of `options` or of Hydra's own.

    Raises UserError: the key, the value, what was expected. What names no option is refused when it is looked for.
    """
    for word in overrides:
        key, _, value = word.partition("=")
        group = key.lstrip("+~").split("@")[0]
        if group in options and not set("[{") & set(value) and max(map(len, value.split(","))) > _MAX_NAME:
            raise UserError(f"{group}: no option '{shortened(value)}'{suggest_or_list('', options[group])}")
        if not value.startswith(("[", "choice")) and "[" not in value:  # parsing takes milliseconds
            continue
        if group not in options and not group.startswith(_HYDRA):
            continue
        parsed = _parse_group_override(word)
        if parsed is None:
            continue  # told where it is made readable
        for chosen in _sweep_values(parsed):
            if isinstance(chosen, list) and (parsed.is_delete() or not all(map(_is_name, chosen))):
                shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
                known = suggest_or_list("", options.get(group, ()))
                raise UserError(f"{group}: {shown} given, expected the name of an option, or a list of names{known}")


def _sweep_values(parsed: Override) -> Sequence[object]:
    """The values of a sweep, or the one value."""
    value: object = parsed.value()
    return value.list if isinstance(value, ChoiceSweep) else [value]


def _is_name(value: object) -> bool:
    return isinstance(value, str | QuotedString)


def _parse_group_override(word: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


MAX_NESTING = 32
"""Values within values; no option has more than a few."""
_MAX_OPEN = 2 * MAX_NESTING  # those in quotes are counted too
_BRACKET = re.compile(r"[\[\]{}]")


def is_too_deep(text: str) -> bool:
    """Whether more brackets are open at a time than any value has."""
    depth = 0
    for mark in _BRACKET.findall(text):
        depth = depth + 1 if mark in "[{" else max(0, depth - 1)
        if depth > _MAX_OPEN:
            return True
    return False
