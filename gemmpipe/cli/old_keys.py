"""Keys, options and stages of version 0.1.0: rewritten in overrides, and in users' YAML files as Hydra reads them.

Each old name is reported once per process (`gemmpipe.core.renamed.note`). A key, a stage or an option that the user's
own files define under such a name means what they define.
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
from gemmpipe.core.renamed import OPTIONS, RUNG_KEYS, SEARCH_KEYS, STAGE_KEYS, STAGES, current_path, note

_OVERRIDE = re.compile(
    r"(?P<sign>[+~]{0,2})(?P<key>[^=@]+)(?:@(?P<package>[^=]+))?(?P<bound>=?)(?P<value>.*)", re.DOTALL
)
_NAME = re.compile(r"[\w.-]+")
_INTERPOLATION = re.compile(r"(?<=\$\{)[A-Za-z_][\w.]*(?=\})")
_TOKEN = re.compile(r"""(?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<mark>[{}\[\],])|(?P<key>[\w.]+)(?=\s*:)""")
"""What matters in a value of Hydra's grammar: texts in quotes, brackets, the keys of mappings."""


class _Own:
    """What the user's folder of options defines under an old name."""

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
        """A stage's name now."""
        return name if name in self.stages else STAGES.get(name, name)

    def option(self, group: str, name: str) -> str:
        """An option's name now."""
        return name if (group, name) in self.options else OPTIONS.get(group, {}).get(name, name)

    def key(self, parents: Sequence[str], name: str) -> str:
        """A key's name now below these keys, which are current."""
        if tuple(parents) == ("stages",):
            return self.stage(name)
        if len(parents) == 2 and parents[0] == "stages":
            return STAGE_KEYS.get(parents[1], {}).get(name, name)
        if parents and (parents[-1] == "search" or tuple(parents[-2:]) == ("search", "algorithm")):
            return name if name in self.search_keys else SEARCH_KEYS.get(name, name)
        return RUNG_KEYS.get(name, name) if parents and parents[-1] == "rungs" else name

    def path(self, path: str) -> str:
        """A dotted path of keys now."""
        found: list[str] = []
        for name in path.split("."):
            found.append(self.key(found, name))
        current = ".".join(found)
        if current != path:
            note(path, current)
        return current


def _own(config_dir: Path | None) -> _Own:
    files = sorted(config_dir.glob("*/*.yaml")) if config_dir else ()
    return _own_of(config_dir, tuple((path, path.stat().st_mtime_ns) for path in files if path.is_file()))


@lru_cache(maxsize=1)  # Hydra reads one file after the other
def _own_of(config_dir: Path | None, stamps: tuple[tuple[Path, int], ...]) -> _Own:
    return _Own(config_dir, [path for path, _ in stamps])


def current_overrides(overrides: Iterable[str], config_dir: Path | None) -> tuple[str, ...]:
    """Overrides as typed for version 0.1.0, or now, with the names of now."""
    own = _own(config_dir)
    return tuple(_current_override(word, own) for word in overrides)


def _current_override(word: str, own: _Own) -> str:
    parts = _OVERRIDE.fullmatch(word)
    if parts is None:
        return word
    key, value, package = parts["key"], parts["value"], parts["package"]
    if key in OPTIONS:
        value = _NAME.sub(lambda match: _current_option(key, match[0], own), value)
    elif key == "chain":
        value = _NAME.sub(lambda match: _current_stage(match[0], own), value)
    elif "/" not in key:
        old, key = key, own.path(key)
        value = _with_current_keys(value, old, key, own) if "{" in value else value
    at = f"@{own.path(package)}" if package is not None else ""
    return f"{parts['sign']}{key}{at}{parts['bound']}{value}"


def _current_option(group: str, name: str, own: _Own) -> str:
    current = own.option(group, name)
    if current != name:
        note(f"{group}={name}", f"{group}={current}")
    return current


def _current_stage(name: str, own: _Own) -> str:
    current = own.stage(name)
    if current != name:
        note(f"stages.{name}", f"stages.{current}")
    return current


def _with_current_keys(value: str, old: str, key: str, own: _Own) -> str:
    """The value of `key` with the keys of mappings in it renamed."""
    parents: list[tuple[str, str]] = []  # of each open bracket, the path as typed and as it is now
    last = (old, key)

    def current(match: re.Match[str]) -> str:
        nonlocal last
        if match["mark"] in ("{", "["):
            parents.append(last)
        elif match["mark"] in ("}", "]") and parents:
            parents.pop()
        elif match["key"] and parents:
            before, now = parents[-1]
            name = own.key(now.split("."), match["key"])
            last = (f"{before}.{match['key']}", f"{now}.{name}")
            if name != match["key"]:
                note(*last)
            return name
        return match[0]

    return _TOKEN.sub(current, value)


