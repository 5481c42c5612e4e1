"""A search space: axes of knob values, and entries that replace axes where they match."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError

Axes = Mapping[str, tuple[Scalar, ...]]
"""Values by axis."""

Facts = Mapping[str, Scalar]
"""What an entry can ask about besides axes: `arch` (`sm_90`), `vendor`, `M`, `N`, `K`."""


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

    def points(self, facts: Facts, unused: Collection[str] = ()) -> Iterator[dict[str, Scalar]]:
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
        ever = _narrowed({name: self._ever(name) for name in asked}, facts)
        for fixed, rules in _choices(ever, {}, self.axes, self._rules(facts, asked)):
            axes = dict(self.axes)
            for rule in rules:
                axes |= rule.values
            yield _narrowed({**axes, **{name: (value,) for name, value in fixed.items()}}, facts)

    def _ever(self, name: str) -> tuple[Scalar, ...]:
        """Every value that an axis takes anywhere: an entry may ask about one that another entry brings in."""
        brought = (e[name] for e in self.when if name in e) if name not in self.pinned else ()
        return sum((v for v in brought if isinstance(v, tuple)), self.axes[name])

    def _rules(self, facts: Facts, asked: Collection[str]) -> list["_Rule"]:
        """The entries that the facts allow, and what they ask of axes."""
        rules = []
        for entry in self.when:
            conditions = {k: v for k, v in entry.items() if not _is_list(v)}
            known = [(facts[k], v) for k, v in conditions.items() if k in facts and k not in asked]
            if all(k in facts or k in asked for k in conditions) and all(matches(*each) for each in known):
                values = {k: v for k, v in entry.items() if isinstance(v, tuple) and k not in self.pinned}
                rules.append(_Rule(asks={k: v for k, v in conditions.items() if k in asked}, values=values))
        return rules


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """An entry for one problem: what it asks of axes, and the values that it gives others."""

    asks: Mapping[str, Scalar | tuple[Scalar, ...]]
    values: Axes


def _choices(
    ever: Axes, fixed: dict[str, Scalar], axes: Axes, rules: list[_Rule]
) -> Iterator[tuple[dict[str, Scalar], list[_Rule]]]:
    """Values of the axes in `ever` that stand together, in their order, and the rules that then apply.

    Axis by axis, and no further where one that is fixed cannot have its value any more: all combinations of ten axes
    are thousands, of which dozens stand (a search spent 84 % of its time on the others, 2026-11-22).
    """
    if not all(_stands(name, value, fixed, axes, rules) for name, value in fixed.items()):
        return
    if len(fixed) == len(ever):
        yield fixed, rules
        return
    name = list(ever)[len(fixed)]
    for value in ever[name]:
        left = [rule for rule in rules if name not in rule.asks or matches(value, rule.asks[name])]
        yield from _choices(ever, {**fixed, name: value}, axes, left)


def _stands(name: str, value: Scalar, fixed: Collection[str], axes: Axes, rules: list[_Rule]) -> bool:
    """Whether an axis can have this value: the last rule that applies decides, and those that still might, allow."""
    stands = value in axes[name]
    for rule in rules:
        if name in rule.values:
            decided = all(asked in fixed for asked in rule.asks)
            stands = value in rule.values[name] or (stands and not decided)
    return stands


def _narrowed(axes: Axes, facts: Facts) -> dict[str, tuple[Scalar, ...]]:
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
