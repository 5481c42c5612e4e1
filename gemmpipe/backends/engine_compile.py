"""Compiling the Triton kernels of an engine's function ahead of its calls, in processes without a GPU of their own.

A JIT function compiles at its first call, which in the finals would be one after the other. The same call on tensors
of `meta`, with a target instead of a device and with launches left out, fills Triton's cache with the same entries.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.spec import GemmSpec, Scaling

if TYPE_CHECKING:
    import torch

_LOCK = threading.RLock()


class MetaCallable(Protocol):
    """What an engine's implementation offers for this."""

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """Call the engine's function on tensors of `meta`."""


@dataclass(frozen=True, kw_only=True)
class CompileCalls:
    """A task for another process: compile what these calls of an engine's function need."""

    implementation: MetaCallable
    device: Device
    calls: Sequence[tuple[GemmSpec, Knobs]]

    def __call__(self) -> int:
        """How many of the calls compiled; one that fails here fails in the finals, where its row says why."""
        done = 0
        with compile_only_for(self.device):
            for spec, knobs in self.calls:
                try:
                    self.implementation.call_on_meta(spec, knobs)
                    done += 1
                except Exception:  # noqa: BLE001 - the engine's code; the finals tell of it
                    continue
        return done


@contextmanager
def compile_only_for(device: Device) -> Iterator[None]:
    """Triton's JIT functions compile for this device and launch nothing, within the block."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launching = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launching(function, *args, grid=grid, warmup=True, **kwargs)

    with _LOCK:
        before = driver._active
        driver.set_active(_CompileOnlyDriver(device))
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launching
            driver._active = before


class _CompileOnlyDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def get_current_target(self) -> Any:
        """The architecture."""
        from triton.backends.compiler import GPUTarget

        hip = self._device.kind == "hip"
        arch = self._device.gfx if hip else int(self._device.gfx.removeprefix("sm_"))
        return GPUTarget(self._device.kind, arch, self._device.warp_size)

    def get_current_device(self) -> int:
        """Any: nothing is launched."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any: nothing is launched."""
        return 0


def empty_meta(shape: tuple[int, ...], dtype: str) -> "torch.Tensor":
    """A tensor without memory, whose address counts as aligned."""
    import torch

    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a name without `torch.`."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def scales_shape(scaling: Scaling, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of the scales of an operand [rows, columns]."""
    if scaling.granularity == "block":
        return -(-rows // scaling.block[0]), -(-columns // scaling.block[1])
    return (1,) if scaling.granularity == "tensor" else (rows, 1)
