"""Recipes: a command line written down as YAML, read as plain data and turned back into overrides."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from gemmpipe.cli.words import quote
from gemmpipe.errors import UserError

_VERSION = 1
_MOST_BYTES = 1_000_000
_OWN = ("version", "pipeline", "sweep")
_KEY = re.compile(r"[A-Za-z_][\w.@/-]*")
_HYDRA = re.compile(r"(^|[@./])hydra([@./]|$)")
_SPECIAL = re.compile(r"(^|[.@/])_\w+_($|[.@/])")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe says: the pipeline, its overrides in Hydra's grammar, and whether they are a sweep."""

    path: Path
    pipeline: str | None
    overrides: tuple[str, ...]
    multirun: bool


class _PlainLoader(yaml.SafeLoader):
    """Plain YAML: no aliases (a few lines of them expand without end) and no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not allowed in a recipe", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' is there twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_recipe(path: Path, groups: frozenset[str]) -> Recipe:
    """Read a recipe; `groups` are the words that choose an option. Raises UserError naming the file and the key."""
    body = _load(path)
    version = body.get("version")
    if type(version) is not int or version != _VERSION:
        given = "is missing" if version is None else f"is {version!r}"
        raise UserError(f"{path}: version {given}; expected 'version: {_VERSION}'")
    pipeline = body.get("pipeline")
    if pipeline is not None and not isinstance(pipeline, str):
        raise UserError(f"{path}: pipeline is {pipeline!r}; expected a name, as in 'pipeline: tune'")
    sweep = body.get("sweep")
    if sweep is not None and (not isinstance(sweep, dict) or not sweep):
        raise UserError(f"{path}: sweep is {sweep!r}; expected keys with lists of values")
    words = [word for key, value in body.items() if key not in _OWN for word in _overrides(path, key, value, groups)]
    swept = [_sweep(path, key, values) for key, values in (sweep or {}).items()]
    return Recipe(path=path, pipeline=pipeline, overrides=(*words, *swept), multirun=bool(swept))


def _load(path: Path) -> dict[object, object]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path}: larger than {_MOST_BYTES:,} bytes; expected a recipe")
        body = yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)  # noqa: S506 (derived from SafeLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; expected a recipe in YAML") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}:{line} {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected keys and values that begin with 'version: {_VERSION}'")
    return body


def _overrides(path: Path, key: object, value: object, groups: frozenset[str]) -> list[str]:
    """The overrides of one key; a mapping under a group's name means the keys of the chosen option."""
    name = _checked_key(path, key)
    if name in groups and isinstance(value, Mapping):
        return [word for inner, item in value.items() for word in _overrides(path, f"{name}.{inner}", item, groups)]
    return [f"{name}={_value(path, name, value)}"]


def _sweep(path: Path, key: object, values: object) -> str:
    name = _checked_key(path, key)
    if not isinstance(values, list) or not values:
        raise UserError(f"{path}: sweep.{name} is {values!r}; expected a list of values")
    return f"{name}=" + ",".join(_value(path, name, value) for value in values)


def _checked_key(path: Path, key: object) -> str:
    if isinstance(key, str) and _SPECIAL.search(key):
        raise UserError(f"{path}: {key}: not allowed in a recipe, which can choose options but name no code")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UserError(f"{path}: key {key!r}; expected a key as on the command line, such as shapes.tp")
    if _HYDRA.search(key):
        raise UserError(f"{path}: {key}: hydra's own settings are for the command line, not for a recipe")
    return key


def _value(path: Path, key: str, value: object) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        if "${" in value:
            raise UserError(f"{path}: {key}: '{value}': interpolations are not allowed in a recipe")
        return quote(str(Path(value).expanduser()) if value.startswith("~/") else value)
    if isinstance(value, list):
        return f"[{','.join(_value(path, key, item) for item in value)}]"
    if isinstance(value, Mapping):
        names = [_checked_key(path, inner) for inner in value]
        texts = [_value(path, f"{key}.{name}", value[name]) for name in names]
        return "{" + ",".join(f"{name}:{text}" for name, text in zip(names, texts, strict=True)) + "}"
    raise UserError(f"{path}: {key}: {value!r} is a {type(value).__name__}; expected text, a number, a list or keys")
