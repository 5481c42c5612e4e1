"""Search spaces: axes of knob values with conditional replacements, and their parsing from the configuration.

`Space.configs` enumerates the points of a space; `parse_space` checks a configuration's space, limits its size and
records the axes that the command line pins.
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
"""The values that conditions can use in addition to axes: `arch` (`sm_90`), `vendor`, `w_dtype`, `M`, `N`, `K`."""

_FACTS = ("arch", "vendor", "w_dtype", "M", "N", "K", "B", "E", "topk", "rows")
_COUNTLESS = 10**300  # beyond, no float holds the number
_MAX_CONFIGS = 100_000_000
"""Limit of `most_points`, which is about 45,000,000 for the largest shipped space."""
_MAX_PROBLEM_CONFIGS = 3_000_000
"""Limit of the points for one problem, which are kept in memory: at most 20,736 in a shipped space."""


@renamed_members(points="configs")
@dataclass(frozen=True, kw_only=True)
class Space:
    """Axes, and `when` entries that replace axes for the points that match them.

    In an entry a scalar is a condition and a list is a replacement. Conditions compare a fact or an axis: equal,
    a glob (`arch: "gfx*"`), or a bound (`M: "<=64"`). Later entries override earlier ones. An axis in `pinned` (set on
    the command line) is never replaced.
    """

    axes: Axes
    when: tuple[Mapping[str, Scalar | tuple[Scalar, ...]], ...]
    pinned: tuple[str, ...]

    def configs(self, facts: Facts, unused: Collection[str] = ()) -> Iterator[dict[str, Scalar]]:
        """The distinct points of the space for one problem on one device, in the order of the axes.

        If a fact has the name of an axis, only points with its value; for an `unused` axis (without effect on this
        device) only points with its first value, unless an entry has a condition on it. Raises UserError for too many.
        """
        count = 0
        single = {name for name in unused if not any(name in e and not _is_list(e[name]) for e in self.when)}
        for axes in self._variants(facts):
            axes |= {name: axes[name][:1] for name in single & axes.keys()}
            count += math.prod(map(len, axes.values()))
            if count > _MAX_PROBLEM_CONFIGS:
                raise UserError(f"space: {count:,} points for one problem, expected at most {_MAX_PROBLEM_CONFIGS:,}")
            for values in itertools.product(*axes.values()):
                yield dict(zip(axes, values, strict=True))

    def _variants(self, facts: Facts) -> Iterator[dict[str, tuple[Scalar, ...]]]:
        """The axes for each combination of values of the axes with conditions; variants have no common point."""
        conditional = [name for name in self.axes if any(name in e and not _is_list(e[name]) for e in self.when)]
        domains = _restricted({name: self._all_values(name) for name in conditional}, facts)
        for fixed, overrides in _assignments(domains, {}, self.axes, self._overrides(facts, conditional)):
            axes = dict(self.axes)
            for override in overrides:
                axes |= override.values
            yield _restricted({**axes, **{name: (value,) for name, value in fixed.items()}}, facts)

    def _all_values(self, name: str) -> tuple[Scalar, ...]:
        """All values of an axis, also those in entries: one entry may have a condition on a value from another."""
        replacements = (e[name] for e in self.when if name in e) if name not in self.pinned else ()
        return (*self.axes[name], *itertools.chain.from_iterable(v for v in replacements if isinstance(v, tuple)))

    def _overrides(self, facts: Facts, conditional: Collection[str]) -> list["_Override"]:
        """The entries whose conditions on facts hold, with their conditions on axes."""
        overrides = []
        for entry in self.when:
            conditions = {k: v for k, v in entry.items() if not _is_list(v)}
            known = [(facts[k], v) for k, v in conditions.items() if k in facts and k not in conditional]
            if all(k in facts or k in conditional for k in conditions) and all(matches(*each) for each in known):
                values = {k: v for k, v in entry.items() if isinstance(v, tuple) and k not in self.pinned}
                on_axes = {k: v for k, v in conditions.items() if k in conditional}
                overrides.append(_Override(conditions=on_axes, values=values))
        return overrides


@dataclass(frozen=True, kw_only=True, slots=True)
class _Override:
    """An entry for one problem: its conditions on axes, and the values that replace those of axes."""

    conditions: Mapping[str, Scalar | tuple[Scalar, ...]]
    values: Axes


def _assignments(
    domains: Axes, fixed: dict[str, Scalar], axes: Axes, overrides: list[_Override]
) -> Iterator[tuple[dict[str, Scalar], list[_Override]]]:
    """The consistent assignments of the axes in `domains`, in order, each with the overrides that apply to it.

    Axes are assigned one by one, and a branch ends as soon as a fixed value is no longer allowed: ten axes have
    thousands of combinations, of which dozens are consistent (enumerating all took 84 % of a search's time,
    2026-11-22).
    """
    if not all(_is_allowed(name, value, fixed, axes, overrides) for name, value in fixed.items()):
        return
    if len(fixed) == len(domains):
        yield fixed, overrides
        return
    name = list(domains)[len(fixed)]
    for value in domains[name]:
        left = [each for each in overrides if name not in each.conditions or matches(value, each.conditions[name])]
        yield from _assignments(domains, {**fixed, name: value}, axes, left)


def _is_allowed(name: str, value: Scalar, fixed: Collection[str], axes: Axes, overrides: list[_Override]) -> bool:
    """True if an axis can have this value: by the last override that applies, or by one that may still apply."""
    allowed = value in axes[name]
    for override in overrides:
        if name in override.values:
            applies = all(condition in fixed for condition in override.conditions)
            allowed = value in override.values[name] or (allowed and not applies)
    return allowed


def _restricted(axes: Axes, facts: Facts) -> dict[str, tuple[Scalar, ...]]:
    """The distinct values of each axis; for an axis with the name of a fact only the fact's value."""
    return {
        name: tuple(v for v in dict.fromkeys(values) if name not in facts or v == facts[name])
        for name, values in axes.items()
    }


