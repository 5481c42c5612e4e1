"""One callable on its device: checked after every launch, timed with cold caches and without the host's share."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gemmpipe.bench.timer import Clock, TimedCall, clock_for
from gemmpipe.core.data import Device

if TYPE_CHECKING:
    import torch

Run = Callable[[], object]
"""Computes the product once and returns its output: a tensor, or several in a list, tuple or mapping."""

WARMUP = 5
_FLUSHES = 2  # last-level caches written before each launch

_clock_of = functools.cache(clock_for)  # a clock learns how long the host takes to queue a launch


class Mismatch(AssertionError):
    """An output is not what was expected; the message says where and by how much."""


def measure(run: Run, ground_truth: object, *, num_iters: int, atol: float, rtol: float) -> list[float]:
    """Microseconds of each of `num_iters` launches after WARMUP others, all of them compared with `ground_truth`.

    On a GPU between device events, with the launches queued ahead, so that the host's time counts only where `run`
    itself waits for the device. Raises Mismatch, and whatever `run` raises.
    """
    with nan_filled_memory():
        output = run()
    device = device_of(output)
    clock = _clock_of(device)
    clock.synchronize()
    _compare(output, ground_truth, atol, rtol)
    race = _Measurement(run, ground_truth, device, atol, rtol)
    race.times_us(clock, WARMUP - 1)
    return race.times_us(clock, num_iters)


class _Measurement:
    """Flush, launch and compare in turn; the comparison stays on the device, so that the host never waits between."""

    def __init__(self, run: Run, ground_truth: object, device: Device, atol: float, rtol: float) -> None:
        import torch

        self._run = run
        self._expected = ground_truth
        self._within = (atol, rtol)
        self._output: object = None
        self._flushed = torch.zeros(_FLUSHES * device.cache_bytes, dtype=torch.uint8, device=device.torch_name)
        self._wrong = torch.zeros((), dtype=torch.bool, device=device.torch_name)

    def times_us(self, clock: Clock, launches: int) -> list[float]:
        """Microseconds of each launch. Raises Mismatch when one of them was wrong."""
        series: list[TimedCall] = [self._flushed.zero_, self._launch, self._note_errors]
        times = clock.sequence(series * launches)[1 :: len(series)]
        if bool(self._wrong):
            _compare(self._output, self._expected, *self._within)
            raise Mismatch("wrong in one of its launches and right in the last: not the same every time")
        return times

    def _launch(self) -> None:
        self._output = self._run()

    def _note_errors(self) -> None:
        import torch

        atol, rtol = self._within
        for got, expected in _pairs(self._output, self._expected):
            self._wrong.logical_or_(~torch.isclose(got, expected, atol=atol, rtol=rtol).all())


def _compare(output: object, ground_truth: object, atol: float, rtol: float) -> None:
    import torch

    try:
        for got, expected in _pairs(output, ground_truth):
            torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)
    except AssertionError as error:
        raise Mismatch(str(error)) from None


def _pairs(output: object, ground_truth: object) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Tensors to compare; those of one byte, which have no comparison of their own, in fp32. Raises Mismatch."""
    got, expected = _tensors(output), _tensors(ground_truth)
    if not expected:
        raise Mismatch(f"the ground truth is {_kind(ground_truth)}, expected a tensor or several")
    if len(got) != len(expected):
        raise Mismatch(f"run() returned {len(got)} tensors, expected {len(expected)} as in the ground truth")
    for one, other in zip(got, expected, strict=True):
        small = one.dtype == other.dtype and one.dtype.is_floating_point and one.dtype.itemsize == 1
        yield (one.float(), other.float()) if small else (one, other)


def _tensors(value: object) -> "list[torch.Tensor]":
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for name in sorted(value) for tensor in _tensors(value[name])]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def device_of(output: object) -> Device:
    """Where an output lies. Raises Mismatch when it holds no tensor."""
    from gemmpipe.core.device import cpu_device, gpu_device

    tensors = _tensors(output)
    if not tensors:
        raise Mismatch(f"run() returned {_kind(output)}, expected a tensor")
    place = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return cpu_device() if place.type == "cpu" else gpu_device(place.index or 0)


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """New tensors hold NaN until someone writes them.

    Without, an output that a kernel leaves untouched can lie where a right one lay before.
    """
    import torch

    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch._C._get_deterministic_fill_uninitialized_memory()
    with warnings.catch_warnings():
        # Deterministic mode is what fills; operators without a deterministic way only warn in it.
        warnings.filterwarnings("ignore", message=".*[Dd]eterministic")
        try:
            torch._C._set_deterministic_fill_uninitialized_memory(True)
            torch._C._set_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warns)
            torch._C._set_deterministic_fill_uninitialized_memory(filling)
