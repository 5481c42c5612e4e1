"""Launch of the warp-specialised block-scaled kernel (_hopper_kernel.py), and constraints of block-scaled kernels."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.core.spec import COLUMN, ROW, scale_order
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.launch.launch import KernelLaunch
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.hopper.constraints import (
    BLOCK_SCALED_MAX_COLUMNS,
    WARPGROUP_M,
    MaxColumns,
    accumulator_width,
    alone_at_own_pace,
    ctas_per_sm,
    in_waves,
    math_warpgroups,
    stage_buffers,
    views_of_parts,
    warpgroup_columns,
)
from gemmpipe.templates.hopper.launch import WarpSpecialised
from gemmpipe.templates.params import (
    BLOCK_SCALED_KNOBS,
    CONSTANT_NK,
    EARLY_COPIES,
    ONE_WARPGROUP,
    OWN_PACE,
    SCALE_BLOCK,
    SCALE_BLOCKS,
    TWO_IN_FLIGHT,
    int_knob,
)
from gemmpipe.templates.tiled import ceil_div, check_scale_order, readable_scale_orders

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

COPIED, FOURS, STRIDED, PANELS = "copied", "fours", "strided", "panels"
"""Load modes of x's scales (see the kernel): by TMA; by two warps, four contiguous scales or one at a time.

With OWN_PACE and tiles of 128 rows or more a warp of its own copies panels: four contiguous scales of each row.
"""
_STRIDE_ARGUMENTS = {
    COPIED: ("scale_stride",),
    FOURS: ("scale_row_stride",),
    STRIDED: ("scale_stride", "scale_row_stride"),
    PANELS: ("scale_row_stride",),
}
"""Strides of x's scales that are arguments; the other is a constant."""
_SINGLE_KERNEL = "gemmpipe.kernels.a8w8_blockscale._hopper_single_kernel:blockscale_single"
_WAVES_KERNEL = "gemmpipe.kernels.a8w8_blockscale._hopper_waves_kernel:blockscale_waves"
_WAVES_REGISTERS = {COPIED: (240, 24), PANELS: (240, 24), STRIDED: (224, 56)}
"""With OWN_PACE and two math warpgroups: registers of their threads, and of others, which may load scales."""
_TWO_IN_FLIGHT_REGISTERS = (224, 56)
"""With TWO_IN_FLIGHT: 2 % faster than with 240 and 24. With one product in 144 columns 6 to 12 % slower (ptxas)."""
_EARLY_LOADER_REGISTERS = 256
"""With EARLY_COPIES: what each of the 256 threads has at the start, so that none gives any back."""
_TWO_IN_FLIGHT_COLUMNS = 128
"""The widest tile of 128 rows of which a thread's registers hold two products and the sums; see own_pace.two_fit."""
_SCALE_LOADER_REGISTERS = 40
"""Registers per thread of the warps that hold eight scales of each of two rows; more would be the math warpgroups'."""


def scale_violation(spec: GemmSpec, block_k: int) -> str | None:
    """`rule: detail` of the first rule on scales that is broken, or None."""
    scaling = tuple(scale.block if scale else None for scale in (spec.x_scale, spec.w_scale))
    if scaling != SCALE_BLOCKS:
        return f"scales: this kernel reads 1x128 and 128x128 blocks, not {scaling}"
    # One pair of scales is applied to a whole K block: a block across two groups would be scaled by the first's.
    if block_k < 1 or SCALE_BLOCK % block_k:
        return f"scale group: BLOCK_SIZE_K={block_k} does not divide {SCALE_BLOCK}"
    return None


def unsupported_reason(spec: GemmSpec, knobs: Knobs, device: Device, layout: str = ROW_MAJOR) -> str | None:
    """`rule: detail` of the first rule broken by a kernel that reads weights in this layout, or None."""
    if reason := scale_violation(spec, int_knob(knobs, "BLOCK_SIZE_K")):
        return reason
    # The unscaled product of a K block takes registers in addition to the accumulator: at 128 registers each, 44 and
    # more spilled in all 96 such configurations (H200, 2026-11-21), and none came within 1.7x of the best.
    return tile_violation(spec, knobs, device, accumulators=2, layout=layout)


def scale_load_modes(spec: GemmSpec) -> tuple[str, ...]:
    """The load modes of x's scales in the memory orders that the product may have."""
    found = {
        ROW: (STRIDED if ceil_div(spec.k, SCALE_BLOCK) % 4 else FOURS,),
        COLUMN: (COPIED,) if spec.m % 4 == 0 else (COPIED, STRIDED),  # columns are padded to fours, or not
    }
    return tuple(dict.fromkeys(each for order in readable_scale_orders(spec, (ROW, COLUMN)) for each in found[order]))


