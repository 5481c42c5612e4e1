"""Launching the kernel on tiles of weights: its parameters, in the order of its signature, and what fits where."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.fits import tile_misfit
from gemmpipe.layouts import TILES_16X16
from gemmpipe.tiled import TYPES, Tiled, ceil_div, integer

if TYPE_CHECKING:
    import torch

SCALE_BLOCK = 128
_BLOCKS = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))


@dataclass(frozen=True, kw_only=True)
class Blockscale(Tiled):
    """`triton`: transposed activation scales, one program a tile and split."""

    kernel: str = "gemmpipe.kernels.a8w8_blockscale_bpreshuffle._kernel:blockscale_tiles"
    swaps: bool = True

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        scaling = tuple(scale.block if scale else None for scale in (spec.x_scale, spec.w_scale))
        if scaling != _BLOCKS:
            return f"scales: this kernel reads 1x128 and 128x128 blocks, not {scaling}"
        # One pair of scales is applied to a whole K block: a block across two groups would be scaled by the first's.
        if SCALE_BLOCK % integer(knobs, "BLOCK_SIZE_K"):
            return f"scale group: BLOCK_SIZE_K={knobs['BLOCK_SIZE_K']} does not divide {SCALE_BLOCK}"
        # The unscaled product of a K block lives beside the accumulator.
        return tile_misfit(spec, knobs, device, accumulators=2, layout=TILES_16X16)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, scales, output and workspace."""
        return {
            "x_ptr": f"*{TYPES[spec.x_dtype]}",
            "w_ptr": f"*{TYPES[spec.w_dtype]}",
            "x_scale_ptr": "*fp32",
            "w_scale_ptr": "*fp32",
            "out_ptr": f"*{TYPES[spec.out_dtype]}",
            "parts_ptr": "*fp32",
            "counters_ptr": "*i32",
        }

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and strides of contiguous operands; the last two are knobs, set when bound."""
        return {
            "M": spec.m,
            "N": spec.n,
            "K": spec.k,
            "x_stride": spec.k,
            "w_stride": spec.k,
            "x_scale_stride": spec.m,
            "w_scale_stride": ceil_div(spec.k, SCALE_BLOCK),
            "out_stride": spec.n,
            "group_m": 1,
            "splits": 1,
        }

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            "BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"],
            "BLOCK_SIZE_N": knobs["BLOCK_SIZE_N"],
            "BLOCK_SIZE_K": knobs["BLOCK_SIZE_K"],
            "SCALE_BLOCK": SCALE_BLOCK,
            "SPLIT_K": integer(knobs, "NUM_KSPLIT") != 1,
            "EVEN_K": spec.k % integer(knobs, "BLOCK_SIZE_K") == 0,
            "CACHE": knobs["cache_modifier"],
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
        }

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors, and the strides that they really have."""
        weights = prepared.weights
        if inputs.x_scale_t is None or weights.w_scale is None:
            raise ValueError("this kernel needs x_scale_t and w_scale")
        return {
            "x_ptr": inputs.x,
            "w_ptr": weights.w,
            "x_scale_ptr": inputs.x_scale_t,
            "w_scale_ptr": weights.w_scale,
            "out_ptr": out,
            "x_stride": inputs.x.stride(0),
            "w_stride": weights.w.stride(0),
            "x_scale_stride": inputs.x_scale_t.stride(1),
            "w_scale_stride": weights.w_scale.stride(0),
            "out_stride": out.stride(0),
        }
