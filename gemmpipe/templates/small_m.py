"""Host side of the kernels for few rows (small M); their programs take all of K (no split-K).

`Skinny` multiplies on the CUDA cores (`SkinnyPreshuffled`: with a weight in 16 x 16 tiles), `Sliced` on the tensor
cores with K sliced between the warps of a program (slice-K). The kernels are in small_m_kernels.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import element_bytes
from gemmpipe.family.layouts import TILES_16X16
from gemmpipe.templates.constraints import launch_violation
from gemmpipe.templates.dense import int32_overflow_violation
from gemmpipe.templates.params import (
    KERNEL_TYPE,
    PREFETCH_PARAMETERS,
    SCALE_BLOCK,
    SCALE_BLOCKS,
    SWAP_AB,
    TILED_AXES,
    check_axes,
    int_knob,
    load_constants,
    operand_pointers,
    size_arguments,
    tile_constants,
)
from gemmpipe.templates.tiled import TiledKernel, next_power_of_2, space_facts

if TYPE_CHECKING:
    from gemmpipe.family.space import Space


_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "cache_modifier")
_SKINNY_MAX_ROWS = 16
_HALF, _DEPTH = 8, 16
"""Columns and bytes along K that the skinny kernel of weights in tiles reads as one piece."""
_SLICED_MAX_ROWS = 32
_MMA_M, _MMA_N = 16, 8
"""Rows and columns of one warp's matrix instruction."""
_MAX_REGISTERS = 192
"""Per thread for sums and operands: 176 became 226 or 242, from 224 on some spilled (60 builds, triton 3.6)."""
SCALING_VIOLATION = "scales: none, one per operand, one per row of both, or 1x128 and 128x128 blocks"
"""The reason for scales that these kernels do not apply."""


