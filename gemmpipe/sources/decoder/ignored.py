"""The modules that a checkpoint leaves in 16 bits: names, endings, globs and `re:` patterns held against a model's."""

import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache

from gemmpipe.errors import UserError, quoted
from gemmpipe.sources.decoder.linear import Linear

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.")
_WITHIN_S = 5.0
_MATCH = """
import json, re, sys
expressions, names = json.load(sys.stdin)
compiled = [re.compile(each) for each in expressions]
json.dump([name for name in names if any(e.match(name) or e.match("model." + name) for e in compiled)], sys.stdout)
"""


def ignored_places(linears: Sequence[Linear], patterns: Sequence[str]) -> list[frozenset[int]]:
    """For each linear the layers in which one of its matrices is named.

    Raises UserError for a pattern that is none, and for patterns that take too long.
    """
    words = frozenset(_plain(pattern) for pattern in patterns if not _is_expression(pattern))
    expressions = tuple(_expression(pattern) for pattern in patterns if _is_expression(pattern))
    held = [
        {place: [_full(linear, place, module) for module in linear.modules] for place in linear.places}
        for linear in linears
    ]
    # A pattern may name the module or what holds it.
    holders = {holder for places in held for names in places.values() for name in names for holder in _starts(name)}
    matched = _matched(expressions, tuple(sorted(holders))) if expressions else frozenset()
    return [
        frozenset(place for place, names in places.items() if any(_is_named(name, words, matched) for name in names))
        for places in held
    ]


def _is_named(name: str, words: frozenset[str], matched: frozenset[str]) -> bool:
    starts = _starts(name)
    return not (words.isdisjoint(starts) and matched.isdisjoint(starts) and words.isdisjoint(_ends(name)))


def _is_expression(pattern: str) -> bool:
    return pattern.startswith("re:") or "*" in pattern


def _plain(pattern: str) -> str:
    """The name without `model.` and the like in front."""
    return next((pattern.removeprefix(each) for each in _PREFIXES if pattern.startswith(each)), pattern)


def _expression(pattern: str) -> str:
    if not pattern.startswith("re:"):
        return fnmatch.translate(_plain(pattern))
    try:
        return re.compile(pattern.removeprefix("re:")).pattern
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"quantization_config: ignored module {quoted(pattern)}: {error}") from None


def _full(linear: Linear, place: int, module: str) -> str:
    return module if linear.layer == "lm_head" else f"layers.{place}.{module}"


def _starts(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _ends(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


@lru_cache(maxsize=4)
def _matched(expressions: tuple[str, ...], names: tuple[str, ...]) -> frozenset[str]:
    """The names that an expression matches; in a process that can be stopped: a few letters can take for ever."""
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-c", _MATCH],
            input=json.dumps([expressions, names]),
            capture_output=True,
            check=True,
            text=True,
            timeout=_WITHIN_S,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):  # the latter: out of memory
        most = max(expressions, key=len)
        raise UserError(
            f"quantization_config: ignored modules such as 're:{most[:60]}' cannot be matched within "
            f"{_WITHIN_S:g} s, expected simple patterns"
        ) from None
    return frozenset(json.loads(found.stdout))
