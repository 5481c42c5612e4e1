"""Keys, options and stages of version 0.1.0: rewritten in overrides, and in users' YAML files as Hydra reads them.

Each old name is reported once per process (`gemmpipe.core.renamed.note`). A key, a stage or an option that the user's
own files define under an old name is not renamed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from gemmpipe.cli.folders import read_text
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped
from gemmpipe.core.renamed import MOVED_KEYS, OPTIONS, RUNG_KEYS, SEARCH_KEYS, STAGE_KEYS, STAGES, current_path, note

_OVERRIDE = re.compile(
    r"(?P<sign>[+~]{0,2})(?P<key>[^=@]+)(?:@(?P<package>[^=]+))?(?P<bound>=?)(?P<value>.*)", re.DOTALL
)
_NAME = re.compile(r"[\w.-]+")
_INTERPOLATION = re.compile(r"(?<=\$\{)[A-Za-z_][\w.]*(?=\})")
_TOKEN = re.compile(r"""(?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<mark>[{}\[\],])|(?P<key>[\w.]+)(?=\s*:)""")
"""Tokens in a value of Hydra's grammar: quoted texts, brackets and commas, keys of mappings."""


class _UserNames:
    """Keys, stages and options that the user's folder defines: under an old name, they keep it."""

    def __init__(self, config_dir: Path | None, files: Iterable[Path]) -> None:
        self.search_keys: set[str] = set()
        self.stages: set[str] = set()
        self.options: set[tuple[str, str]] = set()
        for path in files:
            group, tree = path.parent.name, _read(path)
            self.options.add((group, path.stem))
            kind = class_of(path, config_dir)
            if group in OPTIONS and kind and not kind.startswith("gemmpipe."):
                self.search_keys.update(tree if group == "search" else ())
                self.stages.add(kind.rpartition(".")[2].lower())

    def stage(self, name: str) -> str:
        """The current name of a stage."""
        return name if name in self.stages else STAGES.get(name, name)

    def option(self, group: str, name: str) -> str:
        """The current name of an option."""
        return name if (group, name) in self.options else OPTIONS.get(group, {}).get(name, name)

    def key(self, parents: Sequence[str], name: str) -> str:
        """The current name of a key below `parents`, which are current names."""
        if tuple(parents) == ("stages",):
            return self.stage(name)
        if len(parents) == 2 and parents[0] == "stages":
            return STAGE_KEYS.get(parents[1], {}).get(name, name)
        if parents and (parents[-1] == "search" or tuple(parents[-2:]) == ("search", "algorithm")):
            return name if name in self.search_keys else SEARCH_KEYS.get(name, name)
        return RUNG_KEYS.get(name, name) if parents and parents[-1] == "rungs" else name

    def path(self, path: str) -> str:
        """A dotted path of keys with current names."""
        found: list[str] = []
        for name in path.split("."):
            found.append(self.key(found, name))
        current = self._moved(".".join(found))
        if current != path:
            note(path, current)
        return current

    def _moved(self, path: str) -> str:
        for old, new in MOVED_KEYS.items():
            if f"{path}.".startswith(f"{old}.") and old.split(".")[1] not in self.stages:
                return new + path.removeprefix(old)
        return path


def _user_names(config_dir: Path | None) -> _UserNames:
    files = sorted(config_dir.glob("*/*.yaml")) if config_dir else ()
    return _read_user_names(config_dir, tuple((path, path.stat().st_mtime_ns) for path in files if path.is_file()))


@lru_cache(maxsize=1)  # Hydra reads the files one by one
def _read_user_names(config_dir: Path | None, stamps: tuple[tuple[Path, int], ...]) -> _UserNames:
    return _UserNames(config_dir, [path for path, _ in stamps])


def current_overrides(overrides: Iterable[str], config_dir: Path | None) -> tuple[str, ...]:
    """Overrides for version 0.1.0 or the current one, with current names."""
    names = _user_names(config_dir)
    return tuple(_current_override(override, names) for override in overrides)


def _current_override(override: str, names: _UserNames) -> str:
    parts = _OVERRIDE.fullmatch(override)
    if parts is None:
        return override
    key, value, package = parts["key"], parts["value"], parts["package"]
    if key in OPTIONS:
        value = _NAME.sub(lambda match: _current_option(key, match[0], names), value)
    elif key == "chain":
        value = _NAME.sub(lambda match: _current_stage(match[0], names), value)
    elif "/" not in key:
        old, key = key, names.path(key)
        value = _with_current_keys(value, old, key, names) if "{" in value else value
    at = f"@{names.path(package)}" if package is not None else ""
    return f"{parts['sign']}{key}{at}{parts['bound']}{value}"


def _current_option(group: str, name: str, names: _UserNames) -> str:
    current = names.option(group, name)
    if current != name:
        note(f"{group}={name}", f"{group}={current}")
    return current


def _current_stage(name: str, names: _UserNames) -> str:
    current = names.stage(name)
    if current != name:
        note(f"stages.{name}", f"stages.{current}")
    return current


