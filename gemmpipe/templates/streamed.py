"""Host side of the streamed kernels (streamed_kernel.py): up to 8 rows, each warp streams its share of w by itself.

Operands are in fp8 or in 16 bits. With x in 16 bits and w in fp8 the kernel quantises x
(kernels/linear_fp8_blockscale/_few_rows.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_MAX, element_bytes
from gemmpipe.templates.constraints import launch_violation
from gemmpipe.templates.params import SCALE_BLOCK, TRITON_TYPES, int_knob, size_arguments
from gemmpipe.templates.quantise import by_row
from gemmpipe.templates.small_m import SCALING_VIOLATION, SmallMKernel, scale_granularity
from gemmpipe.templates.tiled import ceil_div, next_power_of_2

_MAX_ROWS = 8
_COLUMNS = (8, 16, 32)
_MAX_READS, _MAX_QUANTISED_READS = 64, 32
"""Reads of x of a thread, each converted by instructions of its own: up to 20, or 70 that quantise."""
_BLOCK_BYTES = 128
_DEFAULT_ROWS, _DEFAULT_WARPS, _DEFAULT_BLOCKS = 2, 18, 24
"""Without measurements: at most so many rows, warps per multiprocessor, and K blocks per warp."""


def block_elements(spec: GemmSpec) -> int:
    """Elements of a K block: 128 bytes of w."""
    return int(_BLOCK_BYTES // element_bytes(spec.w_dtype))


def blocks_per_warp(spec: GemmSpec, knobs: Knobs) -> int:
    """K blocks of a warp, rounded up."""
    return ceil_div(spec.k, block_elements(spec) * int_knob(knobs, "num_warps"))


def mode(spec: GemmSpec) -> str:
    """The kernel's mode for these operands and scales (streamed_rows.Shape)."""
    if spec.w_dtype in DTYPES_16BIT:
        return TRITON_TYPES[spec.w_dtype]
    if spec.x_dtype in DTYPES_16BIT:
        return f"{TRITON_TYPES[spec.x_dtype]}_to_fp8{'_rows' if by_row(spec) else ''}"
    return "fp8_blocks" if scale_granularity(spec) == "block" else "fp8"


def streamed_shared_bytes(spec: GemmSpec, knobs: Knobs) -> int:
    """Shared memory of a program."""
    from gemmpipe.templates.streamed_kernel import shared_lines  # needs Triton, which families do not

    rows, columns = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "BLOCK_SIZE_N")
    warps, stages = int_knob(knobs, "num_warps"), int_knob(knobs, "num_stages")
    return 1024 * int(shared_lines(rows, columns, warps, stages, blocks_per_warp(spec, knobs), mode(spec)))


def streamed_constants(spec: GemmSpec, knobs: Knobs) -> dict[str, Scalar]:
    """The tile, warps, slots of a ring, K blocks of a warp, and the kernel's mode."""
    return {
        "BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"],
        "BLOCK_SIZE_N": knobs["BLOCK_SIZE_N"],
        "WARPS": knobs["num_warps"],
        "STAGES": knobs["num_stages"],
        "BLOCKS": blocks_per_warp(spec, knobs),
        "MODE": mode(spec),
    }


