"""Launching the warp-specialised block-scaled kernel: the scales beside the operands."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.kernels.a8w8_blockscale._fits import scale_misfit
from gemmpipe.templates.axes import integer
from gemmpipe.templates.signature import SCALE_BLOCK
from gemmpipe.templates.warp_specialised import WarpSpecialised
from gemmpipe.templates.warp_specialised_tiles import BLOCK_SCALED, Widest, columns_of, part_width

if TYPE_CHECKING:
    import torch


def _batch(spec: GemmSpec, knobs: Knobs) -> int:
    """Eight where ptxas has the registers for them and none is left over at the end of K, else four.

    Tiles of 80 columns alone: with 96, or with the end of a split, eight spill (triton 3.6).
    """
    few = part_width(columns_of(knobs)) < columns_of(knobs) <= 80
    whole = integer(knobs, "NUM_KSPLIT") == 1 and spec.k % (8 * integer(knobs, "BLOCK_SIZE_K")) == 0
    return 8 if few and whole else 4


@dataclass(frozen=True, kw_only=True)
class BlockscaleWarpSpecialised(WarpSpecialised):
    """`gluon`: sum and two temporaries, or one, in registers; the scales of x come with it through the ring."""

    kernel: str = "gemmpipe.kernels.a8w8_blockscale._warp_specialised:blockscale_warp_specialised"
    widest: Widest = BLOCK_SCALED

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if reason := scale_misfit(spec, integer(knobs, "BLOCK_SIZE_K")):
            return reason
        if reason := super().misfit(spec, knobs, device):
            return reason
        columns = columns_of(knobs)
        if columns > SCALE_BLOCK + gcd(columns, SCALE_BLOCK):  # a multiple of its columns is where a tile begins
            return f"scales: {columns} columns a warpgroup may lie in three of their blocks, two are looked up"
        # The copy of a tile's scales begins at a multiple of 16 bytes.
        return f"alignment: M={spec.m}, the copy engine needs scales in fours" if spec.m % 4 else None

    def operands(self, spec: GemmSpec) -> Mapping[str, str]:
        """The weight's scales."""
        return {"w_scale_ptr": "*fp32"}

    def sizes(self, spec: GemmSpec) -> tuple[str, ...]:
        """Strides of the scales between rows of w and between K blocks of x."""
        return ("w_scale_stride", "scale_stride")

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Rows of w that share a scale, and how many K blocks are added up before nothing is in flight."""
        return {"SCALE_BLOCK": SCALE_BLOCK, "BATCH": _batch(spec, knobs)}

    def boxes(self, spec: GemmSpec, knobs: Knobs) -> dict[str, tuple[str, list[int], object]]:
        """And x's scales, flat."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        return {**super().boxes(spec, knobs), "scales": ("fp32", [integer(knobs, "BLOCK_SIZE_M")], flat)}

    def values(self, spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> Mapping[str, object]:
        """The M-major scales as one row."""
        if inputs.x_scale_t is None or prepared.weights.w_scale is None:
            raise ValueError("this kernel needs x_scale_t and w_scale")
        scales: torch.Tensor = inputs.x_scale_t.t()
        w_scale = prepared.weights.w_scale
        return {
            "scales": scales.reshape(-1),
            "w_scale_ptr": w_scale,
            "w_scale_stride": w_scale.stride(0),
            "scale_stride": scales.stride(0),
        }