def _with_current_keys(value: str, old: str, key: str, names: _UserNames) -> str:
    """The value of `key` with the keys of mappings in it renamed."""
    parents: list[tuple[str, str]] = []  # per open bracket: the path as typed, and with current names
    last = (old, key)

    def current(match: re.Match[str]) -> str:
        nonlocal last
        if match["mark"] in ("{", "["):
            parents.append(last)
        elif match["mark"] in ("}", "]") and parents:
            parents.pop()
        elif match["key"] and parents:
            before, now = parents[-1]
            name = names.key(now.split("."), match["key"])
            last = (f"{before}.{match['key']}", f"{now}.{name}")
            if name != match["key"]:
                note(*last)
            return name
        return match[0]

    return _TOKEN.sub(current, value)


def class_of(path: Path, config_dir: Path | None, depth: int = 8) -> str:
    """The current path of the class of an option's file, or of the options in its defaults list; "" for none."""
    tree = _read(path)
    target = tree.get("_target_")
    if isinstance(target, str):
        return current_path(target)
    found = ""
    for entry in tree.get("defaults") or () if depth and isinstance(tree.get("defaults"), list) else ():
        name = entry if isinstance(entry, str) else ""
        for root in (shipped("conf"), config_dir):
            option = OPTIONS.get(path.parent.name, {}).get(name, name)
            for stem in dict.fromkeys((name, option)):
                base = root / path.parent.name / f"{stem}.yaml" if root else path
                if _NAME.fullmatch(name) and base != path and base.is_file():
                    found = class_of(base, config_dir, depth - 1) or found
    return found


def _read(path: Path) -> Mapping[str, Any]:
    """The keys of an option's file; none if it cannot be read, which Hydra reports when the option is chosen."""
    try:
        tree = yaml.safe_load(read_text(path))
    except (OSError, ValueError, UserError, RecursionError, yaml.YAMLError):
        return {}
    return {str(key): value for key, value in tree.items()} if isinstance(tree, Mapping) else {}


def current_tree(tree: object, parents: tuple[str, ...], names: _UserNames) -> object:
    """The tree of a user's YAML file below `parents`, with current names."""
    if isinstance(tree, str):
        return _INTERPOLATION.sub(lambda match: names.path(match[0]), tree) if "${" in tree else tree
    if isinstance(tree, list):
        return [current_tree(item, (*parents, ""), names) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    found: dict[object, object] = {}
    for key, value in tree.items():
        name = names.key(parents, key) if isinstance(key, str) and parents else key
        if name != key:
            note(".".join((*parents, str(key))), ".".join((*parents, str(name))))
        if name == key or name not in tree:  # if both are given, the current one takes precedence
            found[name] = current_tree(value, (*parents, str(name)), names)
    return found


def _current_defaults(entries: object, group: str, names: _UserNames) -> object:
    """A defaults list with current names."""
    if not isinstance(entries, list):
        return entries
    found: list[object] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append(_current_option(group, entry, names) if group in OPTIONS else entry)
        elif isinstance(entry, Mapping):
            found.append(
                {_current_group(str(key), names): _chosen(str(key), name, names) for key, name in entry.items()}
            )
        else:
            found.append(entry)
    return found


def _current_group(key: str, names: _UserNames) -> str:
    """A group such as `override stage@stages.report`, with the current name of its package."""
    group, at, package = key.partition("@")
    if not at:
        return key
    if "." in package:
        return f"{group}@{names.path(package)}"
    return f"{group}@algorithm" if group.endswith("search") and package == "of" else key


def _chosen(key: str, name: object, names: _UserNames) -> object:
    group = key.partition("@")[0].split()[-1].strip("/") if key.strip() else ""
    if isinstance(name, list):
        return [_chosen(key, each, names) for each in name]
    return _current_option(group, name, names) if isinstance(name, str) else name


class _UsersFiles(FileConfigSource):
    """Hydra's source of YAML files; those of `--config-dir` may use names of version 0.1.0."""

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        if self.provider == "command-line" and isinstance(result.config, DictConfig):
            result.config = self._current(result.config, config_path)
        return result

    def _current(self, config: DictConfig, config_path: str) -> DictConfig:
        folder = Path(self.path)
        names, path = _user_names(folder), folder / self._normalize_file_name(config_path)
        group = path.parent.name if path.parent != folder else ""
        tree: Any = OmegaConf.to_container(config, resolve=False)
        before = repr(tree)
        defaults = _current_defaults(tree.pop("defaults", None), group, names)
        kind = class_of(path, folder)
        is_ours = not kind or kind.startswith("gemmpipe.")
        if group in ("", "stage", "search") and is_ours:
            tree = current_tree(tree, _parents(group, kind), names)
        if isinstance(tree.get("chain"), list) and not group:
            tree["chain"] = [_current_stage(each, names) if isinstance(each, str) else each for each in tree["chain"]]
        if defaults is not None:
            tree = {"defaults": defaults, **tree}
        return OmegaConf.create(tree) if repr(tree) != before else config


def _parents(group: str, kind: str) -> tuple[str, ...]:
    """The path of keys above those of a file in a group; that of a stage is derived from its class."""
    if group != "stage":
        return (group,) if group else ()
    name = kind.rpartition(".")[2].lower()
    return ("stages", next((stage for stage in STAGE_KEYS if stage.replace("_", "") == name), name))


def read_old_keys() -> None:
    """Makes Hydra read old names in files of `--config-dir`, also in processes that its launchers start."""
    SourcesRegistry.instance().types["file"] = _UsersFiles