def class_of(path: Path, config_dir: Path | None, depth: int = 8) -> str:
    """The class of an option's file, or of the options that it builds on, as it is named now; "" for none."""
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
                beside = root / path.parent.name / f"{stem}.yaml" if root else path
                if _NAME.fullmatch(name) and beside != path and beside.is_file():
                    found = class_of(beside, config_dir, depth - 1) or found
    return found


def _read(path: Path) -> Mapping[str, Any]:
    """The keys of a file of options; none where it cannot be read, of which Hydra tells when it is chosen."""
    try:
        tree = yaml.safe_load(read_text(path))
    except (OSError, ValueError, UserError, RecursionError, yaml.YAMLError):
        return {}
    return {str(key): value for key, value in tree.items()} if isinstance(tree, Mapping) else {}


def current_tree(tree: object, parents: tuple[str, ...], own: _Own) -> object:
    """What a user's YAML file has at these keys, with the names of now."""
    if isinstance(tree, str):
        return _INTERPOLATION.sub(lambda match: own.path(match[0]), tree) if "${" in tree else tree
    if isinstance(tree, list):
        return [current_tree(item, (*parents, ""), own) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    found: dict[object, object] = {}
    for key, value in tree.items():
        name = own.key(parents, key) if isinstance(key, str) and parents else key
        if name != key:
            note(".".join((*parents, str(key))), ".".join((*parents, str(name))))
        if name == key or name not in tree:  # of both, the current one counts
            found[name] = current_tree(value, (*parents, str(name)), own)
    return found


def _current_defaults(entries: object, group: str, own: _Own) -> object:
    """A defaults list with the names of now."""
    if not isinstance(entries, list):
        return entries
    found: list[object] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append(_current_option(group, entry, own) if group in OPTIONS else entry)
        elif isinstance(entry, Mapping):
            found.append({_current_group(str(key), own): _chosen(str(key), name, own) for key, name in entry.items()})
        else:
            found.append(entry)
    return found


def _current_group(key: str, own: _Own) -> str:
    """`override stage@stages.report` and the like, with the package of now."""
    group, at, package = key.partition("@")
    if not at:
        return key
    if "." in package:
        return f"{group}@{own.path(package)}"
    return f"{group}@algorithm" if group.endswith("search") and package == "of" else key


def _chosen(key: str, name: object, own: _Own) -> object:
    group = key.partition("@")[0].split()[-1].strip("/") if key.strip() else ""
    if isinstance(name, list):
        return [_chosen(key, each, own) for each in name]
    return _current_option(group, name, own) if isinstance(name, str) else name


class _UsersFiles(FileConfigSource):
    """Hydra's source of YAML files; those of `--config-dir` may have names of version 0.1.0."""

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        if self.provider == "command-line" and isinstance(result.config, DictConfig):
            result.config = self._current(result.config, config_path)
        return result

    def _current(self, config: DictConfig, config_path: str) -> DictConfig:
        folder = Path(self.path)
        own, path = _own(folder), folder / self._normalize_file_name(config_path)
        group = path.parent.name if path.parent != folder else ""
        tree: Any = OmegaConf.to_container(config, resolve=False)
        before = repr(tree)
        defaults = _current_defaults(tree.pop("defaults", None), group, own)
        kind = class_of(path, folder)
        is_ours = not kind or kind.startswith("gemmpipe.")
        if group in ("", "stage", "search") and is_ours:
            tree = current_tree(tree, _parents(group, kind), own)
        if isinstance(tree.get("chain"), list) and not group:
            tree["chain"] = [_current_stage(each, own) if isinstance(each, str) else each for each in tree["chain"]]
        if defaults is not None:
            tree = {"defaults": defaults, **tree}
        return OmegaConf.create(tree) if repr(tree) != before else config


def _parents(group: str, kind: str) -> tuple[str, ...]:
    """The keys above those of a file in a group; a stage's by its class."""
    if group != "stage":
        return (group,) if group else ()
    name = kind.rpartition(".")[2].lower()
    return ("stages", next((stage for stage in STAGE_KEYS if stage.replace("_", "") == name), name))


def read_old_keys() -> None:
    """From here on Hydra reads old names in files of `--config-dir`, also in processes that its launchers start."""
    SourcesRegistry.instance().types["file"] = _UsersFiles
