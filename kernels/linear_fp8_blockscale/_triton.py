"""Launch of the one-launch kernels (_kernel.py): x is quantised within the product, or w is converted to x's type."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.params import (
    AMD_KNOBS,
    KERNEL_TYPE,
    PREFETCH_PARAMETERS,
    SCALE_BLOCK,
    SCHEDULE_PARAMETERS,
    WARP_SPECIALISED_KNOBS,
    WORKSPACE_PARAMETERS,
    int_knob,
    load_constants,
    tile_constants,
)
from gemmpipe.templates.quantise import (
    by_row,
    linear_pointers,
    linear_sizes,
    linear_violation,
    row_scales_violation,
)
from gemmpipe.templates.tiled import TiledKernel, space_facts

if TYPE_CHECKING:
    from gemmpipe.family.space import Space

_MAX_FUSED_ROWS = 64
"""Every column of tiles quantises x again: beyond some rows a launch of its own is cheaper."""


@dataclass(frozen=True, kw_only=True)
class OneLaunch(TiledKernel):
    """A kernel of x in 16 bits and w in fp8; its label is its `kernel_type`. The default space has it for few rows."""

    kernel: str = "gemmpipe.kernels.linear_fp8_blockscale._kernel:linear"
    supports_swap_ab: bool = True
    supports_pdl: bool = True
    quantises: bool
    """True: x is quantised within the product; False: w is converted to x's type (weight-only quantisation)."""

    @property
    def label(self) -> str:  # type: ignore[override]
        """`fused` or `weight_only`."""
        return "fused" if self.quantises else "weight_only"

    def check(self, space: "Space") -> None:
        """Does nothing: the family's plain kernel checks all values of these axes."""

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs of this kernel type; none if it has no such axis."""
        if KERNEL_TYPE not in space.axes:
            return ()
        unused = WARP_SPECIALISED_KNOBS if device.vendor == "amd" else (*AMD_KNOBS, *WARP_SPECIALISED_KNOBS)
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: self.label}, unused)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if reason := linear_violation(spec, knobs, device):
            return reason
        if self.quantises and (reason := row_scales_violation(spec)):
            return reason
        k = int_knob(knobs, "BLOCK_SIZE_K")
        if by_row(spec):
            return tile_violation(spec, knobs, device, accumulators=1)
        if self.quantises and k != SCALE_BLOCK:
            return f"scale group: BLOCK_SIZE_K={k}, x is quantised in blocks of {SCALE_BLOCK} along K"
        if k < 1 or SCALE_BLOCK % k:
            return f"scale group: BLOCK_SIZE_K={k} does not divide {SCALE_BLOCK}"
        # The unscaled product of a K block takes registers in addition to the accumulator. Both operands count with
        # x's 2 bytes per element: w's tile is converted, or x's is held in two types.
        return tile_violation(spec, knobs, device, accumulators=2)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for more rows than pay off and tiles that are mostly padding, or None."""
        if self.quantises and spec.m > _MAX_FUSED_ROWS:
            return f"rows: M={spec.m}, each column of tiles quantises x again; {_MAX_FUSED_ROWS} at most"
        return super().dominated_reason(spec, knobs, device)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, the weight's scales, output and workspace."""
        return {**linear_pointers(spec), **WORKSPACE_PARAMETERS}

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides, the schedule of tiles and the prefetch."""
        return {**linear_sizes(spec), **SCHEDULE_PARAMETERS, **PREFETCH_PARAMETERS}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {
            **tile_constants(knobs),
            "SCALES": "row" if by_row(spec) else "block",
            "SCALE_BLOCK": SCALE_BLOCK,
            "SPLIT_K": knobs["NUM_KSPLIT"] != 1,
            **load_constants(spec, knobs),
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
            "TOP": FP8_MAX[spec.w_dtype] if self.quantises else None,
            "INTERPRETED": self.interpreted(),
        }

    def kernel_name(self, knobs: Knobs) -> str:
        """`linear_fused@3fa9c1d2`, `linear_weight_only_splitk@...`."""
        name = super().kernel_name(knobs)
        return name.replace("linear", f"linear_{self.label}", 1)
