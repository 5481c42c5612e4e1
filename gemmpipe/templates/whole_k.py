"""Launching kernels for a few rows whose programs take all of K: what they have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.templates.axes import KIND
from gemmpipe.templates.signature import LINES, SCALE_BLOCK, SCALE_BLOCKS, operand_pointers, sizes
from gemmpipe.templates.tiled import Tiled, facts_of, next_power

if TYPE_CHECKING:
    from gemmpipe.space import Space

_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "cache_modifier")
_ROWS = 16
SCALINGS = "scales: none, one an operand, one a row of both, or 1x128 and 128x128 blocks"
"""What is said of scales that these kernels do not apply."""


@dataclass(frozen=True, kw_only=True)
class WholeK(Tiled):
    """No split of K between programs, one order of tiles; its `kernel_type` has the name of its label."""

    overlapping: bool = True
    any_order: bool = True

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return (KIND, "GROUP_SIZE_M", "NUM_KSPLIT", *_KNOBS)

    def check(self, space: "Space") -> None:
        """Nothing: the axes are those of the family's plain kernel, which looks at every value."""

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points of this kernel type."""
        if KIND not in space.axes:
            return ()
        return space.points({**facts_of(spec, device), KIND: self.label})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone."""
        fixed: dict[str, Scalar] = {KIND: self.label, "cache_modifier": "", "GROUP_SIZE_M": 16, "NUM_KSPLIT": 1}
        return {**fixed, **{name: knobs[name] for name in _KNOBS if name in knobs}}

    def knobs_of(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row that names no knobs (aiter's of `skinny`): a few columns of up to 16 rows a program, unmeasured."""
        rows = min(_ROWS, next_power(spec.m))
        for warps in (1, 4, 8):
            sizes = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512, "num_warps": warps, "num_stages": 1}
            knobs = self.normalise(spec, sizes, device)
            if self.misfit(spec, knobs, device) is None:
                return knobs
        return None

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, scales and output."""
        return operand_pointers(spec)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides."""
        return {**sizes(spec, scale_group=SCALE_BLOCK), **LINES}


def scaling(spec: GemmSpec) -> str | None:
    """`none`, `tensor`, `row` or `block`, or None for scales that these kernels do not apply."""
    scales = (spec.x_scale, spec.w_scale)
    if scales == (None, None):
        return "none"
    if spec.x_scale is None or spec.w_scale is None or spec.x_scale.granularity != spec.w_scale.granularity:
        return None
    if spec.x_scale.granularity == "block":
        return "block" if (spec.x_scale.block, spec.w_scale.block) == SCALE_BLOCKS else None
    return spec.x_scale.granularity
