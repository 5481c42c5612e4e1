"""The 8-bit kernel on tiles of weights, and what fits where."""

from dataclasses import dataclass

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.layouts import TILES_16X16
from gemmpipe.templates.dense import Dense, sum_misfit
from gemmpipe.templates.fits import tile_misfit


@dataclass(frozen=True, kw_only=True)
class Product(Dense):
    """`triton`: reads the pre-shuffled weight; split-K by parts."""

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        return sum_misfit(spec) or tile_misfit(spec, knobs, device, accumulators=1, layout=TILES_16X16)
