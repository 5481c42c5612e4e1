"""Launching the sliced-K kernel: its parameters, in the order of its signature, and what fits."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import integer
from gemmpipe.templates.dense import int8_misfit
from gemmpipe.templates.fits import common_misfit
from gemmpipe.templates.signature import SCALE_BLOCK, loads, sizes, tile_sizes
from gemmpipe.templates.tiled import next_power
from gemmpipe.templates.whole_k import SCALINGS, WholeK, scaling

_WIDE, _NARROW = 16, 8
"""Rows and columns of one warp's matrix instruction."""
_MOST_ROWS = 32
_MOST_HELD = 192
"""Registers a thread for sums and operands: 176 became 226 or 242, from 224 on some spilled (60 builds, triton 3.6)."""


@dataclass(frozen=True, kw_only=True)
class Sliced(WholeK):
    """`sliced`: few rows on the tensor cores, every step along K sliced between the warps of a program.

    BLOCK_SIZE_K is a step of all slices, of which there are as many as warps.
    """

    label = "sliced"
    kernel: str = "gemmpipe.templates.sliced_kernel:sliced"

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        warps, stages = integer(knobs, "num_warps"), integer(knobs, "num_stages")
        if reason := common_misfit(spec, knobs, device) or int8_misfit(spec):
            return reason
        if device.vendor != "nvidia":
            return f"vendor: a matrix instruction of 16 x 8 and copies that pass registers by, {device.gfx} has neither"
        if scaling(spec) is None:
            return SCALINGS
        depth, least = k // warps, int(32 / element_bytes(spec.x_dtype))
        if min(m, n) < _NARROW or max(m, n) < _WIDE or depth < least:
            return f"minimum tile: {m}x{n}x{depth} a warp, its matrix instruction takes 16x8x{least} or 8x16x{least}"
        if scaling(spec) == "block" and (n > SCALE_BLOCK or depth > SCALE_BLOCK):
            return f"scale group: {n} columns and {depth} along K a slice, one scale is applied to the product of both"
        # A warp holds the whole tile: its sum, by blocks a step's product beside it, and its slice of both operands.
        sums = (2 if scaling(spec) == "block" else 1) * m * n // device.warp_size
        held = sums + int((m + n) * depth * element_bytes(spec.x_dtype)) // (4 * device.warp_size)
        if held > _MOST_HELD:
            return f"registers: {held} a thread for sums and operands, beyond {_MOST_HELD} the compiler spills"
        needed = shared_bytes(spec, m, n, k, warps, stages)
        if needed > device.shared_bytes:
            return f"shared memory: about {needed} bytes, {device.shared_bytes} a block on {device.gfx}"
        return None

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """More rows than can be read again by every program, and tiles that are mostly padding."""
        m = integer(knobs, "BLOCK_SIZE_M")
        # A program reads all of its rows of x for few of w: beyond these x is the greater part of what it reads.
        if spec.m > _MOST_ROWS:
            return f"rows: M={spec.m}, programs of few columns read {_MOST_ROWS} at most"
        if m > max(_NARROW, next_power(spec.m)) and not (m == _WIDE and integer(knobs, "BLOCK_SIZE_N") == _NARROW):
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        return None

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes and row strides; nothing of w is asked for ahead."""
        return sizes(spec, scale_group=SCALE_BLOCK)

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            **tile_sizes(knobs),
            "SLICES": knobs["num_warps"],
            "SCALES": scaling(spec),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SWAP_AB": integer(knobs, "BLOCK_SIZE_N") >= _WIDE,
            "UPCAST": spec.x_dtype == "bfloat16" and self.interpreted(),
            **loads(spec, knobs),
            "STAGES": knobs["num_stages"],
        }


def shared_bytes(spec: GemmSpec, m: int, n: int, k: int, slices: int, stages: int) -> int:
    """At most a few kB more than the compiler will ask for: a ring of all that is loaded, then the slices' sums."""
    scales = 4 * slices * (m + 1) if scaling(spec) == "block" else 0
    stage = int((m + n) * k * element_bytes(spec.x_dtype)) + scales
    return max(max(stages - 1, 1) * stage, 4 * slices * m * n) + 1024
