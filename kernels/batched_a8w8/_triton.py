"""The batched 8-bit kernel, and what fits where."""

from dataclasses import dataclass

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.templates.dense import Dense, sum_misfit
from gemmpipe.templates.fits import tile_misfit


@dataclass(frozen=True, kw_only=True)
class Product(Dense):
    """`triton`: a program a tile, split and product; split-K by parts."""

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        return sum_misfit(spec) or tile_misfit(spec, knobs, device, accumulators=1, batched=True)
