"""The parameters that product kernels have in common, in the order of their signatures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemmpipe.family import GemmSpec, Inputs, Prepared

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


def operand_pointers(spec: GemmSpec) -> Mapping[str, str]:
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


def operand_tensors(inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
    """The tensors behind these pointers, and the row strides that they really have."""
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
        "out_stride": out.stride(-2),
    }
