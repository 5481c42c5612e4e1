"""Launching the kernel on tiles of weights: what differs from the row-major weight's, and what fits where."""

from dataclasses import dataclass

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.a8w8_blockscale import _fits
from gemmpipe.kernels.a8w8_blockscale import _triton as row_major
from gemmpipe.layouts import TILES_16X16


@dataclass(frozen=True, kw_only=True)
class Blockscale(row_major.Blockscale):
    """`triton`: one program a tile and split."""

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The row-major kernel's rules, for the other layout."""
        return _fits.misfit(spec, knobs, device, layout=TILES_16X16)
