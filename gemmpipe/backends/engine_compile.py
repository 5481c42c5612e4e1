"""Compiles the Triton kernels of an engine's function ahead of its calls, in processes that use no GPU.

A JIT function compiles at its first call, so that the finals would compile sequentially. The same call on `meta`
tensors, with a target instead of a device and without launches, fills Triton's cache with the same entries.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.spec import GemmSpec, Scaling
from gemmpipe.launch.build import CompileOnlyDriver, gpu_target
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

_LOCK = threading.RLock()


class MetaCallable(Protocol):
    """An engine's implementation that can be called without memory."""

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """Call the engine's function on `meta` tensors."""


@runtime_checkable
class CompilesWhenCalled(MetaCallable, Protocol):
    """An implementation that calls an engine's function, which compiles at its first call for each configuration."""

    def compiles_when_called(self, spec: GemmSpec, knobs: Knobs) -> bool:
        """True if `call_on_meta` compiles what a launch would."""


@dataclass(frozen=True, kw_only=True)
class CompileCalls:
    """A task for a compile process: compile the kernels of these calls of an engine's function."""

    implementation: MetaCallable
    device: Device
    calls: Sequence[tuple[GemmSpec, Knobs]]

    def __call__(self) -> int:
        """Returns the number of calls that compiled; one that fails here fails in the finals too, with a reason."""
        done = 0
        with compile_only_for(self.device), _quiet_logs():
            for spec, knobs in self.calls:
                try:
                    self.implementation.call_on_meta(spec, knobs)
                    done += 1
                except Exception:  # noqa: BLE001 - the engine's code; the finals report it
                    continue
        return done


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Within the block only errors are logged: engines name the file of each configuration, in every process."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def compile_only_for(device: Device) -> Iterator[None]:
    """Within the block Triton's JIT functions compile for this device and launch nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(function, *args, grid=grid, warmup=True, **kwargs)

    with _LOCK:
        before = driver._active
        driver.set_active(CompileOnlyDriver(gpu_target(device)))
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
            driver._active = before


def empty_meta(shape: tuple[int, ...], dtype: str) -> "torch.Tensor":
    """A tensor without memory; Triton takes its address as aligned."""
    import torch

    from gemmpipe.family.operands import torch_dtype

    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


def scales_shape(scaling: Scaling, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of the scales of an operand [rows, columns]."""
    if scaling.granularity == "block":
        return ceil_div(rows, scaling.block[0]), ceil_div(columns, scaling.block[1])
    return (1,) if scaling.granularity == "tensor" else (rows, 1)
