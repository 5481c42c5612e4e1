"""Hydra's composition of our files, kept for a process: doing it again and again is most of a test's command line."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import omegaconf.omegaconf
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import OmegaConfDumper, get_omega_conf_dumper
from omegaconf.base import Container

from gemmpipe.cli import folders as config_folders
from gemmpipe.core.paths import shipped

_tree = config_folders._read_yaml
_load = ConfigRepository.load_config
_choices = defaults_list._create_interpolation_map
_list = defaults_list._create_defaults_list
_load_one = ConfigLoaderImpl._load_single_config
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_copy = DictConfig.__deepcopy__
_ASKED = ("override_choices", "append_group_defaults", "deletions")
"""Overrides of a defaults list; the others change the merged configuration."""
_FOUND = (*_ASKED, "override_metadata", "known_choices", "known_choices_per_group")
"""Facts of the choices once the list is made."""
_TESTS = f"{Path(__file__).parent}/"


@contextmanager
def read_once() -> Iterator[None]:
    """Within the block each file of Hydra's, of our shipped folders and of this one is parsed once.

    The same choices of files are looked up once, the same files in the same order are merged once, also where they are
    all files below one key among others. Files that tests write are read every time. The choices made so far, which
    Hydra copies for each file, are made for lists that refer to them alone; and the parents of all nodes are corrected
    when the files are merged, not after each of the fifty.
    """
    folders = {str(shipped("conf")), str(shipped("pipelines")), "hydra.conf", "structured://"}
    trees: dict[Path, object] = {}
    parsed: dict[tuple[str, str], bytes] = {}
    listed: dict[object, bytes] = {}
    merged: dict[object, bytes] = {}

    def is_kept(folder: str) -> bool:
        return folder in folders or folder.startswith(_TESTS)

    def load_config(self: ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        folder = "" if source is None else _bare(source.path)
        if not is_kept(folder):
            return _load(self, config_path)
        key = (folder, config_path)
        if key not in parsed:
            parsed[key] = pickle.dumps(_load(self, config_path))
        return pickle.loads(parsed[key])  # a copy: composing changes it

    def tree_of(path: Path) -> object:
        if not is_kept(str(path.parent.parent)):
            return _tree(path)
        if path not in trees:
            trees[path] = _tree(path)
        return trees[path]

    def choices(overrides: Any, defaults: Any, self_added: bool) -> Any:
        refers = any("${" in f"{getattr(each, 'path', '')}{getattr(each, 'value', '')}" for each in defaults)
        return _choices(overrides, defaults, self_added) if refers else None

    def places(repo: Any) -> tuple[str, ...]:
        """Where files are looked for; empty if a test may have written there."""
        found = tuple(_bare(source.path) for source in repo.get_sources() if source.scheme() != "structured")
        return found if all(map(is_kept, found)) else ()

    def defaults_of(repo: Any, config_name: Any, overrides: Any, prepend_hydra: bool, skip_missing: bool) -> Any:
        folders, given = places(repo), vars(overrides)
        asked = pickle.dumps([given[name] for name in _ASKED])
        key = (folders, config_name, asked, prepend_hydra, skip_missing)
        if not folders or key not in listed:
            found = _list(repo, config_name, overrides, prepend_hydra, skip_missing)
            if folders:
                listed[key] = pickle.dumps((found, {name: given[name] for name in _FOUND}))
            return found
        found, states = pickle.loads(listed[key])
        given.update(states)
        return found

    def merge(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
        folders = places(repo)
        if not folders:
            return _merge_then_adopt(self, defaults, repo)

        def kept(defaults: Any) -> Any:
            key = (folders, tuple((each.config_path, each.package, each.primary) for each in defaults))
            if key not in merged:
                merged[key] = pickle.dumps(joined(defaults) or _merge_then_adopt(self, defaults, repo))
            return pickle.loads(merged[key])

        def joined(defaults: Any) -> Any:
            """The same from parts that are merged once: what goes below one key. None where that cannot be."""
            parts: dict[str, list[Any]] = {}
            for each in defaults:
                parts.setdefault((each.package or "").partition(".")[0], []).append(each)
            last = parts.pop("", [])
            if len(parts) < 2 or defaults[len(defaults) - len(last) :] != last:
                return None
            whole = OmegaConf.create()
            for part in parts.values():
                whole.__dict__["_content"] |= kept(part).__dict__["_content"]
            before = ConfigResult(provider="", path="", config=whole, header={})

            def load(self: ConfigLoaderImpl, default: Any, repo: Any) -> Any:
                return before if default is before else _load_one(self, default, repo)

            with mock.patch.object(ConfigLoaderImpl, "_load_single_config", load):
                return _merge_then_adopt(self, [before, *last], repo)

        return kept(defaults)

    with (
        mock.patch.object(ConfigRepository, "load_config", load_config),
        mock.patch.object(ConfigRepository, "__deepcopy__", _with_own_sources, create=True),
        mock.patch.object(config_folders, "_read_yaml", tree_of),
        mock.patch.object(defaults_list, "_create_interpolation_map", choices),
        mock.patch.object(defaults_list, "_create_defaults_list", defaults_of),
        mock.patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge),
        mock.patch.object(DictConfig, "__deepcopy__", _copied),
        mock.patch.object(omegaconf.omegaconf, "get_omega_conf_dumper", _dumper),
    ):
        yield


def _bare(path: str) -> str:
    return path.removeprefix("file://").removeprefix("pkg://")


def _merge_then_adopt(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
    def later(node: Container) -> None:
        pass

    with mock.patch.object(Container, "_re_parent", later):
        merged = _merge(self, defaults, repo)
    merged._re_parent()
    return merged


def _with_own_sources(self: ConfigRepository, memo: dict[int, Any]) -> ConfigRepository:
    """A copy that may look into other folders; sources themselves are not changed."""
    same = copy.copy(self)
    same.sources = [*self.sources]
    return same


def _copied(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
    """A copy by pickle, which takes a quarter of the time."""
    content = self.__dict__["_content"]
    if memo or not isinstance(content, dict):
        return _copy(self, memo)
    parents = [node.__dict__["_parent"] for node in content.values()]  # may be another one: that of a masked copy
    try:
        for node in content.values():
            node.__dict__["_parent"] = None
        nodes = pickle.loads(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
    finally:
        for node, parent in zip(content.values(), parents, strict=True):
            node.__dict__["_parent"] = parent
    same = DictConfig(None)
    same.__dict__["_metadata"] = pickle.loads(pickle.dumps(self.__dict__["_metadata"], pickle.HIGHEST_PROTOCOL))
    same.__dict__["_content"] = nodes
    same.__dict__["_parent"] = self.__dict__["_parent"]  # retained, not copied
    for node in nodes.values():
        node.__dict__["_parent"] = same
    return same


class _CDumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
    """Writes YAML as OmegaConf does, by libyaml."""


_CDumper.add_representer(str, OmegaConfDumper.str_representer)


def _dumper() -> Any:
    get_omega_conf_dumper()
    return _CDumper
