"""One override as the user types it, made readable for Hydra: quoted where its grammar would stumble."""

import re
from collections.abc import Iterable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from gemmpipe.errors import UserError

_PARTS = re.compile(r"(?P<key>[+~]{0,2}[^=\s]+)=(?P<value>.*)", re.DOTALL)
_HOME = re.compile(r"(^|[\[,]\s*)~(?=/)")
_OPEN = "stages.select.prefer."
"""A mapping whose keys are the user's: any backend may be preferred, so that a new key is no mistake there."""
_CHOSEN = {"search.of": "search", "stages.screen.timer": "timer", "stages.bench.timer": "timer"}
"""Keys that hold an option, and its group."""
_PATH_KEYS = ("path", "file", "output", "profile", "table", "reuse", "resume", "inputs")


def quote(text: str) -> str:
    """A text as one quoted value of Hydra's grammar."""
    escaped = re.sub(r'(?<!\\)(\\*)"', lambda match: match[1] * 2 + '\\"', text)
    tail = "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f'"{escaped}{tail}"'


def readable(words: Iterable[str], *, multirun: bool) -> tuple[str, ...]:
    """The overrides as Hydra can read them. Raises UserError for one that is no key=value."""
    return tuple(_readable(word, multirun) for word in words)


def key_of(word: str) -> str:
    """The key of an override, without the signs that add or delete."""
    return word.split("=", 1)[0].lstrip("+~")


def is_name(word: str) -> bool:
    """Whether an override's value is a text, or a list: neither a number nor null, true or false."""
    parsed = _parsed(word)
    return parsed is None or isinstance(parsed.value(), str | QuotedString | list)


def _readable(word: str, multirun: bool) -> str:
    parts = _PARTS.fullmatch(word)
    if parts is None:
        if not word.startswith("~") or _parsed(word) is None:
            raise UserError(f"{word}: expected key=value")
        return word
    key, value = parts["key"], parts["value"]
    if key.startswith(_OPEN):
        key = f"++{key}"
    if key.lstrip("+~").split("/")[0].split("@")[0] in {"timer", "stage"} and "@" not in key:
        place = "stages.bench.timer" if key == "timer" else "stages.bench"
        raise UserError(f"{word}: chosen for one stage each, as in {key}@{place}={value}")
    if key in _CHOSEN and value.isidentifier() and value != "null":
        raise UserError(f"{word}: an option, chosen by {_CHOSEN[key]}@{key}={value}")
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