def _is_list(value: object) -> bool:
    return isinstance(value, tuple)


def matches(value: Scalar, condition: Scalar | tuple[Scalar, ...]) -> bool:
    """True if a value meets a condition: equality, a glob for text, or a bound such as `<=64`.

    Raises UserError for a bound that is not a number.
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


def parse_space(node: object, overrides: Sequence[str], where: str = "space") -> Space:
    """The search space of a configuration node; an axis with a command-line override `space.X=` is pinned.

    Raises UserError with the full key.
    """
    if not isinstance(node, Mapping):
        raise UserError(f"{where}: {node!r} given, expected axes with lists of values")
    if "when" not in node:
        raise UserError(f"{where}.when: missing; expected a list of entries, [] for none")
    axes = {str(name): _axis(f"{where}.{name}", values) for name, values in node.items() if name != "when"}
    when = node["when"]
    if not isinstance(when, list):
        raise UserError(f"{where}.when: {when!r} given, expected a list of entries")
    entries = tuple(_entry(f"{where}.when[{index}]", entry, axes) for index, entry in enumerate(when))
    space = Space(axes=axes, when=entries, pinned=_pinned_axes(axes, overrides))
    if (bound := most_points(space)) > _MAX_CONFIGS:  # a few lines of YAML can define any number of points
        size = f"up to {bound:.2g}" if bound < _COUNTLESS else "countless"
        raise UserError(f"space: {size} points, expected at most {_MAX_CONFIGS:,}")
    return space


def most_points(space: Space) -> int:
    """A number that the points of no problem exceed, nor the branches that enumerating them looks at.

    For each value of the axis with the most conditions, `kernel_type` in the shipped spaces, a product: of the numbers
    of all values of axes with conditions, and of the most values at a time of the others.
    """
    conditions = [name for entry in space.when for name in entry if name in space.axes and not _is_list(entry[name])]
    domains = {name: len(set(space._all_values(name))) for name in dict.fromkeys(conditions)}
    if not conditions:
        return math.prod(_longest(space, "", None).values())
    pivot = max(domains, key=conditions.count)
    branches = math.prod(count for name, count in domains.items() if name != pivot)
    others = (_longest(space, pivot, value) for value in set(space._all_values(pivot)))
    return branches * sum(math.prod(n for name, n in each.items() if name not in domains) for each in others)


def _longest(space: Space, pivot: str, value: Scalar) -> dict[str, int]:
    """The most values at a time of each axis, where the axis `pivot` has this value."""
    longest = {name: len(values) for name, values in space.axes.items()}
    for entry in space.when:
        conditions = {name: each for name, each in entry.items() if not _is_list(each)}
        if pivot in conditions and not _may_match(value, conditions[pivot]):
            continue
        for name, values in entry.items():
            if isinstance(values, tuple) and name not in space.pinned:
                # An entry without another condition replaces what was before.
                certain = conditions.keys() <= {pivot}
                longest[name] = len(values) if certain else max(longest[name], len(values))
    return longest


def _may_match(value: Scalar, condition: Scalar | tuple[Scalar, ...]) -> bool:
    """As `matches`; true where they cannot be compared, as an entry for other devices need not be."""
    try:
        return matches(value, condition)
    except UserError:
        return True


def _pinned_axes(axes: Mapping[str, object], overrides: Sequence[str]) -> tuple[str, ...]:
    """The axes with an override. Raises UserError for `+space.X`, which would add an axis."""
    keys = [override.split("=", 1)[0].split(".") for override in overrides]
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
