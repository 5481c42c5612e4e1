"""What fits where: the rules of the block-scaled kernel."""

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.layouts import PLAIN
from gemmpipe.templates.axes import integer
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.signature import SCALE_BLOCK, SCALE_BLOCKS


def scale_misfit(spec: GemmSpec, block_k: int) -> str | None:
    """The first rule about scales that is broken, or None."""
    scaling = tuple(scale.block if scale else None for scale in (spec.x_scale, spec.w_scale))
    if scaling != SCALE_BLOCKS:
        return f"scales: this kernel reads 1x128 and 128x128 blocks, not {scaling}"
    # One pair of scales is applied to a whole K block: a block across two groups would be scaled by the first's.
    if block_k < 1 or SCALE_BLOCK % block_k:
        return f"scale group: BLOCK_SIZE_K={block_k} does not divide {SCALE_BLOCK}"
    return None


def misfit(spec: GemmSpec, knobs: Knobs, device: Device, layout: str = PLAIN) -> str | None:
    """`rule: detail` of the first rule broken by a kernel that reads weights in this layout, or None."""
    if reason := scale_misfit(spec, integer(knobs, "BLOCK_SIZE_K")):
        return reason
    # The unscaled product of a K block lives beside the accumulator: at 128 registers each, 44 and more spilled in
    # all 96 such configurations (H200, 2026-11-21), and none came within 1.7x of the best.
    return tile_misfit(spec, knobs, device, accumulators=2, layout=layout)
