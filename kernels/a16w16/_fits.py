"""What fits where: the rules of the 16-bit kernel."""

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.templates.fits import tile_misfit


def misfit(spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
    """`rule: detail` of the first rule broken, or None."""
    granularities = {scale.granularity for scale in (spec.x_scale, spec.w_scale) if scale}
    if granularities - {"tensor"}:
        return f"scales: this kernel applies one scale an operand, not {sorted(granularities)}"
    if (spec.x_scale is None) != (spec.w_scale is None):
        return "scales: both operands or none"
    return tile_misfit(spec, knobs, device, accumulators=1)
