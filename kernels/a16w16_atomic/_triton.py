"""The 16-bit kernel that adds by atomics, and what fits where."""

from dataclasses import dataclass

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.templates.dense import Dense, sum_misfit
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.tiled import integer

_MOST_SPLITS = 16


@dataclass(frozen=True, kw_only=True)
class Product(Dense):
    """`triton`: split-K by atomics, without a workspace."""

    atomic: bool = True

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if spec.bias or spec.x_scale is not None:
            return "epilogue: a split adds its plain sum, bias and scales have no place"
        # Each addition rounds to the output's type: 16 leave 1 % of elements outside the tolerance, 32 over 4 %.
        if integer(knobs, "NUM_KSPLIT") > _MOST_SPLITS:
            return f"rounding: {knobs['NUM_KSPLIT']} additions in {spec.out_dtype}, {_MOST_SPLITS} at most"
        return sum_misfit(spec) or tile_misfit(spec, knobs, device, accumulators=1, parts=False)
