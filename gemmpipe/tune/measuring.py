"""Measuring one callable on its device: checked after every launch, with cold caches, without host time."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gemmpipe.bench.gpu_clock import clock_for
from gemmpipe.bench.timer import Clock, TimedCall
from gemmpipe.core.data import Device

if TYPE_CHECKING:
    import torch

Run = Callable[[], object]
"""Computes the product once and returns its output: a tensor, or several in a list, tuple or mapping."""

WARMUP = 5
_FLUSHES = 2  # before each launch this many times the last-level cache is written

_clock_of = functools.cache(clock_for)  # cached: a clock calibrates the host's time to queue a launch


class Mismatch(AssertionError):
    """A wrong output; the message has the place and the size of the error."""


def measure(run: Run, ground_truth: object, *, num_iters: int, atol: float, rtol: float) -> list[float]:
    """Time in us of each of `num_iters` launches after WARMUP others, all compared with `ground_truth`.

    On a GPU between device events, with launches queued ahead: host time counts only if `run` itself waits for the
    device. Raises Mismatch, and the exceptions of `run`.
    """
    with nan_filled_memory():
        output = run()
    device = device_of(output)
    clock = _clock_of(device)
    clock.synchronize()
    _compare(output, ground_truth, atol, rtol)
    measurement = _Measurement(run, ground_truth, device, atol, rtol)
    measurement.times_us(clock, WARMUP - 1)
    return measurement.times_us(clock, num_iters)


class _Measurement:
    """Flush, launch and compare in turn; the comparison runs on the device, so the host never waits in between."""

    def __init__(self, run: Run, ground_truth: object, device: Device, atol: float, rtol: float) -> None:
        import torch

        self._run = run
        self._expected = ground_truth
        self._within = (atol, rtol)
        self._output: object = None
        self._flushed = torch.zeros(_FLUSHES * device.cache_bytes, dtype=torch.uint8, device=device.torch_name)
        self._wrong = torch.zeros((), dtype=torch.bool, device=device.torch_name)

    def times_us(self, clock: Clock, launches: int) -> list[float]:
        """Time in us of each launch. Raises Mismatch if one of them was wrong."""
        series: list[TimedCall] = [self._flushed.zero_, self._launch, self._note_errors]
        times = clock.sequence(series * launches)[1 :: len(series)]
        if bool(self._wrong):
            _compare(self._output, self._expected, *self._within)
            raise Mismatch("wrong in one launch and correct in the last: results are not reproducible")
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
    """Pairs of tensors to compare; 8-bit floats, which torch cannot compare, in fp32. Raises Mismatch."""
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
    """The device of an output. Raises Mismatch if it contains no tensor."""
    from gemmpipe.core.device import cpu_device, gpu_device

    tensors = _tensors(output)
    if not tensors:
        raise Mismatch(f"run() returned {_kind(output)}, expected a tensor")
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return cpu_device() if device.type == "cpu" else gpu_device(device.index or 0)


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Within the block uninitialised tensors are filled with NaN.

    Otherwise an output that a kernel does not write could reuse the memory of a correct one.
    """
    import torch

    before, warn_before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill_before = torch._C._get_deterministic_fill_uninitialized_memory()
    with warnings.catch_warnings():
        # The fill needs deterministic mode, in which operators without a deterministic variant only warn.
        warnings.filterwarnings("ignore", message=".*[Dd]eterministic")
        try:
            torch._C._set_deterministic_fill_uninitialized_memory(True)
            torch._C._set_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warn_before)
            torch._C._set_deterministic_fill_uninitialized_memory(fill_before)
