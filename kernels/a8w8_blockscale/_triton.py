"""Launching the block-scaled kernel: its parameters, in the order of its signature."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.kernels.a8w8_blockscale import _fits
from gemmpipe.layouts import PLAIN
from gemmpipe.templates.signature import PARTS, operand_pointers
from gemmpipe.templates.tiled import Tiled, ceil_div

if TYPE_CHECKING:
    import torch

SCALE_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Blockscale(Tiled):
    """`triton`: row-major scales, one program a tile and split."""

    kernel: str = "gemmpipe.kernels.a8w8_blockscale._kernel:blockscale"
    swaps: bool = True
    overlapping: bool = True

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """See _fits."""
        return _fits.misfit(spec, knobs, device)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, scales, output and workspace."""
        return {name: kind for name, kind in operand_pointers(spec).items() if name != "bias_ptr"} | PARTS

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides of contiguous operands; the last three are set when bound."""
        groups = ceil_div(spec.k, SCALE_BLOCK)
        return {
            "M": spec.m,
            "N": spec.n,
            "K": spec.k,
            "x_stride": spec.k,
            "w_stride": spec.k,
            "x_scale_stride": groups,
            "w_scale_stride": groups,
            "out_stride": spec.n,
            "group_m": 1,
            "splits": 1,
            "lines": 0,
        }

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            "BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"],
            "BLOCK_SIZE_N": knobs["BLOCK_SIZE_N"],
            "BLOCK_SIZE_K": knobs["BLOCK_SIZE_K"],
            "SCALE_BLOCK": SCALE_BLOCK,
            "SPLIT_K": knobs["NUM_KSPLIT"] != 1,
            "EVEN_K": spec.k % int(knobs["BLOCK_SIZE_K"] or 1) == 0,
            "CACHE": knobs["cache_modifier"],
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
            "SHUFFLED": spec.w_layout != PLAIN,
        }

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors, and the row strides that they really have."""
        weights = prepared.weights
        if inputs.x_scale is None or weights.w_scale is None:
            raise ValueError("a8w8_blockscale needs x_scale and w_scale")
        return {
            "x_ptr": inputs.x,
            "w_ptr": weights.w,
            "x_scale_ptr": inputs.x_scale,
            "w_scale_ptr": weights.w_scale,
            "out_ptr": out,
            "x_stride": inputs.x.stride(0),
            "w_stride": weights.w.stride(0),
            "x_scale_stride": inputs.x_scale.stride(0),
            "w_scale_stride": weights.w_scale.stride(0),
            "out_stride": out.stride(0),
        }
