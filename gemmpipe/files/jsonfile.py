"""Reading JSON that someone else wrote: bounded in size and depth, no name twice."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from gemmpipe.errors import UserError, quoted
from gemmpipe.files.regular import read_regular

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
_MAX_DIGITS = 1000

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"?|[\[\]{}]', re.DOTALL)
"""A string that does not end goes on to the end of the text: else each quote in it would be tried as another start."""


def read_object(path: Path, limit: int = MAX_BYTES) -> dict[str, object]:
    """The JSON object in a file. Raises UserError: unreadable, too large, too deep, no object, a name twice."""
    try:
        raw = read_regular(path, "a small JSON file", limit)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return parse_object(raw.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text in UTF-8, expected a JSON object") from None


def parse_object(text: str, where: str) -> dict[str, object]:
    """The JSON object in a text; `where` begins every UserError."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            raise UserError(f"{where}: nested more than {MAX_DEPTH} deep, expected a JSON object")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.lineno}:{error.colno}: no JSON: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: a JSON {'null' if value is None else type(value).__name__}, expected an object")
    return value


def _unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {quoted(name)} is there twice")
        found[name] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, expected at most {_MAX_DIGITS}")
    return int(digits)


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON number")
