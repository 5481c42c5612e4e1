"""The parameters that product kernels have in common, in the order of their signatures."""

from typing import TYPE_CHECKING

from gemmpipe.data import Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.spec import COLUMN, order_of
from gemmpipe.templates.axes import integer

if TYPE_CHECKING:
    import torch

TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "int8": "i8",
}
"""Triton's names of torch's types."""
PARTS = {"parts_ptr": "*fp32", "counters_ptr": "*i32"}
"""The workspace of split-K."""
SHARES = {"group_m": 1, "splits": 1}
"""How tiles are shared out, set when bound: rows of tiles side by side, splits of K."""
LINES = {"lines": 0}
"""What is prefetched of each row of w, set when bound (see tiled.prefetched_lines)."""
SCALE_BLOCK = 128
"""Elements along K (and rows of w) that share a scale where scales are by blocks."""
SCALE_BLOCKS = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
"""Such blocks of x and of w."""


def operand_pointers(spec: GemmSpec) -> dict[str, str]:
    """Operands, bias, scales and output; `constexpr` for those that this product has none of."""
    scale = "*fp32" if spec.x_scale else "constexpr"
    return {
        "x_ptr": f"*{TYPES[spec.x_dtype]}",
        "w_ptr": f"*{TYPES[spec.w_dtype]}",
        "bias_ptr": f"*{TYPES[spec.out_dtype]}" if spec.bias else "constexpr",
        "x_scale_ptr": scale,
        "w_scale_ptr": scale,
        "out_ptr": f"*{TYPES[spec.out_dtype]}",
    }


def sizes(spec: GemmSpec, *, packed: int = 1, scale_group: int = 0) -> dict[str, int]:
    """Sizes, and row strides of contiguous operands: `packed` values lie in an element of x and of w, and
    `scale_group` of them along K share a scale (0: the kernel takes no strides of scales)."""
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


def tile_sizes(knobs: Knobs) -> dict[str, Scalar]:
    """A tile's sides and its step along K."""
    return {name: knobs[name] for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")}


def loads(spec: GemmSpec, knobs: Knobs) -> dict[str, Scalar]:
    """How operands are loaded: whether the last step along K is whole, and how loads of the weight are cached."""
    return {"EVEN_K": spec.k % integer(knobs, "BLOCK_SIZE_K") == 0, "CACHE": knobs["cache_modifier"]}


def operand_tensors(inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> dict[str, object]:
    """The tensors behind the pointers, None where there is none, and the row strides that they really have."""
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
    """Between rows of x's scales; of M-major ones between K blocks."""
    m_major = scales is not None and scales.dim() == 2 and order_of(scales) == COLUMN
    return scales.stride(1) if scales is not None and m_major else _row_stride(scales)


def _row_stride(scales: "torch.Tensor | None") -> int:
    """0 for none, and for one number for the whole operand."""
    return scales.stride(0) if scales is not None and scales.dim() else 0
