"""Timing of many configurations of one kernel: the best one, or the time of one."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from statistics import fmean
from typing import Any

from gemmpipe.core.data import median
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, UserError, one_line, short_repr
from gemmpipe.tune.measuring import Run, measure, nan_filled_memory

Config = dict[str, Any]
"""Knob -> value."""
MakeRun = Callable[[Config], tuple[Run, object]]
"""configuration -> (`run`, a function without arguments that returns the output; the correct output)."""

_LOG = logging.getLogger("gemmpipe.tune")


class NoneValid(GemmpipeError):
    """No configuration could be timed."""


def tune_kernel(
    search_space: Iterable[Mapping[str, Any]],
    make_run_and_gt_fn: MakeRun,
    config_callback: Callable[[Config], object] | None = None,
    num_iters: int = 10,
    atol: float = 1e-2,
    rtol: float = 1e-2,
) -> Config:
    """The configuration with the lowest median time over `num_iters` launches, as edited by `config_callback`.

    `config_callback` may edit its argument in place, a copy of the search space's configuration. A configuration that
    cannot be made, cannot run, or differs from the ground truth by more than `atol` and `rtol` is skipped and counted.
    Raises NoneValid if all are, EnvironmentProblem if one loses the device, UserError for `num_iters` below 1 and
    arguments of the wrong type.
    """
    from tqdm.auto import tqdm

    _check_iterations(num_iters)
    _check_callable("make_run_and_gt_fn", make_run_and_gt_fn)
    configs = _configs(search_space)
    best: tuple[float, Config] | None = None
    failures: list[str] = []
    with tqdm(configs, desc="tuning", unit="config") as bar:
        for config in bar:
            try:
                run, ground_truth = _made(config, make_run_and_gt_fn, config_callback)
                time_us = median(measure(run, ground_truth, num_iters=num_iters, atol=atol, rtol=rtol))
            except Exception as error:  # noqa: BLE001 - any exception of a kernel is this configuration's failure
                failures.append(f"{config}: {one_line(error)}")
                _LOG.debug("skipped %s", failures[-1])
                _check_device(config, error, best)
            else:
                if best is None or time_us < best[0]:
                    best = time_us, config
            bar.set_postfix({"best_us": f"{best[0]:.2f}" if best else "-", "failed": len(failures)})
    if best is None:
        first = f"; the first: {failures[0]}" if failures else ": the search space is empty"
        raise NoneValid(f"none of {len(configs)} configurations is valid{first}")
    if failures:
        _LOG.warning("%d of %d configurations skipped; the first: %s", len(failures), len(configs), failures[0])
    return best[1]


def _made(config: Config, make: MakeRun, edit: Callable[[Config], object] | None) -> tuple[Run, object]:
    if edit is not None:
        edit(config)
    with nan_filled_memory():
        return make(config)


def benchmark_config(
    run: Run, ground_truth: object, num_iters: int = 10, atol: float = 1e-1, rtol: float = 1e-1
) -> float:
    """The mean time in us of `num_iters` launches after 5 warm-up launches, the output compared after each one.

    Infinity, with a logged warning, if the output is wrong, `run` raises AssertionError or the device lacks
    resources: scripts compare this number directly. Other exceptions of `run` are raised. Raises UserError for
    `num_iters` below 1 and a `run` that cannot be called.
    """
    _check_iterations(num_iters)
    _check_callable("run", run)
    failures = _skipping_failures()
    try:
        return fmean(measure(run, ground_truth, num_iters=num_iters, atol=atol, rtol=rtol))
    except failures as error:
        _LOG.warning("not timed: %s", one_line(error))
        return math.inf


def _skipping_failures() -> tuple[type[Exception], ...]:
    """Exceptions that count as an infinite time.

    AssertionError (Mismatch, and checks in `run`), lack of memory or registers, and a config that cannot run here.
    """
    import torch

    from gemmpipe.runtime.fixed_config import DoesNotFit

    always = AssertionError, torch.OutOfMemoryError, DoesNotFit
    try:
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return always
    return *always, OutOfResources, PTXASError  # ptxas refuses too many resources as well


def _check_iterations(num_iters: int) -> None:
    if not is_count(num_iters):
        raise UserError(f"num_iters: {short_repr(num_iters)}, expected a whole number from 1")


def is_count(value: object) -> bool:
    """True for a whole number from 1, of Python or numpy."""
    return isinstance(value, Integral) and int(value) >= 1


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise UserError(f"{name}: {short_repr(value)}, expected a function")


def _configs(search_space: Iterable[Mapping[str, Any]]) -> list[Config]:
    """Copies of the configurations. Raises UserError for anything else, such as a mapping of axes."""
    expected = "expected a list of configurations such as [{'BLOCK_SIZE_M': 64}]"
    if isinstance(search_space, Mapping | str) or not isinstance(search_space, Iterable):
        raise UserError(f"search_space: {short_repr(search_space)}, {expected}")
    configs = list(search_space)
    for index, config in enumerate(configs):
        if not isinstance(config, Mapping):
            raise UserError(f"search_space[{index}]: {short_repr(config)}, {expected}")
    return [dict(config) for config in configs]


def _check_device(config: Config, error: Exception, best: tuple[float, Config] | None) -> None:
    """Raise EnvironmentProblem if the error has lost the device's context: no kernel can run after it."""
    import torch

    if not isinstance(error, RuntimeError) or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        found = f"the best so far: {best[1]} ({best[0]:.2f} us)" if best else "none was timed"
        raise EnvironmentProblem(
            f"the device is lost after {config}: {one_line(error)}; {found}; remove this configuration and start again"
        ) from None
