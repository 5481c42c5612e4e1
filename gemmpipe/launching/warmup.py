"""Compiling a JIT function as a call of it would, without a device: for functions that are not launched by us."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemmpipe.data import Device, Scalar


@dataclass(frozen=True)
class _Driver:
    """What a call asks of Triton's driver before it launches."""

    target: Any

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def compile_call(kernel: Any, arguments: Sequence[object], options: Mapping[str, Scalar], device: Device) -> None:
    """Compile what `kernel[grid](*arguments, **options)` would, into Triton's disk cache; a dtype stands for a tensor
    of it whose address is a multiple of 16. Raises what the compiler raises.

    Only for processes that use no device: Triton has no driver for one from now on.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    arch = device.gfx if device.kind == "hip" else int(device.gfx.removeprefix("sm_"))
    driver.set_active(_Driver(GPUTarget(device.kind, arch, device.warp_size)))
    kernel.warmup(*arguments, grid=(1,), **options)
