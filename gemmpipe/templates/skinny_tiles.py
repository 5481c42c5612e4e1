"""Launching the skinny kernel of weights in tiles: what differs from the row-major weight's."""

from dataclasses import dataclass

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.layouts import TILES_16X16
from gemmpipe.templates.axes import integer
from gemmpipe.templates.fits import common_misfit
from gemmpipe.templates.signature import SCALE_BLOCK
from gemmpipe.templates.skinny import Skinny
from gemmpipe.templates.whole_k import SCALINGS, scaling

_HALF, _DEPTH = 8, 16


@dataclass(frozen=True, kw_only=True)
class SkinnyTiles(Skinny):
    """`skinny`: up to 16 rows on the CUDA cores."""

    kernel: str = "gemmpipe.templates.skinny_tiles_kernel:skinny_tiles"

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        if reason := common_misfit(spec, knobs, device, layout=TILES_16X16):
            return reason
        if scaling(spec) is None:
            return SCALINGS
        if n < _HALF or k < _DEPTH or n > SCALE_BLOCK:
            return f"tile: {n} columns and {k} along K, a program takes rows of 8 x 16 bytes with one scale"
        # Pieces of 16 bytes that a thread has: x's of every row and one of w as numbers, and a sum for each pair.
        pieces = _HALF * k // (_DEPTH * integer(knobs, "num_warps") * device.warp_size)
        held = max(pieces, 1) * (16 * (m + 1) + m * n // _HALF)
        if held > 256:
            return f"registers: {held} values a thread, 256 leave room for addresses"
        # Pipelined, what was loaded ahead waits in shared memory, where 8 threads' pieces of x are 8 copies.
        ahead = (integer(knobs, "num_stages") - 1) * (_HALF * m + n + 4) * k
        if ahead > device.shared_bytes:
            return f"shared memory: about {ahead} bytes, {device.shared_bytes} a block on {device.gfx}"
        return None
