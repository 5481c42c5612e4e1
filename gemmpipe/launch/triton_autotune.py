"""Triton's own autotuner and JIT launch for gemmpipe's kernels: `triton.autotune` over launches of one kernel."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import Tuning
from gemmpipe.family import Launch
from gemmpipe.launch.build import find_kernel, is_interpreted, record_cache_hits
from gemmpipe.launch.launch import KernelLaunch
from gemmpipe.launch.workspace import WORKSPACES

if TYPE_CHECKING:
    import torch

_CONFIG_OPTIONS = ("num_warps", "num_stages")
_KEY_SIZES = ("M", "N", "K")
_SKIPPED_MS = [float("inf")] * 3  # the tuner's own result for a configuration that does not fit the device

LaunchGrid = tuple[int, int, int]
BenchFunction = Callable[..., Sequence[float]]
"""(call of the kernel, `quantiles`) -> milliseconds: triton.testing.do_bench or a replacement."""


@dataclass(frozen=True, kw_only=True)
class AutotuneResult:
    """The index of the chosen launch, the tuner's time for it (None: not timed), and the tuner's effort."""

    index: int
    time_us: float | None
    tuning: Tuning


class _TimeLimitedBench:
    """A benchmark that runs no configuration after a time limit, so that the tuner ends with the ones timed so far."""

    def __init__(self, bench: BenchFunction, limit_s: float | None, before_each: Callable[[], object]) -> None:
        self._bench, self._before_each = bench, before_each
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self.tried = 0

    def __call__(self, call: Callable[[], object], quantiles: Sequence[float]) -> Sequence[float]:
        if self._end is not None and self.tried and time.monotonic() > self._end:
            return _SKIPPED_MS
        self._before_each()
        self.tried += 1
        return self._bench(call, quantiles=quantiles)


def run_autotune(
    launches: Sequence[KernelLaunch],
    out: "torch.Tensor",
    limit_s: float | None,
    before_each: Callable[[], object],
    bench: BenchFunction | None = None,
) -> AutotuneResult:
    """The choice of `triton.autotune` among launches of one kernel on the same operands, in the given order.

    It times with Triton's own benchmark unless `bench` is given, and starts no configuration after `limit_s` seconds.
    Raises RuntimeError if no configuration could be timed, and all errors of kernels and the compiler except for a
    configuration that needs more resources than the device has.
    """
    import triton
    from triton.runtime import driver

    function = find_kernel(launches[0].build.kernel)
    calls = _call_arguments(launches, function, out)
    tuned = [name for name in _varying_names(calls) if name not in _CONFIG_OPTIONS]
    fixed = {name: value for name, value in calls[0].items() if name not in (*tuned, *_CONFIG_OPTIONS)}
    zeroed = [n for n, value in launches[0].arguments.items() if value is out and any(o.zero_output for o in launches)]
    limited = _TimeLimitedBench(bench or driver.active.get_benchmarker(), limit_s, before_each)
    current: dict[str, LaunchGrid] = {}
    configs = [_triton_config(call, tuned, one.grid, current) for one, call in zip(launches, calls, strict=True)]
    sizes = [name for name in _KEY_SIZES if name in function.arg_names]
    tuner = triton.autotune(configs, key=sizes, reset_to_zero=zeroed, do_bench=limited)(function)
    begun = time.perf_counter()
    with record_cache_hits() as cached:
        tuner[lambda _: current["grid"]](**fixed)
    seconds = time.perf_counter() - begun
    best_ms = tuner.configs_timings[tuner.best_config][0] if len(configs) > 1 else None  # a single one is not timed
    if best_ms == _SKIPPED_MS[0]:
        raise RuntimeError(f"none of {limited.tried} configurations could be timed")
    return AutotuneResult(
        index=next(i for i, config in enumerate(configs) if config is tuner.best_config),
        time_us=None if best_ms is None else best_ms * 1e3,
        tuning=Tuning(seconds=seconds, tried=limited.tried, of=len(configs), compiled=cached.count(False)),
    )


def _triton_config(
    call: Mapping[str, object], tuned: Sequence[str], grid: LaunchGrid, current: dict[str, LaunchGrid]
) -> Any:
    """A launch as Triton's `Config`, with a hook that sets its grid, which depends on more than the tuned values."""
    import triton

    options = {n: call[n] for n in _CONFIG_OPTIONS if n in call}
    return triton.Config({n: call[n] for n in tuned}, **options, pre_hook=lambda _: current.update(grid=grid))


def jit_launch(one: KernelLaunch, out: "torch.Tensor") -> Launch:
    """The call launched by Triton's JIT, which specialises on the values of this problem, unlike gemmpipe's builds."""
    function = find_kernel(one.build.kernel)
    [call] = _call_arguments([one], function, out)
    run = function[one.grid]
    return one.call(lambda: run(**call), out)


def _call_arguments(launches: Sequence[KernelLaunch], function: Any, out: "torch.Tensor") -> list[Mapping[str, object]]:
    """All parameters and options of each launch; the launches share a workspace of the largest size needed."""
    parts, counters = max(one.parts for one in launches), max(one.counters for one in launches)
    workspace = WORKSPACES.take(max(1, parts), max(1, counters), out.device)
    # The same option as in compile_kernel; the interpreter has no compiler options.
    fusion = {} if is_interpreted(function) else {"enable_fp_fusion": True}
    return [
        {**one.operands(*workspace), **dict(one.build.constants), **dict(one.build.options), **fusion}
        for one in launches
    ]


def _varying_names(calls: Sequence[Mapping[str, object]]) -> list[str]:
    """The names with different values; operands are equal, though possibly different views."""
    plain = [name for name, value in calls[0].items() if value is None or isinstance(value, int | float | str)]
    return [name for name in plain if any(call[name] != calls[0][name] for call in calls)]
