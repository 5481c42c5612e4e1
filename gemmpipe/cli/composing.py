"""Hydra, started on words of ours: our pipelines on its search path, its errors raised instead of printed."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from gemmpipe.cli.unbegun import forget_sweep
from gemmpipe.paths import shipped

_RAISE = "HYDRA_FULL_ERROR"


class PipelinesPath(SearchPathPlugin):
    """Adds the folder of the pipelines beside the one of the options."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("gemmpipe", f"file://{shipped('pipelines')}")


@contextmanager
def _what_jobs_return() -> Iterator[list[Any]]:
    """What the jobs of a sweep return, also those that a launcher runs in other processes: Hydra's main drops it.

    The folder of a sweep none of whose jobs began is removed.
    """
    found: list[Any] = []
    multirun = Hydra.multirun

    def keeping(self: Hydra, *words: Any, **named: Any) -> Any:
        batches = multirun(self, *words, **named)
        jobs = [job for batch in batches or () for job in batch]
        found.extend(job.return_value for job in jobs)
        for folder in {Path(j.hydra_cfg.hydra.runtime.output_dir).parent for j in jobs if j.hydra_cfg is not None}:
            forget_sweep(folder)
        return batches

    Hydra.multirun = keeping  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Hydra.multirun = multirun  # type: ignore[method-assign]


def run_hydra(argv: Sequence[str], job: Callable[[DictConfig], object]) -> list[Any]:
    """Run Hydra's main on these words; what a sweep's jobs returned. Raises what is wrong, and what `job` raises."""
    Plugins.instance().register(PipelinesPath)
    words, before = sys.argv, os.environ.get(_RAISE)
    sys.argv = [words[0], *argv]
    os.environ[_RAISE] = "1"  # the only way to have exceptions instead of several printed lines
    try:
        with _what_jobs_return() as returned:
            hydra.main(config_path=str(shipped("conf")), config_name="tune", version_base="1.3")(job)()
    finally:
        sys.argv = words
        os.environ.pop(_RAISE)
        if before is not None:
            os.environ[_RAISE] = before
    return returned
