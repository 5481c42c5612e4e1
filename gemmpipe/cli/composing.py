"""Hydra, started on words of ours: our pipelines on its path, its errors raised, a sweep's jobs checked first."""

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gemmpipe.cli.streams import readers_may_leave
from gemmpipe.cli.unbegun import forget_sweep
from gemmpipe.paths import shipped

_RAISE = "HYDRA_FULL_ERROR"
_UNSWEPT = "warning: -m: nothing is swept; a sweep has values with commas, as in -m search=halving,exhaustive"

Check = Callable[[DictConfig, Path], object]
"""Raises what is wrong with the configuration of a job of a sweep, whose folder is the second."""


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


@contextmanager
def _every_job_first(check: Check) -> Iterator[None]:
    """Hydra composes all jobs of a sweep before the first is launched; `check` sees each of them then.

    The folder of a sweep with a job that is refused is removed.
    """
    composing = Sweeper.validate_batch_is_legal

    def checking(self: Any, batch: Sequence[Sequence[str]]) -> None:
        before = HydraConfig.instance().cfg
        _tell_of_one(self)
        try:
            for number, words in enumerate(batch):
                check(*_as_launched(self.hydra_context.config_loader.load_sweep_config(self.config, [*words]), number))
        except BaseException:
            forget_sweep(Path(self.config.hydra.sweep.dir))
            raise
        finally:
            HydraConfig.instance().cfg = before

    Sweeper.validate_batch_is_legal = checking  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = composing  # type: ignore[method-assign]


def _tell_of_one(sweeper: Any) -> None:
    """Say so where -m means no more than its absence: a comma was left out, or stands in brackets, which are a list."""
    chosen = sweeper.config.hydra.runtime.choices
    if any(chosen[f"hydra/{each}"] != "basic" for each in ("sweeper", "launcher")):  # others need -m for one run too
        return
    if sum(map(len, sweeper.overrides)) == 1:
        with readers_may_leave():
            print(_UNSWEPT, file=sys.stderr, flush=True)


def _as_launched(cfg: DictConfig, number: int) -> tuple[DictConfig, Path]:
    """A job's configuration and its folder, which is not made, as a launcher would have them."""
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.id, cfg.hydra.job.num = number, number
    HydraConfig.instance().set_config(cfg)  # values may refer to it
    folder = Path(str(OmegaConf.select(cfg, "hydra.sweep.dir")), str(OmegaConf.select(cfg, "hydra.sweep.subdir")))
    task = copy.deepcopy(cfg)
    with read_write(task), open_dict(task):
        del task["hydra"]
    return task, folder


def run_hydra(argv: Sequence[str], job: Callable[[DictConfig], object], check: Check | None = None) -> list[Any]:
    """Run Hydra's main on these words; what a sweep's jobs returned, each of which passed `check` before any ran.

    Raises what is wrong, and what `job` and `check` raise.
    """
    Plugins.instance().register(PipelinesPath)
    words, before = sys.argv, os.environ.get(_RAISE)
    sys.argv = [words[0], *argv]
    os.environ[_RAISE] = "1"  # the only way to have exceptions instead of several printed lines
    try:
        with _what_jobs_return() as returned, _every_job_first(check) if check else contextlib.nullcontext():
            hydra.main(config_path=str(shipped("conf")), config_name="tune", version_base="1.3")(job)()
    finally:
        sys.argv = words
        os.environ.pop(_RAISE)
        if before is not None:
            os.environ[_RAISE] = before
    return returned
