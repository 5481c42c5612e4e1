"""Tile scheduler of Hopper's warp-specialised kernels: the work tiles of a program, and a warpgroup's share of a tile.

A work tile is a whole tile, or one split of K of a tile. All roles of a program compute its coordinates, so that none
passes them to another; by cheap quotients, as a loader that divided integers fell behind by 500 clocks per tile (H200,
docs/explanation/kernels.md). Written in Gluon, which has no interpreter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


class TileSchedule(NamedTuple):
    """The tiles of a product [M, N] and their schedule: `whole` tiles as they are, the rest in `splits`, mostly of K.

    blocks: K blocks. group_m: rows of tiles per group (swizzled_tile). The splits of a tile store their parts at
    parts_ptr and are counted at counters_ptr. splits: None in a kernel without splits, which saves two quotients.
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
    """A work tile: K blocks `begin` up to `end` of a tile, its split number `split`.

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
    """number // divisor of a number from 0 up to 2^20 (constraints.MAX_WORK_TILES), by a reciprocal in fp32.

    The half keeps (number + 1/2) / divisor at least 1 / (2 divisor) away from any whole number; the error of the
    reciprocal (2 units in the last place) and the product's rounding are less than 2^-21 of it.
    """
    return ((number.to(gl.float32) + 0.5) * (1.0 / divisor.to(gl.float32))).to(gl.int32)


@gluon.jit
def work_tile_count(work):
    """The number of work tiles: `whole` tiles, then the splits of the rest."""
    tiles = work.tiles_m * work.tiles_n
    if work.splits is not None:
        tiles = work.whole + (tiles - work.whole) * work.splits
    return tiles


@gluon.jit
def decode_work_tile(work_id, blocks, whole, splits):
    """(tile, split, first K block, end of the K blocks) of a work tile; no split is empty (see normalise)."""
    part = gl.maximum(work_id - whole, 0)
    is_whole = work_id < whole
    tile = fast_div(part, splits)
    split = gl.where(is_whole, 0, part - tile * splits)
    share = gl.where(is_whole, blocks, fast_div(blocks + splits - 1, splits))
    return gl.where(is_whole, work_id, whole + tile), split, split * share, gl.minimum(split * share + share, blocks)


@gluon.jit
def swizzled_tile(t, M, tiles_m, tiles_n, group_m, BLOCK_SIZE_M: gl.constexpr):
    """(first row, column of tiles) of tile t: columns vary slowest within `group_m` rows, so that weights stay in L2.

    The last row tile is moved up to end with the matrix, so that no copy is partial (rows computed twice agree), to a
    multiple of 4, as the coordinate of a TMA copy of fp32 scales must be 16-byte aligned.
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
def branching_swizzled_tile(t, M, tiles_m, tiles_n, group_m, BLOCK_SIZE_M: gl.constexpr):
    """swizzled_tile without a quotient for one row of tiles, and with a single one for one group of rows.

    The first copy of a program waits for its first tile's place (docs/results/kernel_experiments.md).
    """
    if tiles_m == 1:
        row, tile_n = tiles_m - 1, t
    elif tiles_m <= group_m:
        tile_n = fast_div(t, tiles_m)
        tile_m = t - tile_n * tiles_m
        row = gl.minimum(tile_m * BLOCK_SIZE_M, gl.maximum((M - BLOCK_SIZE_M + 3) // 4 * 4, 0))
    else:
        row, tile_n = swizzled_tile(t, M, tiles_m, tiles_n, group_m, BLOCK_SIZE_M)
    return row, tile_n


@gluon.jit
def tile_coord(
    work, work_id, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, ROW: gl.constexpr = 0,
    COLUMN: gl.constexpr = 0, HALVES: gl.constexpr = False, BRANCHING: gl.constexpr = False,
):  # fmt: skip
    """The TileCoord of a work tile, from this row and column of the tile on.

    HALVES: the splits are halves of a tile's rows (waves.py), with all K blocks. BRANCHING: the place by
    branching_swizzled_tile, which kernels without splits always use.
    """
    if work.splits is None:
        tile, split, begin, end, rows = work_id, 0, 0, work.blocks, work.M
    else:
        tile, split, begin, end = decode_work_tile(work_id, work.blocks, work.whole, work.splits)
        # Rows computed twice agree to the bit if all tiles are whole, or all are split; else no tile is moved up.
        alike = (work.whole == 0) | (work.whole == work.tiles_m * work.tiles_n)
        rows = gl.where(alike, work.M, work.tiles_m * BLOCK_SIZE_M)
        if HALVES:
            begin, end, rows = 0, work.blocks, work.M
    if BRANCHING or work.splits is None:
        row, tile_n = branching_swizzled_tile(tile, rows, work.tiles_m, work.tiles_n, work.group_m, BLOCK_SIZE_M)
    else:
        row, tile_n = swizzled_tile(tile, rows, work.tiles_m, work.tiles_n, work.group_m, BLOCK_SIZE_M)
    return TileCoord(tile, split, begin, end, row + ROW, tile_n * BLOCK_SIZE_N + COLUMN)


class WarpgroupPartition(NamedTuple):
    """Warpgroup GROUP's share of a tile: 64 rows by COLUMNS, from ROW and COLUMN on; known at compile time.

    Its sums are PARTS tensors [64, WIDTH] of this LAYOUT. DEPTH: elements of K per instruction.
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
        """Its part of the mangled name of a function that takes it."""
        return "share_" + "_".join(str(each.value) for each in self[:-1])


@gluon.constexpr_function
def warpgroup_partition(group, block_m, block_n, bits):
    """For one of two warpgroups: half of the rows of a 128-row tile, or half of the columns of a 64-row tile."""
    columns = block_n if block_m == 128 else block_n // 2
    row, column = (group * 64, 0) if block_m == 128 else (0, group * columns)
    return _partition(group, block_m, block_n, row, column, columns, bits)


@gluon.constexpr_function
def single_warpgroup_partition(block_n, bits):
    """For the only warpgroup: a whole tile of 64 rows."""
    return _partition(0, 64, block_n, 0, 0, block_n, bits)


@gluon.constexpr_function
def _partition(group, block_m, block_n, row, column, columns, bits):
    parts, depth = accumulator_parts(columns), 256 // bits
    width = columns // parts
    found = (block_m, block_n, group, row, column, columns, parts, width, depth, accumulator_layout(width, depth))
    return WarpgroupPartition(*map(gl.constexpr, found))


@gluon.constexpr_function
def accumulator_parts(columns):
    """The number of parts of a warpgroup's columns: 1 for a power of two (see wgmma_any_n.py)."""
    return 1 if columns & (columns - 1) == 0 else columns // min(64, columns & -columns)


@gluon.constexpr_function
def accumulator_layout(columns, depth):
    """The register layout of the sums of a warpgroup's matrix instruction, `columns` wide and `depth` elements deep."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])