def scale_load_mode(scales: "torch.Tensor") -> str:
    """The load mode of these scales; TMA and loads of four need columns or rows aligned to 16 bytes."""
    (row, block), blocks = scales.stride(), scales.shape[1]
    if scale_order(scales) == COLUMN:
        return STRIDED if block % 4 else COPIED
    return STRIDED if row % 4 or blocks % 4 else FOURS


def _batch(spec: GemmSpec, knobs: Knobs, reading: str) -> int:
    """K blocks per batch: eight if ptxas has the registers for them and K is a multiple of them, else four.

    Eight for tiles of up to 80 columns alone: with 96, with split-K or with warps that load scales they spill (triton
    3.6).
    """
    if reading != COPIED or math_warpgroups(knobs) == 1:
        return 4
    few = accumulator_width(warpgroup_columns(knobs)) < warpgroup_columns(knobs) <= 80
    whole = int_knob(knobs, "NUM_KSPLIT") == 1 and spec.k % (8 * int_knob(knobs, "BLOCK_SIZE_K")) == 0
    return 8 if few and whole else 4


@dataclass(frozen=True, kw_only=True)
class BlockscaleWarpSpecialised(WarpSpecialised):
    """`gluon`: sum and one or two temporaries in registers; the scales of x come through the ring, or from memory."""

    kernel: str = "gemmpipe.kernels.a8w8_blockscale._hopper_kernel:blockscale_warp_specialised"
    max_columns: MaxColumns = replace(BLOCK_SCALED_MAX_COLUMNS, two_waves=128)
    reading: str = COPIED
    """The load mode of x's scales of the build."""

    def scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """Both orders."""
        return (ROW, COLUMN)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that this kernel has."""
        return (*super().knob_names(spec, device), *BLOCK_SCALED_KNOBS)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's; unless OWN_PACE is pinned, without it where this Triton compiles no tile in parts (3.8)."""
        points = super().configs(spec, device, space)
        if views_of_parts() or OWN_PACE in space.pinned:
            return points
        return ({**point, OWN_PACE: False} if point.get(OWN_PACE) else point for point in points)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Further knobs if true: CONSTANT_NK; ONE_WARPGROUP for 64 rows, then also OWN_PACE; OWN_PACE for 128, and for
        256 always; with OWN_PACE and 128 rows TWO_IN_FLIGHT, with OWN_PACE and 64 rows EARLY_COPIES.
        """
        kept = dict(super().normalise(spec, knobs, device))
        kept |= {name: True for name in BLOCK_SCALED_KNOBS if knobs.get(name)}
        rows = int_knob(kept, "BLOCK_SIZE_M")
        if rows > 2 * WARPGROUP_M:
            kept[OWN_PACE] = True
        if rows != WARPGROUP_M:
            kept.pop(ONE_WARPGROUP, None)
        if rows < 2 * WARPGROUP_M and not kept.get(ONE_WARPGROUP):
            kept.pop(OWN_PACE, None)
        if rows != 2 * WARPGROUP_M or not kept.get(OWN_PACE):
            kept.pop(TWO_IN_FLIGHT, None)
        if not alone_at_own_pace(kept):
            kept.pop(EARLY_COPIES, None)
        return kept

    def build(self, spec: GemmSpec, knobs: Knobs, *, halved: bool) -> Build:
        """Of the kernel for these knobs."""
        return WarpSpecialised.build(self._for(knobs), spec, knobs, halved=halved)

    def kernel_name(self, knobs: Knobs) -> str:
        """The function and the hash of its source."""
        return WarpSpecialised.kernel_name(self._for(knobs), knobs)

    def _reading(self, mode: str, knobs: Knobs) -> "BlockscaleWarpSpecialised":
        return replace(self, reading=PANELS if mode == FOURS and in_waves(knobs) else mode)

    def _for(self, knobs: Knobs) -> "BlockscaleWarpSpecialised":
        if alone_at_own_pace(knobs):
            return replace(self, kernel=_SINGLE_KERNEL)
        return replace(self, kernel=_WAVES_KERNEL) if in_waves(knobs) else self

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One for each load mode of x's scales; where tiles may be halved, two for each."""
        modes = (self._reading(each, knobs) for each in scale_load_modes(spec))
        return tuple(build for mode in modes for build in WarpSpecialised.builds(mode, spec, knobs, device))

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """A launch of the build for the memory order of these scales."""
        if inputs.x_scale is None or prepared.weights.w_scale is None:
            raise ValueError("this kernel needs x_scale and w_scale")
        check_scale_order(spec, inputs, self.scale_orders(spec))
        own = self._reading(scale_load_mode(inputs.x_scale), knobs)
        return WarpSpecialised.launch(own, spec, knobs, device, inputs, prepared, out)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if reason := scale_violation(spec, int_knob(knobs, "BLOCK_SIZE_K")):
            return reason
        if in_waves(knobs) and self.layout != ROW_MAJOR:
            return f"{OWN_PACE} or {knobs['BLOCK_SIZE_M']} rows: only for row-major weights, not for this layout"
        if math_warpgroups(knobs) == 1 and self.layout != ROW_MAJOR:
            return f"{ONE_WARPGROUP}: only for row-major weights, not for this layout"
        if reason := super().unsupported_reason(spec, knobs, device):
            return reason
        columns = warpgroup_columns(knobs)
        if knobs.get(TWO_IN_FLIGHT) and columns > _TWO_IN_FLIGHT_COLUMNS:
            return f"{TWO_IN_FLIGHT}: {columns} columns, registers hold two products of up to {_TWO_IN_FLIGHT_COLUMNS}"
        if columns > SCALE_BLOCK + gcd(columns, SCALE_BLOCK):  # a tile begins at a multiple of its columns
            return f"scales: {columns} columns per warpgroup may span three scale blocks, two are loaded"
        return None

    def operands(self, spec: GemmSpec) -> Mapping[str, str]:
        """The weight's scales; before them x's, if TMA does not load them."""
        return {**({} if self.reading == COPIED else {"scales": "*fp32"}), "w_scale_ptr": "*fp32"}

    def sizes(self, spec: GemmSpec) -> tuple[str, ...]:
        """Strides of the scales between rows of w, and between K blocks and rows of x (1 in `constants`, or passed)."""
        return ("w_scale_stride", *_STRIDE_ARGUMENTS[STRIDED])

    def registers(self, knobs: Knobs) -> tuple[int, int]:
        """The loader's are also those of the two scale warps, as Triton allocates warps in fours."""
        if in_waves(knobs):
            return _TWO_IN_FLIGHT_REGISTERS if knobs.get(TWO_IN_FLIGHT) else _WAVES_REGISTERS[self.reading]
        math, loader = super().registers(knobs)
        if knobs.get(EARLY_COPIES) and ctas_per_sm(knobs) == 1:
            return math, _EARLY_LOADER_REGISTERS
        return math, loader if self.reading == COPIED else max(loader, _SCALE_LOADER_REGISTERS)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Constant strides, rows of w per scale, K blocks per batch, the load mode, and further knobs'."""
        strides = {name: 1 for name in _STRIDE_ARGUMENTS[STRIDED] if name not in _STRIDE_ARGUMENTS[self.reading]}
        sizes = {"N": spec.n, "blocks": ceil_div(spec.k, SCALE_BLOCK)} if knobs.get(CONSTANT_NK) else {}
        common = {**strides, "SCALE_BLOCK": SCALE_BLOCK, "BUFFERS": stage_buffers(knobs)}
        if in_waves(knobs):
            return {**common, "READING": self.reading, TWO_IN_FLIGHT: bool(knobs.get(TWO_IN_FLIGHT)), **sizes}
        if alone_at_own_pace(knobs):
            return {**common, "READING": self.reading, EARLY_COPIES: bool(knobs.get(EARLY_COPIES)), **sizes}
        batch, groups = _batch(spec, knobs, self.reading), math_warpgroups(knobs)
        return {**common, "BATCH": batch, "READING": self.reading, "WARPGROUPS": groups, **sizes}

    def boxes(self, spec: GemmSpec, knobs: Knobs) -> dict[str, tuple[str, list[int], object]]:
        """With x's scales, flat, if TMA loads them."""
        if self.reading != COPIED:
            return super().boxes(spec, knobs)
        from triton.experimental.gluon.language import NVMMASharedLayout

        flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        return {**super().boxes(spec, knobs), "scales": ("fp32", [int_knob(knobs, "BLOCK_SIZE_M")], flat)}

    def values(self, spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> Mapping[str, object]:
        """The scales, M-major ones as one row, and their strides."""
        scales, w_scale = inputs.x_scale, prepared.weights.w_scale
        assert scales is not None and w_scale is not None
        (rows, blocks), (row, block) = scales.shape, scales.stride()
        if self.reading == COPIED:
            scales = scales.as_strided(((blocks - 1) * block + rows,), (1,))
        strides = {"scale_stride": block, "scale_row_stride": row // 4 if self.reading in (FOURS, PANELS) else row}
        return {
            "scales": scales,
            "w_scale_ptr": w_scale,
            "w_scale_stride": w_scale.stride(0),
            **{name: strides[name] for name in _STRIDE_ARGUMENTS[self.reading]},
        }
