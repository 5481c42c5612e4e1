"""Host side of the kernels that quantise activations together with what computes them (fused_quantise_kernel.py).

M and strides are arguments, so one build serves all M of a launch shape; K and the epsilon of a norm are constants of a
model. A launch shape is how a row is divided over programs and warps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Scalar
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.launch.build import LoadedKernel, find_kernel, is_interpreted
from gemmpipe.templates.params import TRITON_TYPES
from gemmpipe.templates.tiled import ceil_div, make_build, next_power_of_2, uses_pdl

if TYPE_CHECKING:
    import torch

NORM_KERNEL = "gemmpipe.templates.fused_quantise_kernel:rms_norm_quantise"
SILU_KERNEL = "gemmpipe.templates.fused_quantise_kernel:silu_mul_quantise"
GROUP_KERNEL = "gemmpipe.templates.fused_quantise_kernel:group_quantise"
GROUP = 128
"""Columns that share a scale."""
OUT_DTYPE = "float8_e4m3fn"
MAX_NORM_K = 16384
"""Columns of a row that one program keeps in registers: 32 values per thread of 16 warps."""
LEAST_SCALE = 1.0 / (FP8_MAX[OUT_DTYPE] * 512.0)
"""The scale of a group of zeros, as in vLLM's fused operators."""
LEAST_BEFORE_ROUNDING = 1e-10
"""The least scale that is rounded up to a power of two, as in vLLM's operator."""
_VECTOR = 8
"""Values of 16 bits that a thread loads at once: 128 bits."""
_INTEGERS = ("x_stride", "scale_row_stride", "scale_group_stride")
BoundKernel = Callable[..., None]
"""(programs, *values of all parameters before the constants)"""


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How a row is divided: `groups` groups of 128 columns for each program of `warps` warps."""

    groups: int
    warps: int


def norm_shape(rows: int, k: int, units: int) -> LaunchShape:
    """The launch shape of the norm for `rows` rows on a device with `units` multiprocessors: a program per row.

    Few rows: one load of 128 bits per thread, as many warps as that takes. From two rows per multiprocessor on, two
    loads per thread: fewer threads wait for each other in the sums over a row.
    """
    groups = next_power_of_2(k // GROUP)
    loads = 1 if rows <= 2 * units else 2
    warps = groups * GROUP // (32 * _VECTOR * loads)
    return LaunchShape(groups=groups, warps=max(1, min(16, warps)))


def silu_shape(rows: int, size: int, units: int) -> LaunchShape:
    """The launch shape of SiLU and of the quantiser alone for `rows` rows of `size` output columns.

    At least two programs per multiprocessor.

    At most 16 groups per program, with 8 values of gate and of up per thread.
    """
    groups = 16
    while groups > 1 and rows * ceil_div(size // GROUP, groups) < 2 * units:
        groups //= 2
    return LaunchShape(groups=groups, warps=max(1, groups * GROUP // (32 * _VECTOR)))


def norm_build(k: int, dtype: str, epsilon: float, *, residual: bool, shape: LaunchShape, device: Device) -> Build:
    """The build of the norm for rows of k columns in `dtype`, with or without a residual."""
    x_type = f"*{TRITON_TYPES[dtype]}"
    added = x_type if residual else "constexpr"
    pointers = {"x_ptr": x_type, "residual_ptr": added, "total_ptr": added, "weight_ptr": x_type}
    constants: dict[str, Scalar] = {"K": k, "GROUPS": shape.groups, "EPSILON": epsilon}
    return _build(NORM_KERNEL, pointers, constants, shape, device)


def silu_build(size: int, dtype: str, *, shape: LaunchShape, device: Device) -> Build:
    """The build of SiLU for rows of `size` columns of gate and as many of up in `dtype`."""
    constants: dict[str, Scalar] = {"SIZE": size, "GROUPS": shape.groups}
    return _build(SILU_KERNEL, {"x_ptr": f"*{TRITON_TYPES[dtype]}"}, constants, shape, device)


def group_build(
    size: int, dtype: str, epsilon: float, *, power_of_two: bool, shape: LaunchShape, device: Device
) -> Build:
    """The build of the quantiser alone for rows of `size` columns; `epsilon`: the least magnitude of a group."""
    least = epsilon / FP8_MAX[OUT_DTYPE]
    constants: dict[str, Scalar] = {"SIZE": size, "GROUPS": shape.groups}
    rounding: dict[str, Scalar] = {"POWER_OF_TWO": power_of_two}
    least = max(least, LEAST_BEFORE_ROUNDING) if power_of_two else least
    return _build(GROUP_KERNEL, {"x_ptr": f"*{TRITON_TYPES[dtype]}"}, constants, shape, device, least, rounding)


def _build(
    kernel: str,
    pointers: dict[str, str],
    constants: dict[str, Scalar],
    shape: LaunchShape,
    device: Device,
    least_scale: float = LEAST_SCALE,
    rounding: Mapping[str, Scalar] = MappingProxyType({}),
) -> Build:
    interpreted = is_interpreted(find_kernel(kernel))
    overlap = uses_pdl(device, interpreted=interpreted)
    constants |= {"TOP": FP8_MAX[OUT_DTYPE], "LEAST": least_scale, **rounding}
    constants |= {"OVERLAP": overlap, "INTERPRETED": interpreted}
    pointers |= {"out_ptr": f"*{TRITON_TYPES[OUT_DTYPE]}", "scale_ptr": "*fp32"}
    options: dict[str, Scalar] = {"num_warps": shape.warps, **({"launch_pdl": True} if overlap else {})}
    return make_build(kernel, pointers, _INTEGERS, constants, options, ["x_stride"])


def bound_kernel(loaded: LoadedKernel) -> BoundKernel:
    """The launch of a loaded kernel on the current device: a call costs the host half of a general launch.

    Called with the programs and the values of all parameters before the constants, None for absent tensors.
    """
    constants, names = dict(loaded.build.constants), [name for name, _ in loaded.build.signature]
    rest = tuple(constants[name] for name in names[names.index(_INTEGERS[-1]) + 1 :])
    kernel = loaded.kernel
    if loaded.interpreted:
        return lambda programs, *values: kernel[(programs, 1, 1)](*values, *rest)
    from triton.runtime import driver

    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    current_stream, device = driver.active.get_current_stream, driver.active.get_current_device()

    def launch(programs: int, *values: object) -> None:
        run(programs, 1, 1, current_stream(device), function, metadata, None, None, None, *values, *rest)

    return launch


def launch_norm(
    kernel: BoundKernel,
    out: "torch.Tensor",
    x: "torch.Tensor",
    weight: "torch.Tensor",
    scale: "torch.Tensor",
    residual: "torch.Tensor | None",
    total: "torch.Tensor | None",
    scale_strides: tuple[int, int],
) -> None:
    """Run the norm on the current stream: x [M, K], with any stride between rows that is divisible by 16.

    `total` receives x + residual, and may be the residual. `scale_strides`: elements between the scales of two rows,
    and of two groups.
    """
    kernel(len(x), x, residual, total, weight, out, scale, x.stride(0), *scale_strides)


def launch_groups(
    kernel: BoundKernel,
    out: "torch.Tensor",
    x: "torch.Tensor",
    scale: "torch.Tensor",
    scale_strides: tuple[int, int],
    shape: LaunchShape,
) -> None:
    """Run SiLU, x [M, 2 * size], or the quantiser alone, x [M, size], on the current stream; strides as above."""
    rows, size = out.shape
    kernel(rows * ceil_div(size // GROUP, shape.groups), x, out, scale, x.stride(0), *scale_strides)
