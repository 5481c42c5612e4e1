"""Launching the 16-bit kernel: its parameters, in the order of its signature."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.kernels.a16w16 import _fits
from gemmpipe.tiled import TYPES, Tiled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Product(Tiled):
    """`triton`: one program a tile and split; bias and scales are left out of builds without them."""

    kernel: str = "gemmpipe.kernels.a16w16._kernel:product"
    swaps: bool = True
    overlapping: bool = True

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """See _fits."""
        return _fits.misfit(spec, knobs, device)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, scales, output and workspace."""
        scale = "*fp32" if spec.x_scale else "constexpr"
        return {
            "x_ptr": f"*{TYPES[spec.x_dtype]}",
            "w_ptr": f"*{TYPES[spec.w_dtype]}",
            "bias_ptr": f"*{TYPES[spec.out_dtype]}" if spec.bias else "constexpr",
            "x_scale_ptr": scale,
            "w_scale_ptr": scale,
            "out_ptr": f"*{TYPES[spec.out_dtype]}",
            "parts_ptr": "*fp32",
            "counters_ptr": "*i32",
        }

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides of contiguous operands; the last three are set when bound."""
        return {
            "M": spec.m,
            "N": spec.n,
            "K": spec.k,
            "x_stride": spec.k,
            "w_stride": spec.k,
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
            "SPLIT_K": knobs["NUM_KSPLIT"] != 1,
            "EVEN_K": spec.k % int(knobs["BLOCK_SIZE_K"] or 1) == 0,
            "CACHE": knobs["cache_modifier"],
            "UPCAST": spec.x_dtype == "bfloat16" and self.interpreted(),
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
        }

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors, and the row strides that they really have."""
        weights = prepared.weights
        return {
            "x_ptr": inputs.x,
            "w_ptr": weights.w,
            "bias_ptr": weights.bias,
            "x_scale_ptr": inputs.x_scale,
            "w_scale_ptr": weights.w_scale,
            "out_ptr": out,
            "x_stride": inputs.x.stride(0),
            "w_stride": weights.w.stride(0),
            "out_stride": out.stride(0),
        }
