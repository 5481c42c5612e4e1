"""Converts plain YAML values to annotated types, and constructs dataclasses from them."""

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.family.space import Space, parse_space

Make = Callable[[Mapping[str, Any], type, str], object]
"""(node with `_target_`, expected class, key) -> the object. Raises UserError."""

_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}


class _Mismatch(Exception):
    """The value is not of the annotated type."""


def convert(value: object, hint: Any, where: str, make: Make) -> Any:
    """`value` as the type `hint`: lists become tuples, nodes with `_target_` objects, a single value a tuple of one.

    Raises UserError naming the key, what was given and what was expected.
    """
    try:
        return _converted(value, hint, where, make)
    except _Mismatch:
        shown = f"'{value}'" if isinstance(value, str) else _yaml(value)
        raise UserError(f"{where}: {shown} given, expected {describe(hint)}{_hint_text(value, hint)}") from None


def construct(cls: type, values: Mapping[str, Any], where: str, make: Make) -> Any:
    """Construct `cls` from exactly its fields. Raises UserError for unknown, missing or mistyped ones."""
    fields = dict(inspect.signature(cls).parameters)
    hints = typing.get_type_hints(cls if is_dataclass(cls) else vars(cls).get("__init__", cls))
    for key in values:
        if key not in fields:
            known = suggest_or_list(str(key), fields) or f"; {cls.__name__} has no settings"
            raise UserError(f"{where}.{key}: no such key{known}")
    for name, field in fields.items():
        if name not in values and field.default is inspect.Parameter.empty:
            raise UserError(f"{where}.{name}: missing, expected {describe(hints.get(name, object))}")
    ready = {key: convert(value, hints.get(key, object), f"{where}.{key}", make) for key, value in values.items()}
    try:
        return cls(**ready)
    except ValueError as error:
        raise UserError(_with_full_key(str(error), where, fields)) from None


def _with_full_key(text: str, where: str, fields: Collection[str]) -> str:
    """A constructor's error `field=value, ...` with the field's full key; other errors with the node's key."""
    name, _, rest = text.partition("=")
    if name.split(".")[0] not in fields:
        return f"{where}: {text}"
    value, comma, expected = rest.partition(", ")
    return f"{where}.{name}: {value}{' given' if comma else ''}{comma}{expected}"


def describe(hint: Any) -> str:
    """An annotation in plain English, for errors."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _NAMES:
        return _NAMES[hint]
    if origin is Literal:
        return "one of " + ", ".join(_yaml(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return f"[{', '.join(describe(arg) for arg in args)}]"
    if origin in (tuple, list, Sequence):
        return f"[{describe(args[0])}, ...]"
    if origin in (Mapping, dict):
        return f"keys, each with {describe(args[1])}"
    if hint in (Any, object) or not isinstance(hint, type):
        return "a value"
    return "keys and values"


def _converted(value: object, hint: Any, where: str, make: Make) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return _frozen(value)
    if origin in (Union, types.UnionType):
        return _first_match(value, args, where, make)
    if origin is Literal:
        return _equals(value, args)
    if origin in (tuple, list, Sequence) or hint in (tuple, list):
        return _listed(value, args or (Any, ...), where, make)
    if origin in (Mapping, dict):
        return _mapped(value, args, where, make)
    if hint in _NAMES:
        return _scalar(value, hint)
    if hint is Space:
        return parse_space(value, (), where)
    if isinstance(hint, type) and isinstance(value, Mapping):
        if "_target_" in value:
            return make(value, hint, where)
        if is_dataclass(hint) and not inspect.isabstract(hint):
            return construct(hint, value, where, make)
        raise UserError(f"{where}._target_: missing, expected the class of a {hint.__name__}")
    raise _Mismatch


def _scalar(value: object, hint: Any) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif hint is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    elif hint in (str, bool, type(None)) and type(value) is hint:
        return value
    raise _Mismatch


def _equals(value: object, allowed: Sequence[object]) -> object:
    for one in allowed:
        if value == one and type(value) is type(one):
            return one
    raise _Mismatch


def _first_match(value: object, hints: Sequence[Any], where: str, make: Make) -> Any:
    """The value as the first matching member of a union; as a tuple of one only if nothing else matches."""
    plain = [hint for hint in hints if isinstance(value, list) or not _is_list(hint)]
    for hint in [*plain, *(hint for hint in hints if hint not in plain)]:
        try:
            return _converted(value, hint, where, make)
        except _Mismatch:
            continue
    raise _Mismatch


def _listed(value: object, args: Sequence[Any], where: str, make: Make) -> tuple[Any, ...]:
    items = value if isinstance(value, list) else [value]
    fixed = len(args) > 1 and args[-1] is not Ellipsis
    if fixed and len(args) != len(items):
        raise _Mismatch
    kinds = args if fixed else [args[0]] * len(items)
    pairs = enumerate(zip(items, kinds, strict=True))
    return tuple(_converted(item, kind, f"{where}[{index}]", make) for index, (item, kind) in pairs)


def _mapped(value: object, args: Sequence[Any], where: str, make: Make) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Mismatch
    return {str(key): convert(item, args[1], f"{where}.{key}", make) for key, item in value.items()}


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) in (tuple, list, Sequence)


def _frozen(value: object) -> object:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _frozen(item) for key, item in value.items()}
    return value


def _yaml(value: object) -> str:
    """A value in YAML, as the user writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    return str(value)


def _hint_text(value: object, hint: Any) -> str:
    """The hint of an error: quotes for a number given as text, or the nearest name of a Literal."""
    if typing.get_origin(hint) is Literal and isinstance(value, str):
        return suggest(value, [arg for arg in typing.get_args(hint) if isinstance(arg, str)])
    union = typing.get_origin(hint) in (Union, types.UnionType)
    wants_text = hint is str or (union and str in typing.get_args(hint))
    if wants_text and isinstance(value, int | float) and not isinstance(value, bool):
        return f"; in quotes: '\"{value}\"'"
    return ""
