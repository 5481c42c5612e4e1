"""Hydra, started on words of ours: our pipelines on its search path, its errors raised instead of printed."""

import os
import sys
from collections.abc import Callable, Sequence

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from gemmpipe.paths import shipped

_RAISE = "HYDRA_FULL_ERROR"


class PipelinesPath(SearchPathPlugin):
    """Adds the folder of the pipelines beside the one of the options."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("gemmpipe", f"file://{shipped('pipelines')}")


def run_hydra(argv: Sequence[str], job: Callable[[DictConfig], None]) -> None:
    """Run Hydra's main on these words. Raises what is wrong with them, and what `job` raises."""
    Plugins.instance().register(PipelinesPath)
    words, before = sys.argv, os.environ.get(_RAISE)
    sys.argv = [words[0], *argv]
    os.environ[_RAISE] = "1"  # the only way to have exceptions instead of several printed lines
    try:
        hydra.main(config_path=str(shipped("conf")), config_name="tune", version_base="1.3")(job)()
    finally:
        sys.argv = words
        os.environ.pop(_RAISE)
        if before is not None:
            os.environ[_RAISE] = before
