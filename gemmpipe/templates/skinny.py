"""Launching the skinny kernel: its parameters, in the order of its signature, and what fits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.templates.axes import KIND, integer
from gemmpipe.templates.fits import common_misfit
from gemmpipe.templates.signature import LINES, SCALE_BLOCK, SCALE_BLOCKS, loads, operand_pointers, sizes, tile_sizes
from gemmpipe.templates.tiled import Tiled, facts_of

if TYPE_CHECKING:
    from gemmpipe.space import Space

_MOST_ROWS = 16
_KNOBS = (
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "num_warps",
    "num_stages",
    "cache_modifier",
    "OVERLAP",
    "PREFETCH",
)


@dataclass(frozen=True, kw_only=True)
class Skinny(Tiled):
    """`skinny`: up to 16 rows on the CUDA cores, no split of K between programs."""

    label = "skinny"
    kernel: str = "gemmpipe.templates.skinny_kernel:skinny"
    overlapping: bool = True

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return (KIND, "GROUP_SIZE_M", "NUM_KSPLIT", *_KNOBS)

    def check(self, space: "Space") -> None:
        """Nothing: the axes are those of the family's plain kernel, which looks at every value."""

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points of this kernel type."""
        if KIND not in space.axes:
            return ()
        return space.points({**facts_of(spec, device), KIND: "skinny"})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone."""
        fixed: dict[str, Scalar] = {KIND: "skinny", "cache_modifier": "", "GROUP_SIZE_M": 16, "NUM_KSPLIT": 1}
        return {**fixed, **{name: knobs[name] for name in _KNOBS if name in knobs}}

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        if reason := common_misfit(spec, knobs, device):
            return reason
        if scaling(spec) is None:
            return "scales: none, one an operand, one a row of both, or 1x128 and 128x128 blocks"
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

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, scales and output."""
        return operand_pointers(spec)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides."""
        return {**sizes(spec, scale_group=SCALE_BLOCK), **LINES}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            **tile_sizes(knobs),
            "SCALES": scaling(spec),
            "SCALE_BLOCK": SCALE_BLOCK,
            **loads(spec, knobs),
            "STAGES": knobs["num_stages"],
        }


def scaling(spec: GemmSpec) -> str | None:
    """`none`, `tensor`, `row` or `block`, or None for scales that this kernel does not apply."""
    scales = (spec.x_scale, spec.w_scale)
    if scales == (None, None):
        return "none"
    if spec.x_scale is None or spec.w_scale is None or spec.x_scale.granularity != spec.w_scale.granularity:
        return None
    if spec.x_scale.granularity == "block":
        return "block" if (spec.x_scale.block, spec.w_scale.block) == SCALE_BLOCKS else None
    return spec.x_scale.granularity
