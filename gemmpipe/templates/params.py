"""Knobs of tiled kernels (names, required axes, values), and the parameters that product kernels have in common.

Parameters are in the order of the kernels' signatures.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gemmpipe.core.data import Knobs, Scalar
from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.core.spec import COLUMN, scale_order
from gemmpipe.family import GemmSpec, Inputs, Prepared

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


REQUIRED_AXES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
NEUTRAL_VALUES: Mapping[str, Scalar] = {"GROUP_SIZE_M": 1, "NUM_KSPLIT": 1, "cache_modifier": ""}
AMD_KNOBS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
SWAP_AB = "SWAP_AB"
"""Weights on the wide side of the matrix instruction."""
NO_GPU = "no GPU: Triton compiles for GPUs"
"""The reason for which no own kernel runs on a CPU."""
KERNEL_TYPE = "kernel_type"
"""The kernel of a family that an entry of the space is for; `plain` is the tiled one."""
WARP_SPECIALISED = "warp_specialised"
LABEL_BY_KERNEL_TYPE = {"plain": "triton", WARP_SPECIALISED: "gluon"}
"""Labels of the kernel types that have another name than their label."""
CTAS_PER_SM = "CTAS_PER_SM"
"""Programs per multiprocessor: a knob of the warp-specialised kernels, ignored by the tiled ones."""
CLUSTER_SIZE = "CLUSTER_SIZE"
"""Programs of a thread block cluster: a knob of the warp-specialised kernels too."""
OWN_PACE = "OWN_PACE"
"""True if warpgroups multiply at their own pace (hopper/own_pace.py), as all do in tiles of 256 rows."""
TWO_IN_FLIGHT = "TWO_IN_FLIGHT"
"""True if a warpgroup at its own pace starts a product before it adds up the one before; tiles of 128 rows."""
EARLY_COPIES = "EARLY_COPIES"
"""True if the loader starts its first copies while other barriers are initialised; tiles of 64 rows at own pace."""
CONSTANT_NK = "CONSTANT_NK"
"""True if N and K are constants of the binary."""
ONE_WARPGROUP = "ONE_WARPGROUP"
"""True if one warpgroup multiplies a tile of 64 rows, instead of two with half of the columns each."""
BLOCK_SCALED_KNOBS = (OWN_PACE, TWO_IN_FLIGHT, EARLY_COPIES, CONSTANT_NK, ONE_WARPGROUP)
"""Knobs of the block-scaled warp-specialised kernels alone; absent is false."""
WARP_SPECIALISED_KNOBS = (CTAS_PER_SM, CLUSTER_SIZE, *BLOCK_SCALED_KNOBS)
"""Knobs that the tiled kernels ignore."""
CACHE_MODIFIERS = ("", ".ca", ".cg")
"""Cache modifiers of loads of the weight."""
MAX_PORTABLE_CLUSTER = 8
"""Programs in a cluster that every device of sm_90 and later can launch (CUDA programming guide)."""
TILED_AXES = (*REQUIRED_AXES, *NEUTRAL_VALUES, *AMD_KNOBS, KERNEL_TYPE)


def kernel_types(labels: Iterable[str]) -> list[str]:
    """The kernel types of implementations with these labels."""
    names = {label: kind for kind, label in LABEL_BY_KERNEL_TYPE.items()}
    return [names.get(label, label) for label in labels]


def check_kernel_types(space: "Space", labels: Iterable[str]) -> None:
    """Raises UserError for a value of `space.kernel_type=` that none of these labels has."""
    known = kernel_types(labels)
    for value in space.axes[KERNEL_TYPE] if KERNEL_TYPE in space.pinned else ():
        if value is not None and value not in known:
            near = suggest(str(value), known)
            raise UserError(f"space.{KERNEL_TYPE}: {value!r}, expected one of {', '.join(known)}{near}")


def int_knob(knobs: Knobs, name: str) -> int:
    """A knob as an int. Raises UserError for another type."""
    value = knobs[name]
    if type(value) is not int:  # a bool is not accepted
        raise UserError(f"space.{name}: {value!r}, expected an integer")
    return value


def check_axes(space: "Space", known: Sequence[str]) -> None:
    """Raises UserError for an unknown axis, a required one that is missing, or a value out of range."""
    for axis in space.axes:
        if axis not in (*known, *WARP_SPECIALISED_KNOBS):
            raise UserError(f"space.{axis}: no knob of this kernel{suggest_or_list(axis, known)}")
    for axis in REQUIRED_AXES:
        if axis not in space.axes:
            raise UserError(f"space.{axis}: missing; a tiled kernel needs {', '.join(REQUIRED_AXES)}")
    replaced = [
        (name, v) for entry in space.when for name, values in entry.items() if isinstance(values, tuple) for v in values
    ]
    for axis, value in [(axis, v) for axis, values in space.axes.items() for v in values] + replaced:
        if expected := _expected_range(axis, value):
            raise UserError(f"space.{axis}: {value!r}, expected {expected}")


def _expected_range(axis: str, value: Scalar) -> str | None:
    """The expected values of this axis if `value` is not one of them, else None; null leaves out an optional knob."""
    if value is None and axis not in REQUIRED_AXES:
        return None
    number = isinstance(value, int) and not isinstance(value, bool)
    size = value if number and isinstance(value, int) else 0
    if axis == "BLOCK_SIZE_N":  # multiples of 16 are for the warp-specialised kernels; others skip them
        wanted = size > 0 and (not size & (size - 1) or size % 16 == 0)
        return None if wanted else "a power of two or a multiple of 16"
    if axis.startswith("BLOCK_SIZE_") or axis == "num_warps":
        return None if size > 0 and not size & (size - 1) else "a power of two"
    if axis in ("num_stages", "GROUP_SIZE_M", "NUM_KSPLIT"):
        return None if size > 0 else "a whole number from 1"
    if axis == CLUSTER_SIZE:
        return None if 0 < size <= MAX_PORTABLE_CLUSTER else f"a whole number from 1 to {MAX_PORTABLE_CLUSTER}"
    if axis == CTAS_PER_SM:
        return None if number and value in (1, 2) else "1 or 2"
    if axis in AMD_KNOBS:
        return None if value is None or (number and size >= 0) else "a whole number from 0"
    if axis == "cache_modifier":
        return None if value in CACHE_MODIFIERS else f"one of {', '.join(map(repr, CACHE_MODIFIERS))}"
    return (None if isinstance(value, bool) else "true or false") if axis in (SWAP_AB, *BLOCK_SCALED_KNOBS) else None


TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "int8": "i8",
}
"""Triton's names of torch's types."""
WORKSPACE_PARAMETERS = {"parts_ptr": "*fp32", "counters_ptr": "*i32"}
"""The workspace of split-K."""
SCHEDULE_PARAMETERS = {"group_m": 1, "splits": 1}
"""The schedule of tiles, set when bound: rows of tiles per group, splits of K."""
PREFETCH_PARAMETERS = {"lines": 0}
"""Lines prefetched of each row of w, set when bound (see tiled.prefetched_lines)."""
SCALE_BLOCK = 128
"""Elements along K (and rows of w) that share a block scale."""
SCALE_BLOCKS = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
"""Scale blocks of x and of w."""


def operand_pointers(spec: GemmSpec) -> dict[str, str]:
    """Operands, bias, scales and output; `constexpr` for those that this product does not have."""
    scale = "*fp32" if spec.x_scale else "constexpr"
    return {
        "x_ptr": f"*{TRITON_TYPES[spec.x_dtype]}",
        "w_ptr": f"*{TRITON_TYPES[spec.w_dtype]}",
        "bias_ptr": f"*{TRITON_TYPES[spec.out_dtype]}" if spec.bias else "constexpr",
        "x_scale_ptr": scale,
        "w_scale_ptr": scale,
        "out_ptr": f"*{TRITON_TYPES[spec.out_dtype]}",
    }


def size_arguments(spec: GemmSpec, *, packed: int = 1, scale_group: int = 0) -> dict[str, int]:
    """Sizes, and row strides of contiguous operands in elements.

    An element of x and of w holds `packed` values; `scale_group` values along K share a scale (0: the kernel takes no
    strides of scales).
    """
    row, scales = spec.k // packed, -(-spec.k // scale_group) if scale_group else 0
    scale_strides = {"x_scale_stride": scales, "w_scale_stride": scales} if scale_group else {}
    return {
        "M": spec.m,
        "N": spec.n,
        "K": spec.k,
        "x_stride": row,
        "w_stride": row,
        **scale_strides,
        "out_stride": spec.n,
    }


def tile_constants(knobs: Knobs) -> dict[str, Scalar]:
    """A tile's sides and its step along K."""
    return {name: knobs[name] for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")}


def load_constants(spec: GemmSpec, knobs: Knobs) -> dict[str, Scalar]:
    """EVEN_K (K is a whole number of steps) and CACHE (the cache modifier of loads of the weight)."""
    return {"EVEN_K": spec.k % int_knob(knobs, "BLOCK_SIZE_K") == 0, "CACHE": knobs["cache_modifier"]}


def operand_arguments(inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> dict[str, object]:
    """The tensors of the pointers (None if absent) and their actual row strides."""
    weights = prepared.weights
    return {
        "x_ptr": inputs.x,
        "w_ptr": weights.w,
        "bias_ptr": weights.bias,
        "x_scale_ptr": inputs.x_scale,
        "w_scale_ptr": weights.w_scale,
        "out_ptr": out,
        "x_stride": inputs.x.stride(-2),
        "w_stride": weights.w.stride(-2),
        "x_scale_stride": scale_stride(inputs.x_scale),
        "w_scale_stride": _row_stride(weights.w_scale),
        "out_stride": out.stride(-2),
    }


def scale_stride(scales: "torch.Tensor | None") -> int:
    """The stride between rows of x's scales; of M-major ones between K blocks."""
    m_major = scales is not None and scales.dim() == 2 and scale_order(scales) == COLUMN
    return scales.stride(1) if scales is not None and m_major else _row_stride(scales)


def _row_stride(scales: "torch.Tensor | None") -> int:
    """The row stride; 0 for no scales or a scalar scale."""
    return scales.stride(0) if scales is not None and scales.dim() else 0
