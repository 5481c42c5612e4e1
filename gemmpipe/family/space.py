"""A search space: axes of knob values, and entries that replace axes where they match.

The search space as the configuration says it: checked, bounded, and which axes the command line pins.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.core.renamed import renamed_members

Axes = Mapping[str, tuple[Scalar, ...]]
"""Values by axis."""

Facts = Mapping[str, Scalar]
"""What an entry can ask about besides axes: `arch` (`sm_90`), `vendor`, `M`, `N`, `K`."""


@renamed_members(points="configs")
@dataclass(frozen=True, kw_only=True)
class Space:
    """Axes at the top; each `when` entry replaces axes for the points that match it.

    In an entry a scalar is a condition and a list is a replacement. Conditions compare a fact or an axis: equal,
    a glob (`arch: "gfx*"`), or a bound (`M: "<=64"`). Later entries win over earlier ones. An axis named in
    `pinned` (given on the command line) is never replaced.
    """

    axes: Axes
    when: tuple[Mapping[str, Scalar | tuple[Scalar, ...]], ...]
    pinned: tuple[str, ...]

    def configs(self, facts: Facts, unused: Collection[str] = ()) -> Iterator[dict[str, Scalar]]:
        """Every point of the space for one problem on one device, each once, in the order of the axes.

        Where a fact has an axis' name, only points with that value are made; of an `unused` axis, which means nothing
        on this device, only those with its first value, unless an entry asks about it.
        """
        single = {name for name in unused if not any(name in e and not _is_list(e[name]) for e in self.when)}
        for axes in self._variants(facts):
            axes |= {name: axes[name][:1] for name in single & axes.keys()}
            for values in itertools.product(*axes.values()):
                yield dict(zip(axes, values, strict=True))

    def _variants(self, facts: Facts) -> Iterator[dict[str, tuple[Scalar, ...]]]:
        """The axes once for every way in which entries that look at axes can match; no two hold the same point."""
        asked = [name for name in self.axes if any(name in e and not _is_list(e[name]) for e in self.when)]
        ever = _restricted({name: self._all_values(name) for name in asked}, facts)
        for fixed, rules in _assignments(ever, {}, self.axes, self._overrides(facts, asked)):
            axes = dict(self.axes)
            for rule in rules:
                axes |= rule.values
            yield _restricted({**axes, **{name: (value,) for name, value in fixed.items()}}, facts)

    def _all_values(self, name: str) -> tuple[Scalar, ...]:
        """Every value that an axis takes anywhere: an entry may ask about one that another entry brings in."""
        brought = (e[name] for e in self.when if name in e) if name not in self.pinned else ()
        return sum((v for v in brought if isinstance(v, tuple)), self.axes[name])

    def _overrides(self, facts: Facts, asked: Collection[str]) -> list["_Override"]:
        """The entries that the facts allow, and what they ask of axes."""
        rules = []
        for entry in self.when:
            conditions = {k: v for k, v in entry.items() if not _is_list(v)}
            known = [(facts[k], v) for k, v in conditions.items() if k in facts and k not in asked]
            if all(k in facts or k in asked for k in conditions) and all(matches(*each) for each in known):
                values = {k: v for k, v in entry.items() if isinstance(v, tuple) and k not in self.pinned}
                rules.append(_Override(conditions={k: v for k, v in conditions.items() if k in asked}, values=values))
        return rules


@dataclass(frozen=True, kw_only=True, slots=True)
class _Override:
    """An entry for one problem: what it asks of axes, and the values that it gives others."""

    conditions: Mapping[str, Scalar | tuple[Scalar, ...]]
    values: Axes


def _assignments(
    ever: Axes, fixed: dict[str, Scalar], axes: Axes, rules: list[_Override]
) -> Iterator[tuple[dict[str, Scalar], list[_Override]]]:
    """Values of the axes in `ever` that stand together, in their order, and the rules that then apply.

    Axis by axis, and no further where one that is fixed cannot have its value any more: all combinations of ten axes
    are thousands, of which dozens stand (a search spent 84 % of its time on the others, 2026-11-22).
    """
    if not all(_is_allowed(name, value, fixed, axes, rules) for name, value in fixed.items()):
        return
    if len(fixed) == len(ever):
        yield fixed, rules
        return
    name = list(ever)[len(fixed)]
    for value in ever[name]:
        left = [rule for rule in rules if name not in rule.conditions or matches(value, rule.conditions[name])]
        yield from _assignments(ever, {**fixed, name: value}, axes, left)


def _is_allowed(name: str, value: Scalar, fixed: Collection[str], axes: Axes, rules: list[_Override]) -> bool:
    """Whether an axis can have this value: the last rule that applies decides, and those that still might, allow."""
    stands = value in axes[name]
    for rule in rules:
        if name in rule.values:
            decided = all(asked in fixed for asked in rule.conditions)
            stands = value in rule.values[name] or (stands and not decided)
    return stands


def _restricted(axes: Axes, facts: Facts) -> dict[str, tuple[Scalar, ...]]:
    """Each value of an axis once, and only the one that a fact names."""
    return {
        name: tuple(v for v in dict.fromkeys(values) if name not in facts or v == facts[name])
        for name, values in axes.items()
    }


def _is_list(value: object) -> bool:
    return isinstance(value, tuple)


def matches(value: Scalar, condition: Scalar | tuple[Scalar, ...]) -> bool:
    """Whether a fact meets a condition: equality, a glob for text, or a bound such as `<=64`.

    Raises UserError for a bound that is no number.
    """
    if isinstance(condition, str) and condition[:1] in "<>" and condition:
        sign = condition[:2] if condition[1:2] == "=" else condition[:1]
        try:
            bound = float(condition[len(sign) :])
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise UserError(f"space.when: condition '{condition}' needs a number, as in '<=64'") from None
        return {"<": number < bound, "<=": number <= bound, ">": number > bound, ">=": number >= bound}[sign]
    if isinstance(condition, str) and isinstance(value, str):
        return fnmatchcase(value, condition)
    return value == condition


_FACTS = ("arch", "vendor", "M", "N", "K", "B", "E", "topk", "rows")
_MAX_CONFIGS = 20_000_000
"""Of a problem; the largest space that is shipped has some 100,000."""


def parse_space(node: object, overrides: Sequence[str], where: str = "space") -> Space:
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
    _check_size(axes, entries)
    return Space(axes=axes, when=entries, pinned=_pinned_axes(axes, overrides))


def _check_size(axes: Mapping[str, tuple[Any, ...]], entries: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a space that nobody could list: a file of a few lines can ask for more points than there are atoms."""
    longest = {name: len(values) for name, values in axes.items()}
    for entry in entries:
        for name, values in entry.items():
            if isinstance(values, tuple):
                longest[name] = max(longest[name], len(values))
    if math.prod(longest.values()) > _MAX_CONFIGS:
        raise UserError(f"space: up to {math.prod(longest.values()):.2g} points, expected at most {_MAX_CONFIGS:,}")


def _pinned_axes(axes: Mapping[str, object], overrides: Sequence[str]) -> tuple[str, ...]:
    """The axes that overrides name. Raises UserError for `+space.X`, which would add one."""
    keys = [word.split("=", 1)[0].split(".") for word in overrides]
    named = [(key[0], key[1]) for key in keys if len(key) > 1 and key[0].lstrip("+~") == "space"]
    for sign, axis in named:
        if sign.startswith("+"):
            others = [name for name in axes if name != axis]
            raise UserError(f"space.{axis}: the space has no such axis{suggest_or_list(axis, others)}")
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
            raise UserError(f"{where}.{key}: no such {what}{suggest_or_list(str(key), [str(name) for name in known])}")
        if isinstance(value, Mapping):
            raise UserError(f"{where}.{key}: {value!r} given, expected a condition or a list")
    return {str(k): _axis(f"{where}.{k}", v) if isinstance(v, list) else v for k, v in entry.items()}
