"""What of a tile a math warpgroup of Hopper's warp-specialised kernels computes, known when they are compiled."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Share(NamedTuple):
    """64 rows by COLUMNS of a tile, from ROW and COLUMN on, for warpgroup GROUP.

    Its sums are held in PARTS tensors [64, WIDTH] of this LAYOUT. DEPTH: elements of K that an instruction takes.
    """

    BLOCK_SIZE_M: gl.constexpr
    BLOCK_SIZE_N: gl.constexpr
    GROUP: gl.constexpr
    ROW: gl.constexpr
    COLUMN: gl.constexpr
    COLUMNS: gl.constexpr
    PARTS: gl.constexpr
    WIDTH: gl.constexpr
    DEPTH: gl.constexpr
    LAYOUT: gl.constexpr

    def mangle(self) -> str:
        """Its part of the name of a function that it is given to."""
        return "share_" + "_".join(str(each.value) for each in self[:-1])


@gluon.constexpr_function
def share_of(group, block_m, block_n, bits):
    """Of two warpgroups: half of the rows of a 128-row tile, or half of the columns of a 64-row tile."""
    columns = block_n if block_m == 128 else block_n // 2
    row, column = (group * 64, 0) if block_m == 128 else (0, group * columns)
    parts, depth = parts_of(columns), 256 // bits
    width = columns // parts
    found = (block_m, block_n, group, row, column, columns, parts, width, depth, accumulator(width, depth))
    return Share(*map(gl.constexpr, found))


@gluon.constexpr_function
def parts_of(columns):
    """Into how many parts a warpgroup's columns are held: one where they are a power of two (see hopper_columns)."""
    return 1 if columns & (columns - 1) == 0 else columns // min(64, columns & -columns)


@gluon.constexpr_function
def accumulator(columns, depth):
    """Where a warpgroup's matrix instruction of so many columns, `depth` elements deep, leaves its sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])
