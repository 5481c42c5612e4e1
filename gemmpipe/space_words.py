"""The search space as the configuration says it: checked, bounded, and which axes the command line pins."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gemmpipe.errors import UserError, nearest
from gemmpipe.space import Space

_FACTS = ("arch", "vendor", "M", "N", "K", "B", "E", "topk", "rows")
_MOST_POINTS = 20_000_000
"""Of a problem; the largest space that is shipped has some 100,000."""


def read_space(node: object, overrides: Sequence[str], where: str = "space") -> Space:
    """The search space; an axis named by an override `space.X=` is pinned. Raises UserError naming the full key."""
    if not isinstance(node, Mapping):
        raise UserError(f"{where}: {node!r} given, expected axes with lists of values")
    if "when" not in node:
        raise UserError(f"{where}.when: missing; expected a list of entries, [] for none")
    axes = {str(name): _axis(f"{where}.{name}", values) for name, values in node.items() if name != "when"}
    when = node["when"]
    if not isinstance(when, list):
        raise UserError(f"{where}.when: {when!r} given, expected a list of entries")
    entries = tuple(_entry(f"{where}.when[{index}]", entry, axes) for index, entry in enumerate(when))
    _bounded(axes, entries)
    return Space(axes=axes, when=entries, pinned=_pinned(axes, overrides))


def _bounded(axes: Mapping[str, tuple[Any, ...]], entries: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a space that nobody could list: a file of a few lines can ask for more points than there are atoms."""
    longest = {name: len(values) for name, values in axes.items()}
    for entry in entries:
        for name, values in entry.items():
            if isinstance(values, tuple):
                longest[name] = max(longest[name], len(values))
    if math.prod(longest.values()) > _MOST_POINTS:
        raise UserError(f"space: up to {math.prod(longest.values()):.2g} points, expected at most {_MOST_POINTS:,}")


def _pinned(axes: Mapping[str, object], overrides: Sequence[str]) -> tuple[str, ...]:
    """The axes that overrides name. Raises UserError for `+space.X`, which would add one."""
    keys = [word.split("=", 1)[0].split(".") for word in overrides]
    named = [(key[0], key[1]) for key in keys if len(key) > 1 and key[0].lstrip("+~") == "space"]
    for sign, axis in named:
        if sign.startswith("+"):
            others = [name for name in axes if name != axis]
            raise UserError(f"space.{axis}: the space has no such axis{nearest(axis, others)}")
    return tuple(axis for _, axis in named if axis in axes)


def _axis(where: str, values: object) -> tuple[Any, ...]:
    listed = tuple(values) if isinstance(values, list) else (values,)
    if not listed:
        raise UserError(f"{where}: [] given, expected at least one value")
    for value in listed:
        if isinstance(value, Mapping | list):
            raise UserError(f"{where}: {value!r} given, expected a number, a text, true, false or null")
    return listed


def _entry(where: str, entry: object, axes: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `when`: conditions on facts and axes, and lists that replace axes."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: {entry!r} given, expected conditions and axes")
    for key, value in entry.items():
        known = axes if isinstance(value, list) else (*axes, *_FACTS)
        if key not in known:
            what = "axis" if isinstance(value, list) else "axis or fact"
            raise UserError(f"{where}.{key}: no such {what}{nearest(str(key), [str(name) for name in known])}")
        if isinstance(value, Mapping):
            raise UserError(f"{where}.{key}: {value!r} given, expected a condition or a list")
    return {str(k): _axis(f"{where}.{k}", v) if isinstance(v, list) else v for k, v in entry.items()}
