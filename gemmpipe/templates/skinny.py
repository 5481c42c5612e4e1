"""Launching the skinny kernel: its parameters, in the order of its signature, and what fits."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.templates.axes import integer
from gemmpipe.templates.fits import common_misfit
from gemmpipe.templates.signature import SCALE_BLOCK, loads, tile_sizes
from gemmpipe.templates.whole_k import SCALINGS, WholeK, scaling

_MOST_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Skinny(WholeK):
    """`skinny`: up to 16 rows on the CUDA cores, no split of K between programs."""

    label = "skinny"
    kernel: str = "gemmpipe.templates.skinny_kernel:skinny"

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        if reason := common_misfit(spec, knobs, device):
            return reason
        if scaling(spec) is None:
            return SCALINGS
        if scaling(spec) == "block" and (n > SCALE_BLOCK or k < SCALE_BLOCK):
            return (
                f"scale group: {n} columns and {k} along K, a program takes whole blocks along K of one row of scales"
            )
        # Weights and products are fp32 in registers.
        held = (1 + m) * n * k // (integer(knobs, "num_warps") * device.warp_size)
        if held > 256:
            return f"registers: {held} values a thread, 256 leave room for addresses"
        return None

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """More rows than the CUDA cores keep up with, and tiles that are mostly padding."""
        m = integer(knobs, "BLOCK_SIZE_M")
        # They take M products a weight: beyond 16 rows no memory is slow enough to hide them.
        if spec.m > _MOST_ROWS:
            return f"rows: M={spec.m}, the CUDA cores keep up with {_MOST_ROWS} at most"
        if m >= 2 * spec.m:
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        return None

    def rule(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """One row of 16 bits on NVIDIA, where it was measured ahead of the plain kernel (docs/kernels.md)."""
        if spec.m != 1 or scaling(spec) != "none" or device.vendor != "nvidia":
            return None
        sizes = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512, "num_warps": 1, "num_stages": 1}
        return self.normalise(spec, sizes, device)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            **tile_sizes(knobs),
            "SCALES": scaling(spec),
            "SCALE_BLOCK": SCALE_BLOCK,
            **loads(spec, knobs),
            "STAGES": knobs["num_stages"],
        }
