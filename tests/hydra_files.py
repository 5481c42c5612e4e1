"""Hydra's reading of our files, kept for a process: parsing YAML again and again is half of a test's command line."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from omegaconf.base import Container

from gemmpipe.core.paths import shipped

_load = ConfigRepository.load_config
_choices = defaults_list._create_interpolation_map
_merge = ConfigLoaderImpl._compose_config_from_defaults_list


@contextmanager
def read_once() -> Iterator[None]:
    """Within the block each file of Hydra's and of our shipped folders is parsed once; those of tests every time.

    The choices made so far, which Hydra copies for each file, are made for defaults lists that refer to them alone; and
    the parents of all nodes are corrected when the files are merged, not after each of the fifty.
    """
    folders = {str(shipped("conf")), str(shipped("pipelines")), "hydra.conf"}
    kept: dict[tuple[str, str], bytes] = {}

    def load_config(self: ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        folder = "" if source is None else source.path.removeprefix("file://").removeprefix("pkg://")
        if folder not in folders:
            return _load(self, config_path)
        key = (folder, config_path)
        if key not in kept:
            kept[key] = pickle.dumps(_load(self, config_path))
        return pickle.loads(kept[key])  # a copy: composing changes it

    def choices(overrides: Any, defaults: Any, self_added: bool) -> Any:
        refers = any("${" in f"{getattr(each, 'path', '')}{getattr(each, 'value', '')}" for each in defaults)
        return _choices(overrides, defaults, self_added) if refers else None

    def merge(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
        def later(node: Container) -> None:
            pass

        with mock.patch.object(Container, "_re_parent", later):
            merged = _merge(self, defaults, repo)
        merged._re_parent()
        return merged

    with (
        mock.patch.object(ConfigRepository, "load_config", load_config),
        mock.patch.object(defaults_list, "_create_interpolation_map", choices),
        mock.patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge),
    ):
        yield
