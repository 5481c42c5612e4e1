"""Triton's own way to tune and launch a kernel: `triton.autotune` over launches of it, and a launch by its JIT."""

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
_SKIPPED_MS = [float("inf")] * 3  # what the tuner itself gives a configuration that does not fit the device

LaunchGrid = tuple[int, int, int]
BenchFunction = Callable[..., Sequence[float]]
"""(a call of the kernel, `quantiles`) -> milliseconds: triton.testing.do_bench, and whatever takes its place."""


@dataclass(frozen=True, kw_only=True)
class AutotuneResult:
    """Which of the launches it was, the time that the tuner saw, and what the choice took."""

    index: int
    time_us: float | None
    tuning: Tuning


class _TimeLimitedBench:
    """A benchmark that runs nothing more once the time is up: so the tuner ends with what it has."""

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
    """What `triton.autotune` chooses among launches of one kernel on the same operands, in the order given.

    It times with Triton's own benchmark unless `bench` is given, and looks at nothing more after `limit_s`.
    Raises RuntimeError where nothing could be timed; what a kernel or the compiler raises rises, as it does for its
    users, but for a configuration that asks for more than the device has.
    """
    import triton
    from triton.runtime import driver

    function = find_kernel(launches[0].build.kernel)
    calls = _call_arguments(launches, function, out)
    tuned = [name for name in _varying_names(calls) if name not in _CONFIG_OPTIONS]
    fixed = {name: value for name, value in calls[0].items() if name not in (*tuned, *_CONFIG_OPTIONS)}
    zeroed = [n for n, value in launches[0].arguments.items() if value is out and any(o.zero_output for o in launches)]
    limited = _TimeLimitedBench(bench or driver.active.get_benchmarker(), limit_s, before_each)
    now: dict[str, LaunchGrid] = {}
    configs = [_triton_config(call, tuned, one.grid, now) for one, call in zip(launches, calls, strict=True)]
    sizes = [name for name in _KEY_SIZES if name in function.arg_names]
    tuner = triton.autotune(configs, key=sizes, reset_to_zero=zeroed, do_bench=limited)(function)
    begun = time.perf_counter()
    with record_cache_hits() as cached:
        tuner[lambda _: now["grid"]](**fixed)
    seconds = time.perf_counter() - begun
    best_ms = tuner.configs_timings[tuner.best_config][0] if len(configs) > 1 else None  # it does not time a single one
    if best_ms == _SKIPPED_MS[0]:
        raise RuntimeError(f"none of {limited.tried} configurations could be timed")
    return AutotuneResult(
        index=next(i for i, config in enumerate(configs) if config is tuner.best_config),
        time_us=None if best_ms is None else best_ms * 1e3,
        tuning=Tuning(seconds=seconds, tried=limited.tried, of=len(configs), compiled=cached.count(False)),
    )


def _triton_config(
    call: Mapping[str, object], tuned: Sequence[str], grid: LaunchGrid, now: dict[str, LaunchGrid]
) -> Any:
    """A launch as Triton's `Config`; it says which grid is its own, since not all that a grid depends on is tuned."""
    import triton

    options = {n: call[n] for n in _CONFIG_OPTIONS if n in call}
    return triton.Config({n: call[n] for n in tuned}, **options, pre_hook=lambda _: now.update(grid=grid))


def jit_launch(one: KernelLaunch, out: "torch.Tensor") -> Launch:
    """The call as Triton's JIT launches it: specialised on the values of this problem, which our builds are not."""
    function = find_kernel(one.build.kernel)
    [call] = _call_arguments([one], function, out)
    run = function[one.grid]
    return one.call(lambda: run(**call), out)


def _call_arguments(launches: Sequence[KernelLaunch], function: Any, out: "torch.Tensor") -> list[Mapping[str, object]]:
    """Every parameter and option of each launch; all have one workspace, as large as the hungriest needs."""
    parts, counters = max(one.parts for one in launches), max(one.counters for one in launches)
    workspace = WORKSPACES.take(max(1, parts), max(1, counters), out.device)
    # An interpreter knows no compiler; and a compiler is told what ours is told.
    more = {} if is_interpreted(function) else {"enable_fp_fusion": True}
    return [
        {**one.operands(*workspace), **dict(one.build.constants), **dict(one.build.options), **more} for one in launches
    ]


def _varying_names(calls: Sequence[Mapping[str, object]]) -> list[str]:
    """The names whose values differ; operands are the same, in whatever view."""
    plain = [name for name, value in calls[0].items() if value is None or isinstance(value, int | float | str)]
    return [name for name in plain if any(call[name] != calls[0][name] for call in calls)]