@dataclass(frozen=True, kw_only=True)
class SmallMKernel(TiledKernel):
    """A kernel without split-K and with one order of tiles; its `kernel_type` is its label."""

    supports_pdl: bool = True
    supports_m_major_scales: bool = True

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that this kernel has."""
        return (KERNEL_TYPE, "GROUP_SIZE_M", "NUM_KSPLIT", *_KNOBS)

    def check(self, space: "Space") -> None:
        """Raises UserError for an unknown axis, one that is missing, or a value out of range."""
        check_axes(space, (*TILED_AXES, SWAP_AB))

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs of this kernel type."""
        if KERNEL_TYPE not in space.axes:
            return ()
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: self.label})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone."""
        fixed: dict[str, Scalar] = {KERNEL_TYPE: self.label, "cache_modifier": "", "GROUP_SIZE_M": 16, "NUM_KSPLIT": 1}
        return {**fixed, **{name: knobs[name] for name in _KNOBS if name in knobs}}

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """Knobs for a row without any (aiter's of `skinny`): four columns of up to 16 rows per program, unmeasured."""
        tile = {"BLOCK_SIZE_M": min(_SKINNY_MAX_ROWS, next_power_of_2(spec.m)), "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512}
        for warps in (1, 4, 8):
            knobs = self.normalise(spec, {**tile, "num_warps": warps, "num_stages": 1}, device)
            if self.unsupported_reason(spec, knobs, device) is None:
                return knobs
        return None

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, scales and output."""
        return operand_pointers(spec)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides and the prefetch."""
        return {**size_arguments(spec, scale_group=SCALE_BLOCK), **PREFETCH_PARAMETERS}


def scale_granularity(spec: GemmSpec) -> str | None:
    """`none`, `tensor`, `row` or `block`, or None for scales that these kernels do not apply."""
    scales = (spec.x_scale, spec.w_scale)
    if scales == (None, None):
        return "none"
    if spec.x_scale is None or spec.w_scale is None or spec.x_scale.granularity != spec.w_scale.granularity:
        return None
    if spec.x_scale.granularity == "block":
        return "block" if (spec.x_scale.block, spec.w_scale.block) == SCALE_BLOCKS else None
    return spec.x_scale.granularity


@dataclass(frozen=True, kw_only=True)
class Skinny(SmallMKernel):
    """`skinny`: up to 16 rows on the CUDA cores, no split of K between programs."""

    label = "skinny"
    kernel: str = "gemmpipe.templates.small_m_kernels:skinny"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (int_knob(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        if reason := launch_violation(spec, knobs, device):
            return reason
        if scale_granularity(spec) is None:
            return SCALING_VIOLATION
        if scale_granularity(spec) == "block" and (n > SCALE_BLOCK or k < SCALE_BLOCK):
            return f"scale group: {n} columns and {k} along K, a program reads whole K blocks of one row of scales"
        # Weights and products are fp32 in registers.
        held = (1 + m) * n * k // (int_knob(knobs, "num_warps") * device.warp_size)
        if held > 256:
            return f"registers: {held} values per thread, 256 leave room for addresses"
        return None

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for more rows than the CUDA cores keep up with and tiles mostly of padding, or None."""
        m = int_knob(knobs, "BLOCK_SIZE_M")
        # M products per weight: beyond 16 rows no memory is slow enough to hide them.
        if spec.m > _SKINNY_MAX_ROWS:
            return f"rows: M={spec.m}, the CUDA cores keep up with {_SKINNY_MAX_ROWS} at most"
        if m >= 2 * spec.m:
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        return None

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """One row of 16 bits on NVIDIA, where it was measured ahead of the plain kernel (docs/results.md)."""
        if spec.m != 1 or scale_granularity(spec) != "none" or device.vendor != "nvidia":
            return None
        sizes = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512, "num_warps": 1, "num_stages": 1}
        return self.normalise(spec, sizes, device)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {
            **tile_constants(knobs),
            "SCALES": scale_granularity(spec),
            "SCALE_BLOCK": SCALE_BLOCK,
            **load_constants(spec, knobs),
            "STAGES": knobs["num_stages"],
        }


@dataclass(frozen=True, kw_only=True)
class SkinnyPreshuffled(Skinny):
    """`skinny`: up to 16 rows on the CUDA cores."""

    kernel: str = "gemmpipe.templates.small_m_kernels:skinny_tiles"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (int_knob(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        if reason := launch_violation(spec, knobs, device, layout=TILES_16X16):
            return reason
        if scale_granularity(spec) is None:
            return SCALING_VIOLATION
        if n < _HALF or k < _DEPTH or n > SCALE_BLOCK:
            return f"tile: {n} columns and {k} along K, a program reads pieces of 8 x 16 bytes with one scale"
        # A thread's pieces of 16 bytes: of each row of x and one of w, as numbers, and a sum for each pair.
        pieces = _HALF * k // (_DEPTH * int_knob(knobs, "num_warps") * device.warp_size)
        held = max(pieces, 1) * (16 * (m + 1) + m * n // _HALF)
        if held > 256:
            return f"registers: {held} values per thread, 256 leave room for addresses"
        # Pipelined loads wait in shared memory, where 8 threads' pieces of x are 8 copies.
        ahead = (int_knob(knobs, "num_stages") - 1) * (_HALF * m + n + 4) * k
        if ahead > device.shared_bytes:
            return f"shared memory: about {ahead} bytes, {device.shared_bytes} per block on {device.gfx}"
        return None


@dataclass(frozen=True, kw_only=True)
class Sliced(SmallMKernel):
    """`sliced`: few rows on the tensor cores, every step along K sliced between the warps of a program (slice-K).

    BLOCK_SIZE_K is the step of all slices together, one slice per warp.
    """

    label = "sliced"
    kernel: str = "gemmpipe.templates.small_m_kernels:sliced"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (int_knob(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        warps, stages = int_knob(knobs, "num_warps"), int_knob(knobs, "num_stages")
        if reason := launch_violation(spec, knobs, device) or int32_overflow_violation(spec):
            return reason
        if device.vendor != "nvidia":
            return f"vendor: {device.gfx} has no 16 x 8 matrix instruction and no copies that bypass registers"
        if scale_granularity(spec) is None:
            return SCALING_VIOLATION
        depth, least = k // warps, int(32 / element_bytes(spec.x_dtype))
        if min(m, n) < _MMA_N or max(m, n) < _MMA_M or depth < least:
            return f"minimum tile: {m}x{n}x{depth} per warp, its matrix instruction takes 16x8x{least} or 8x16x{least}"
        if scale_granularity(spec) == "block" and (n > SCALE_BLOCK or depth > SCALE_BLOCK):
            return f"scale group: {n} columns and {depth} along K per slice, one scale is applied to the product"
        # A warp holds the whole tile: its sum, with block scales also a step's product, and its slice of both operands.
        sums = (2 if scale_granularity(spec) == "block" else 1) * m * n // device.warp_size
        held = sums + int((m + n) * depth * element_bytes(spec.x_dtype)) // (4 * device.warp_size)
        return sliced_resources_violation(held, sliced_shared_bytes(spec, m, n, k, warps, stages), device)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for more rows than every program can read again and tiles mostly of padding, or None."""
        m = int_knob(knobs, "BLOCK_SIZE_M")
        # A program reads all of its rows of x for few rows of w: beyond the limit most of its traffic is x.
        if spec.m > _SLICED_MAX_ROWS:
            return f"rows: M={spec.m}, programs of few columns read {_SLICED_MAX_ROWS} at most"
        if m > max(_MMA_N, next_power_of_2(spec.m)) and not (m == _MMA_M and int_knob(knobs, "BLOCK_SIZE_N") == _MMA_N):
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        return None

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides; w is not prefetched."""
        return size_arguments(spec, scale_group=SCALE_BLOCK)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {
            **tile_constants(knobs),
            "SLICES": knobs["num_warps"],
            "SCALES": scale_granularity(spec),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SWAP_AB": int_knob(knobs, "BLOCK_SIZE_N") >= _MMA_M,
            "UPCAST": spec.x_dtype == "bfloat16" and self.interpreted(),
            **load_constants(spec, knobs),
            "STAGES": knobs["num_stages"],
        }


def sliced_resources_violation(registers: int, shared_bytes: int, device: Device) -> str | None:
    """`rule: detail` for so many registers per thread and so much shared memory of a program, or None."""
    if registers > _MAX_REGISTERS:
        return f"registers: {registers} per thread for sums and operands, beyond {_MAX_REGISTERS} the compiler spills"
    if shared_bytes > device.shared_bytes:
        return f"shared memory: about {shared_bytes} bytes, {device.shared_bytes} per block on {device.gfx}"
    return None


def sliced_shared_bytes(spec: GemmSpec, m: int, n: int, k: int, slices: int, stages: int) -> int:
    """Estimated shared memory, at most a few kB above the compiler's: a ring of all loads, then the slices' sums."""
    scales = 4 * slices * (m + 1) if scale_granularity(spec) == "block" else 0
    stage = int((m + n) * k * element_bytes(spec.x_dtype)) + scales
    return max(max(stages - 1, 1) * stage, 4 * slices * m * n) + 1024
