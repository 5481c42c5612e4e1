"""Recipes: a command line as a YAML file, read as plain data and converted to overrides.

A recipe may be untrusted. It selects existing options and sets their values; it cannot name code, other runs, clusters,
or output files outside the current directory. It can name any input file that the user may read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gemmpipe.cli.overrides import MAX_NESTING, quote
from gemmpipe.core.errors import UserError, quoted_repr, shortened
from gemmpipe.core.files import read_regular

_VERSION = 1
_MAX_BYTES = 100_000
"""PyYAML, in pure Python, takes at most a second for these."""
_MAX_KEY_LENGTH = 200
_MAX_NUMBER = 2**63
_MAX_VALUES = 2_000
"""Hydra's grammar takes milliseconds per value."""
_RECIPE_KEYS = ("version", "pipeline", "sweep")
_OUTPUT_KEY = re.compile(r"(^|\.)(output|profile|file)$")
"""Keys with a file or folder that the run writes."""
_FORBIDDEN = {
    "resume": "resumes a run with the overrides in its folder",
    "reuse": "reads another run with the overrides in its folder",
    "executor.address": "connects to a cluster, which can return any data",
}
"""Keys that only the command line sets: runs and clusters that they name are trusted."""
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_KEY = re.compile(r"[A-Za-z_][\w.@/-]*")
_HYDRA = re.compile(r"(^|[@./])hydra([@./]|$)")
_SPECIAL = re.compile(r"(^|[.@/])_\w+_($|[.@/])")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe's pipeline, its overrides in Hydra's grammar, and `multirun` if they are a sweep."""

    path: Path
    pipeline: str | None
    overrides: tuple[str, ...]
    multirun: bool


class ShallowLoader(yaml.SafeLoader):
    """YAML with a limit on nested brackets."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """PyYAML checks every open bracket at each token: some kilobytes of open brackets would take minutes."""
        if self.flow_level >= MAX_NESTING:
            problem = f"nested more than {MAX_NESTING} deep; expected a recipe"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


class _PlainLoader(ShallowLoader):
    """Plain YAML: no aliases (a few lines can expand exponentially), no tags, no duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or tag is not None:
            what = f"tags such as '{tag}'" if tag is not None else "aliases"
            raise yaml.MarkedYAMLError(problem=f"{what} are not allowed in a recipe", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key '{key.value}'", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_recipe(path: Path, groups: frozenset[str]) -> Recipe:
    """Read a recipe; `groups`: the keys that select an option. Raises UserError naming the file and the key."""
    body = _load_recipe(path)
    version = body.get("version")
    if type(version) is not int or version != _VERSION:
        given = "is missing" if version is None else f"is {quoted_repr(version)}"
        raise UserError(f"{path}: version {given}; expected 'version: {_VERSION}'")
    pipeline = body.get("pipeline")
    if pipeline is not None and not isinstance(pipeline, str):
        raise UserError(f"{path}: pipeline is {quoted_repr(pipeline)}; expected a name, as in 'pipeline: tune'")
    sweep = body.get("sweep")
    if sweep is not None and (not isinstance(sweep, dict) or not sweep):
        raise UserError(f"{path}: sweep is {quoted_repr(sweep)}; expected keys with lists of values")
    overrides = [
        override
        for key, value in body.items()
        if key not in _RECIPE_KEYS
        for override in _overrides(path, key, value, groups)
    ]
    swept = [_sweep(path, key, values, groups) for key, values in (sweep or {}).items()]
    return Recipe(path=path, pipeline=pipeline, overrides=(*overrides, *swept), multirun=bool(swept))


def _load_recipe(path: Path) -> dict[object, object]:
    try:
        text = read_regular(path, "a recipe in YAML", _MAX_BYTES).decode()
        body = yaml.load(text, _PlainLoader)  # noqa: S506 (derived from SafeLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; expected a recipe in YAML") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}:{line}: {error.problem}" if line else f"{path}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if _values_in(body) > _MAX_VALUES:
        raise UserError(f"{path}: more than {_MAX_VALUES:,} values; expected a recipe")
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected keys and values, first 'version: {_VERSION}'")
    return body


def _overrides(path: Path, key: object, value: object, groups: frozenset[str]) -> list[str]:
    """The overrides of one key; a mapping under a group's name sets keys of the selected option."""
    name = _checked_key(path, key)
    _check_option_names(path, name, value, groups)
    if name in groups and isinstance(value, Mapping):
        return [
            override for inner, item in value.items() for override in _overrides(path, f"{name}.{inner}", item, groups)
        ]
    return [f"{name}={_value(path, name, value)}"]


def _values_in(node: object) -> int:
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return 1 + sum(_values_in(item) for item in inner)


def _check_option_names(path: Path, key: str, value: object, groups: frozenset[str]) -> None:
    """Refuse options that are not names: Hydra accepts `../../tmp/x` too, a file that could add Hydra callbacks."""
    if key.split("@")[0] not in groups or isinstance(value, Mapping):
        return
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and not _NAME.fullmatch(name):
            raise UserError(f"{path}: {key}: '{shortened(name)}'; expected the name of an option, such as --help lists")


def _sweep(path: Path, key: object, values: object, groups: frozenset[str]) -> str:
    name = _checked_key(path, key)
    _check_option_names(path, name, values, groups)
    if not isinstance(values, list) or not values:
        raise UserError(f"{path}: sweep.{name} is {quoted_repr(values)}; expected a list of values")
    return f"{name}=" + ",".join(_value(path, name, value) for value in values)


def _checked_key(path: Path, key: object) -> str:
    if isinstance(key, str) and len(key) > _MAX_KEY_LENGTH:
        raise UserError(f"{path}: key {quoted_repr(key)}; expected a key as on the command line, such as shapes.tp")
    if isinstance(key, str) and _SPECIAL.search(key):
        raise UserError(f"{path}: {key}: not allowed in a recipe, which can select options but not name code")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UserError(f"{path}: key {quoted_repr(key)}; expected a key as on the command line, such as shapes.tp")
    if key in _FORBIDDEN:
        raise UserError(f"{path}: {key}: {_FORBIDDEN[key]}; expected on the command line, not in a recipe")
    if ".." in key or _HYDRA.search(key):
        raise UserError(f"{path}: {key}: hydra's own settings are for the command line, not for a recipe")
    return key


def _check_output_path(path: Path, key: str, value: str) -> None:
    """Refuse an output path outside the current directory, also through links."""
    try:
        inside = Path(value).expanduser().resolve().is_relative_to(Path.cwd().resolve())
    except (OSError, ValueError, RuntimeError):  # a null byte, a cycle of links, an unknown home directory
        inside = False
    if not inside or Path(value).is_absolute():
        raise UserError(
            f"{path}: {key}: '{shortened(value)}' is outside the current directory; expected a path in it, or type it"
        )


def _is_text(value: str) -> bool:
    """False for surrogates: YAML's escapes can write them, but files and terminals cannot encode them."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _value(path: Path, key: str, value: object, depth: int = 0) -> str:
    """A value in Hydra's grammar."""
    if depth > MAX_NESTING:
        raise UserError(f"{path}: {key[:60]}: nested more than {MAX_NESTING} deep; expected a recipe")
    if key in _FORBIDDEN:
        raise UserError(f"{path}: {key}: {_FORBIDDEN[key]}; expected on the command line, not in a recipe")
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) >= _MAX_NUMBER:
            raise UserError(f"{path}: {key}: a whole number of {value.bit_length():,} bits; expected at most 63")
        return repr(value)
    if isinstance(value, str):
        if not _is_text(value):
            raise UserError(f"{path}: {key}: {value[:60]!r} is not valid text; expected whole characters")
        if "${" in value:
            raise UserError(f"{path}: {key}: '{shortened(value)}': interpolations are not allowed in a recipe")
        if _OUTPUT_KEY.search(key):
            _check_output_path(path, key, value)
        return quote(str(Path(value).expanduser()) if value.startswith("~/") else value)
    if isinstance(value, list):
        return f"[{','.join(_value(path, key, item, depth + 1) for item in value)}]"
    if isinstance(value, Mapping):
        names = [_checked_key(path, inner) for inner in value]
        texts = [_value(path, f"{key}.{name}", value[name], depth + 1) for name in names]
        return "{" + ",".join(f"{name}:{text}" for name, text in zip(names, texts, strict=True)) + "}"
    raise UserError(
        f"{path}: {key}: {quoted_repr(value)} is a {type(value).__name__}; expected text, a number, a list or keys"
    )
