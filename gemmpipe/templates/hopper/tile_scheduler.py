"""Which piece of a product a program of Hopper's warp-specialised kernels computes, and where its tile lies.

All roles of a program work it out, so that nothing need be handed on; by cheap quotients, as a loader that divided
integers fell behind by 500 clocks a tile (H200, docs/kernels.md).

What of a tile a math warpgroup of Hopper's warp-specialised kernels computes, known when they are compiled.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


class TileSchedule(NamedTuple):
    """The tiles of a product [M, N] and how programs share them: `whole` tiles as they are, the rest in `splits` of K.

    blocks: of K. group_m: rows of tiles that are worked through together (tile_at). The splits of a tile leave their
    parts at parts_ptr and are counted at counters_ptr.
    """

    parts_ptr: gl.tensor
    counters_ptr: gl.tensor
    M: gl.tensor
    N: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    blocks: gl.tensor
    programs: gl.tensor
    group_m: gl.tensor
    whole: gl.tensor
    splits: gl.tensor


class TileCoord(NamedTuple):
    """A piece of work: K blocks `begin` up to `end` of a tile, which are its split number `split`.

    row, column: the first of the tile, or of a warpgroup's share of it.
    """

    tile: gl.tensor
    split: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    row: gl.tensor
    column: gl.tensor


@gluon.jit
def fast_div(number, divisor):
    """number // divisor of a number from 0 up to 2^20 (warp_specialised_tiles.MOST_PIECES), by a reciprocal in fp32.

    The half keeps (number + 1/2) / divisor at least 1 / (2 divisor) away from any whole number, and the reciprocal,
    good to 2 units in the last place, with the product's rounding moves it by less than 2^-21 of itself.
    """
    return ((number.to(gl.float32) + 0.5) * (1.0 / divisor.to(gl.float32))).to(gl.int32)


@gluon.jit
def work_tile_count(work):
    """How many pieces of work: `whole` tiles, then the rest of them in splits."""
    return work.whole + (work.tiles_m * work.tiles_n - work.whole) * work.splits


@gluon.jit
def decode_work_tile(work_id, blocks, whole, splits):
    """(tile, split, first K block, the one after its last) of a piece of work; no split is empty (see normalise)."""
    part = gl.maximum(work_id - whole, 0)
    is_whole = work_id < whole
    tile = fast_div(part, splits)
    split = gl.where(is_whole, 0, part - tile * splits)
    share = gl.where(is_whole, blocks, fast_div(blocks + splits - 1, splits))
    return gl.where(is_whole, work_id, whole + tile), split, split * share, gl.minimum(split * share + share, blocks)


@gluon.jit
def swizzled_tile(t, M, tiles_m, tiles_n, group_m, BLOCK_SIZE_M: gl.constexpr):
    """(first row, column of tiles) of tile t: columns vary slowest within `group_m` rows, so that weights stay in L2.

    The last row tile is moved up to end with the matrix, so that no copy is partial (rows computed twice agree); to a
    multiple of 4, as the coordinate of a copy of fp32 scales must be 16-byte aligned.
    """
    width = group_m * tiles_n
    group = fast_div(t, width)
    first = group * group_m
    rows = gl.minimum(tiles_m - first, group_m)
    within = t - group * width
    tile_n = fast_div(within, rows)
    tile_m = first + within - tile_n * rows
    return gl.minimum(tile_m * BLOCK_SIZE_M, gl.maximum((M - BLOCK_SIZE_M + 3) // 4 * 4, 0)), tile_n


@gluon.jit
def tile_coord(
    work, work_id, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, ROW: gl.constexpr = 0, COLUMN: gl.constexpr = 0
):  # fmt: skip
    """Where a piece of work lies; from this row and column of the tile on."""
    tile, split, begin, end = decode_work_tile(work_id, work.blocks, work.whole, work.splits)
    # Rows computed twice agree to the bit where all tiles are whole, or all in splits; elsewhere no tile is moved up.
    alike = (work.whole == 0) | (work.whole == work.tiles_m * work.tiles_n)
    rows = gl.where(alike, work.M, work.tiles_m * BLOCK_SIZE_M)
    row, tile_n = swizzled_tile(tile, rows, work.tiles_m, work.tiles_n, work.group_m, BLOCK_SIZE_M)
    return TileCoord(tile, split, begin, end, row + ROW, tile_n * BLOCK_SIZE_N + COLUMN)


# mypy: disable-error-code="untyped-decorator,no-untyped-def"


class WarpgroupPartition(NamedTuple):
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
def warpgroup_partition(group, block_m, block_n, bits):
    """Of two warpgroups: half of the rows of a 128-row tile, or half of the columns of a 64-row tile."""
    columns = block_n if block_m == 128 else block_n // 2
    row, column = (group * 64, 0) if block_m == 128 else (0, group * columns)
    parts, depth = accumulator_parts(columns), 256 // bits
    width = columns // parts
    found = (block_m, block_n, group, row, column, columns, parts, width, depth, accumulator_layout(width, depth))
    return WarpgroupPartition(*map(gl.constexpr, found))


@gluon.constexpr_function
def accumulator_parts(columns):
    """Into how many parts a warpgroup's columns are held: one where they are a power of two (see hopper_columns)."""
    return 1 if columns & (columns - 1) == 0 else columns // min(64, columns & -columns)


@gluon.constexpr_function
def accumulator_layout(columns, depth):
    """Where a warpgroup's matrix instruction of so many columns, `depth` elements deep, leaves its sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])
