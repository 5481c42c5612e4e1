"""Launching the block-scaled kernel: its parameters, in the order of its signature."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.a8w8_blockscale import _fits
from gemmpipe.layouts import PLAIN
from gemmpipe.templates.signature import (
    LINES,
    PARTS,
    SCALE_BLOCK,
    SHARES,
    loads,
    operand_pointers,
    sizes,
    tile_sizes,
)
from gemmpipe.templates.tiled import Tiled


@dataclass(frozen=True, kw_only=True)
class Blockscale(Tiled):
    """`triton`: one program a tile and split."""

    kernel: str = "gemmpipe.kernels.a8w8_blockscale._kernel:blockscale"
    swaps: bool = True
    overlapping: bool = True
    any_order: bool = True

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """See _fits."""
        return _fits.misfit(spec, knobs, device)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, scales, output and workspace."""
        pointers = operand_pointers(spec)
        del pointers["bias_ptr"]
        return {**pointers, **PARTS}

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides, and how the work is shared out."""
        return {**sizes(spec, scale_group=SCALE_BLOCK), **SHARES, **LINES}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            **tile_sizes(knobs),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SPLIT_K": knobs["NUM_KSPLIT"] != 1,
            **loads(spec, knobs),
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
            "SHUFFLED": spec.w_layout != PLAIN,
        }
