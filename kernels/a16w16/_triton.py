"""Launching the 16-bit kernel: its parameters, in the order of its signature."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.a16w16 import _fits
from gemmpipe.templates.dense import Dense


@dataclass(frozen=True, kw_only=True)
class Product(Dense):
    """`triton`: the dense launch of a kernel that knows neither batches nor scales by row."""

    kernel: str = "gemmpipe.kernels.a16w16._kernel:product"

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """See _fits."""
        return _fits.misfit(spec, knobs, device)

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