@dataclass(frozen=True, kw_only=True)
class Streamed(SmallMKernel):
    """`streamed`: a warp's K blocks of w come through a ring of its own; x is kept in shared memory."""

    label = "streamed"
    kernel: str = "gemmpipe.templates.streamed_kernel:streamed"
    supports_pdl: bool = False

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs: a step along K is a block of each warp, and a warp has no more slots than blocks."""
        kept = dict(super().normalise(spec, knobs, device))
        warps = int_knob(kept, "num_warps")
        kept["BLOCK_SIZE_K"] = block_elements(spec) * next_power_of_2(max(1, warps))
        if warps > 0:  # others are refused later
            kept["num_stages"] = min(int_knob(kept, "num_stages"), blocks_per_warp(spec, kept))
        return kept

    def operands_violation(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule on operands that is broken, or None."""
        if reason := launch_violation(spec, knobs, device):
            return reason
        if spec.x_dtype != spec.w_dtype or spec.x_dtype not in (*DTYPES_16BIT, *FP8_MAX):
            return f"operands: {spec.x_dtype} and {spec.w_dtype}, this kernel multiplies fp8 or 16 bits of one type"
        return None if scale_granularity(spec) else SCALING_VIOLATION

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "BLOCK_SIZE_N")
        if device.vendor != "nvidia" and device.kind != "cpu":
            return f"vendor: {device.gfx} has no copies that bypass registers and no 16 x 8 matrix instruction"
        if reason := self.operands_violation(spec, knobs, device):
            return reason
        if n not in _COLUMNS or m > _MAX_ROWS:
            return f"tile: {m}x{n}, a program has {_MAX_ROWS} rows at most, {', '.join(map(str, _COLUMNS))} columns"
        if spec.m > m:
            return f"rows: M={spec.m}, a program has all rows of x, here {m}"
        if spec.n % n or spec.k % block_elements(spec):
            return f"sizes: N={spec.n} and K={spec.k}, multiples of {n} and {block_elements(spec)} are copied whole"
        return self._resources_violation(spec, knobs, device)

    def _resources_violation(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        from gemmpipe.templates.streamed_rows import reads

        m, blocks = int_knob(knobs, "BLOCK_SIZE_M"), blocks_per_warp(spec, knobs)
        if blocks > device.warp_size and mode(spec) == "fp8_blocks":
            return f"blocks: {blocks} of a warp, of which each of {device.warp_size} threads holds one scale"
        count = m * int(reads(blocks, mode(spec)))
        most = _MAX_READS if spec.x_dtype == spec.w_dtype else _MAX_QUANTISED_READS
        if count > most:
            return f"instructions: {count} reads of x by a thread, {most} at most"
        needed = streamed_shared_bytes(spec, knobs)
        if needed > device.shared_bytes:
            return f"shared memory: {needed} bytes, {device.shared_bytes} per block on {device.gfx}"
        return None

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for rows of padding and for warps without a K block, or None."""
        m, warps = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "num_warps")
        if m != next_power_of_2(spec.m):
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        if warps > (blocks := ceil_div(spec.k, block_elements(spec))):
            return f"warps: {warps} for {blocks} blocks along K"
        return None

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """Knobs for a row without any: 16 columns per program, unmeasured."""
        for warps in (8, 16, 4, 2, 1):
            tile: dict[str, Scalar] = {"BLOCK_SIZE_M": next_power_of_2(spec.m), "BLOCK_SIZE_N": 16}
            tile |= {"num_warps": warps, "num_stages": 2}
            knobs = self.normalise(spec, tile, device)
            if self.unsupported_reason(spec, knobs, device) is None:
                return knobs
        return None

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """One or two rows on NVIDIA, where it is ahead on most products (docs/results/kernel_experiments.md).

        Programs of 16 columns: 18 warps per multiprocessor if there are K blocks for them, at most 24 blocks per warp.
        """
        blocks, programs = ceil_div(spec.k, block_elements(spec)), ceil_div(spec.n, 16)
        if spec.m > _DEFAULT_ROWS or device.vendor != "nvidia" or device.kind == "cpu":
            return None
        warps = 16
        while warps > 2 and programs * warps > _DEFAULT_WARPS * device.cu_num:
            warps //= 2
        warps = min(warps, max(2, next_power_of_2(blocks // 2 + 1) // 2))
        while warps < 16 and blocks > _DEFAULT_BLOCKS * warps:
            warps *= 2
        tile: dict[str, Scalar] = {"BLOCK_SIZE_M": next_power_of_2(spec.m), "BLOCK_SIZE_N": 16}
        return self.normalise(spec, {**tile, "num_warps": warps, "num_stages": 3}, device)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides; w is not prefetched."""
        return size_arguments(spec, scale_group=SCALE_BLOCK)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """The tile, and the kind of scales."""
        return {**streamed_constants(spec, knobs), "SCALES": scale_granularity(spec)}
