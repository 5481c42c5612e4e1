"""Keys of a configuration file with their values and comments, as typed and commented in the file."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

_DATA = frozenset({"config", "items"})
"""Keys of `shapes` options with the facts of a model: data, not settings."""
_COMMENT = re.compile(r"\s#\s?(.*)$")


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a file: its path in the file, its value as written, and its comment."""

    path: str
    value: str
    comment: str


@dataclass(frozen=True, kw_only=True)
class OptionFile:
    """A file of options or a pipeline: its title, the options that it includes, and its keys."""

    title: str
    includes: tuple[str, ...]
    keys: tuple[Key, ...]


def read_option(path: Path) -> OptionFile:
    """The title, the inclusions and the keys of a file, in the file's order."""
    text = path.read_text()
    tree = yaml.safe_load(text) or {}
    first = text.partition("\n")[0]
    return OptionFile(
        title=first.lstrip("# ") if first.startswith("#") else "",
        includes=tuple(_included(entry) for entry in tree.get("defaults") or () if entry != "_self_"),
        keys=tuple(_keys(yaml.compose(text), text.splitlines())),
    )


def _included(entry: object) -> str:
    """An entry of a defaults list: the name of an option of the same group, or `group@package: option`."""
    if isinstance(entry, dict):
        ((group, option),) = entry.items()
        return f"{group}: {option}"
    return str(entry)


def _keys(node: yaml.Node | None, lines: list[str], prefix: str = "") -> Iterator[Key]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        path = f"{prefix}{name.value}"
        if not prefix and name.value in ("defaults", "hydra"):
            continue
        block = isinstance(value, yaml.MappingNode) and not value.flow_style and bool(value.value)
        yield Key(path=path, value=_text(name, value, lines), comment=_comment(name, value, lines))
        if block and name.value not in _DATA:
            yield from _keys(value, lines, f"{path}.")


def _text(name: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    """The value as written if it is on the key's line, else an ellipsis for the lines below."""
    start, end = value.start_mark, value.end_mark
    if start.line != name.start_mark.line:
        return "..."
    if end.line != start.line:
        return "..."
    return lines[start.line][start.column : end.column].strip()


def _comment(name: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    """The comment at the end of the key's line."""
    line = name.start_mark.line
    column = value.end_mark.column if value.end_mark.line == value.start_mark.line == line else name.end_mark.column
    found = _COMMENT.search(lines[line], column)
    return found[1].strip() if found else ""
