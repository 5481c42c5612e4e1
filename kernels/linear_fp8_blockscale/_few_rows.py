"""Launches of kernels for few rows that quantise x themselves: _sliced_kernel.py and _streamed_kernel.py."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.templates.params import SCALE_BLOCK, int_knob, load_constants, tile_constants
from gemmpipe.templates.quantise import by_row, linear_pointers, linear_sizes, linear_violation, row_scales_violation
from gemmpipe.templates.small_m import SmallMKernel, sliced_resources_violation
from gemmpipe.templates.streamed import Streamed, streamed_constants

_ROWS = (1, 8, 16)
"""Rows of x of a tile: a single one, or all columns of one or two matrix instructions."""
_MMA_COLUMNS, _MMA_ROWS = 8, 16
_MAX_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class FusedSliced(SmallMKernel):
    """`fused_sliced`: as `sliced`, for x in 16 bits; every slice of a step along K is one scale block of x."""

    label = "fused_sliced"
    kernel: str = "gemmpipe.kernels.linear_fp8_blockscale._sliced_kernel:linear_sliced"
    supports_m_major_scales: bool = False

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (int_knob(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        warps, stages = int_knob(knobs, "num_warps"), int_knob(knobs, "num_stages")
        if reason := linear_violation(spec, knobs, device) or row_scales_violation(spec):
            return reason
        if device.vendor != "nvidia":
            return f"vendor: {device.gfx} has no 16 x 8 matrix instruction and no copies that bypass registers"
        if m not in _ROWS or not _MMA_ROWS <= n <= SCALE_BLOCK:
            return f"tile: {m}x{n}, a program has {', '.join(map(str, _ROWS))} rows, 16 to {SCALE_BLOCK} columns"
        if k != SCALE_BLOCK * warps:
            return f"scale group: BLOCK_SIZE_K={k}, a slice of each of {warps} warps is {SCALE_BLOCK} along K"
        # A warp holds the sum, a step's product, its slice of w in 8 bits and of x in 32.
        columns = max(m, _MMA_COLUMNS)
        held = (2 * columns * n + SCALE_BLOCK * (n // 4 + m)) // device.warp_size
        return sliced_resources_violation(held, fused_sliced_shared_bytes(m, n, warps, stages), device)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for more rows than every program can quantise again and tiles of other rows, or None."""
        m = int_knob(knobs, "BLOCK_SIZE_M")
        if spec.m > _MAX_ROWS:
            return f"rows: M={spec.m}, programs of few columns quantise {_MAX_ROWS} at most"
        if m != next(rows for rows in _ROWS if rows >= spec.m):
            return f"tile: {m} rows for M={spec.m}, as few as hold all of them are faster"
        return None

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, the weight's scales and output."""
        return linear_pointers(spec)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides; w is not prefetched."""
        return linear_sizes(spec)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {
            **tile_constants(knobs),
            "SLICES": knobs["num_warps"],
            "SCALE_BLOCK": SCALE_BLOCK,
            "TOP": FP8_MAX[spec.w_dtype],
            "INTERPRETED": self.interpreted(),
            **load_constants(spec, knobs),
            "STAGES": knobs["num_stages"],
        }


def fused_sliced_shared_bytes(m: int, n: int, slices: int, stages: int) -> int:
    """Estimated shared memory, at least the compiler's: a ring of all loads, then the slices' sums.

    A single row also goes through shared memory, in 16 bits, to the registers of the matrix instruction's operand.
    """
    columns = max(m, _MMA_COLUMNS)
    stage = slices * (SCALE_BLOCK * (2 * m + n) + 4)
    exchanged = 2 * columns * SCALE_BLOCK * slices if m == 1 else 0
    return max(max(stages - 1, 1) * stage + exchanged, 4 * slices * columns * n) + 1024


@dataclass(frozen=True, kw_only=True)
class FusedStreamed(Streamed):
    """`fused_streamed`: as `streamed`, for x in 16 bits, which every warp quantises before it multiplies.

    With scales of rows the warps of a program exchange the greatest values of their shares of each row first.
    """

    label = "fused_streamed"
    kernel: str = "gemmpipe.kernels.linear_fp8_blockscale._streamed_kernel:linear_streamed"
    supports_m_major_scales: bool = False

    def operands_violation(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule on operands that is broken, or None."""
        return linear_violation(spec, knobs, device)

    def default_config(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """As the product's; scales of rows are not measured."""
        return None if by_row(spec) else super().default_config(spec, device)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, the weight's scales and output."""
        return linear_pointers(spec)

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides."""
        return linear_sizes(spec)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """The tile, the kind of scales, and the greatest value of w's type."""
        scales = "channel" if by_row(spec) else "block"
        return {**streamed_constants(spec, knobs), "SCALES": scales, "TOP": FP8_MAX[spec.w_dtype]}
