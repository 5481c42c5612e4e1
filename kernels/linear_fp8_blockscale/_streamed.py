"""Launch of the streamed kernel that quantises x itself (_streamed_kernel.py): up to 8 rows in one launch."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.kernels.linear_fp8_blockscale._operands import (
    linear_pointers,
    linear_sizes,
    operands_violation,
    row_scales_violation,
)
from gemmpipe.templates.streamed import Streamed, streamed_constants


@dataclass(frozen=True, kw_only=True)
class FusedStreamed(Streamed):
    """`fused_streamed`: as `streamed`, for x in 16 bits, which every warp quantises before it multiplies."""

    label = "fused_streamed"
    kernel: str = "gemmpipe.kernels.linear_fp8_blockscale._streamed_kernel:linear_streamed"
    supports_m_major_scales: bool = False

    def operands_violation(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule on operands that is broken, or None."""
        return operands_violation(spec, knobs, device) or row_scales_violation(spec)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, the weight's scales and output."""
        return linear_pointers(spec)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides."""
        return linear_sizes(spec)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """The tile, and the greatest value of w's type."""
        return {**streamed_constants(spec, knobs), "TOP": FP8_MAX[spec.w_dtype]}
