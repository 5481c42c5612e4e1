"""Waves: 64 rows of x that a warpgroup multiplies by a slot of w, one wave after the other.

A tile of 256 rows has two waves for each of the two warpgroups: it copies a quarter fewer bytes than two tiles of 128
rows, as both waves read the same slot of w. All tiles here have sums in parts (wgmma_any_n.py), those with a power of
two of columns too: the parts of both waves are one tuple, the first wave's before the second's. Written in Gluon, which
has no interpreter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gemmpipe.templates.hopper.gluon_compat import tma_store
from gemmpipe.templates.hopper.tile_scheduler import WarpgroupPartition, accumulator_layout, branching_swizzled_tile

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def wave_part_columns(columns):
    """Columns of a part: the greatest power of two that divides them, 64 or half of them at most."""
    return min(64, columns // 2, columns & -columns)


@gluon.constexpr_function
def wave_count(block_m):
    """Waves of a warpgroup: a tile's rows over 64 and two warpgroups; a tile of 64 rows has one warpgroup."""
    return max(1, block_m // 128)


@gluon.constexpr_function
def wave_partition(group, block_m, block_n, bits):
    """A warpgroup's share of a tile: all columns of its waves, of which ROW is the first's first row."""
    width, depth = wave_part_columns(block_n), 256 // bits
    row = group * 64 * wave_count(block_m)
    layout = accumulator_layout(width, depth)
    found = (block_m, block_n, group, row, 0, block_n, block_n // width, width, depth, layout)
    return WarpgroupPartition(*map(gl.constexpr, found))


class Half(NamedTuple):
    """The waves of a tile that a work tile has: 2, or for half of a tile 1, the second one if `second` is 1."""

    waves: gl.tensor
    second: gl.tensor


class WholeTiles(NamedTuple):
    """The tiles of a product [M, N], none of them split along K; the fields are those of tile_scheduler.TileSchedule.

    Fewer than there: a math warpgroup keeps them in registers, of which it has few left. whole: None if there are no
    halves of tiles.
    """

    M: gl.tensor
    N: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    blocks: gl.tensor
    programs: gl.tensor
    group_m: gl.tensor
    whole: gl.tensor


@gluon.jit
def wave_work_count(work):
    """The number of work tiles: all tiles, of which those after `whole` ones count twice."""
    tiles = work.tiles_m * work.tiles_n
    if work.whole is not None:
        tiles += tiles - work.whole
    return tiles


@gluon.jit
def tile_or_half(work, work_id):
    """(tile, Half) of a work tile."""
    rest = work_id - work.whole
    is_half = rest >= 0
    tile = gl.where(is_half, work.whole + rest // 2, work_id)
    return tile, Half(gl.where(is_half, 1, 2), gl.where(is_half, rest % 2, 0))


@gluon.jit
def whole_tile_place(work, work_id, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr):
    """(first row, first column) of a tile, as tile_scheduler.tile_coord."""
    row, tile_n = branching_swizzled_tile(work_id, work.M, work.tiles_m, work.tiles_n, work.group_m, BLOCK_SIZE_M)
    return row, tile_n * BLOCK_SIZE_N


@gluon.jit
def store_waves(sums, wg, out, stage, row, column, half, WAVES: gl.constexpr):
    """Store the sums of a tile's waves, whose share for this warpgroup begins at (row, column); see store_warp.py.

    With fewer buffers of `stage` than parts the parts take them in turn: while one is copied to memory, the next is
    filled. half: a Half, whose single wave has the first sums, or None.
    """
    PARTS: gl.constexpr = WAVES * wg.PARTS
    if half is None:
        _store_parts(sums, wg, out, stage, row, column, 0, PARTS)
    else:
        _store_parts(sums, wg, out, stage, row, column, 0, wg.PARTS)
        if half.waves > 1:
            _store_parts(sums, wg, out, stage, row, column, wg.PARTS, PARTS)


@gluon.jit
def _store_parts(sums, wg, out, stage, row, column, BEGIN: gl.constexpr, END: gl.constexpr):
    BUFFERS: gl.constexpr = stage.shape[0] // 2
    for i in gl.static_range(BEGIN, END):
        buffer = stage.index(wg.GROUP * BUFFERS + i % BUFFERS)
        tma.store_wait(BUFFERS - 1)  # the copy that began as many copies ago has read its buffer
        buffer.store(sums[i].to(buffer.dtype))
        fence_async_shared()
        tma_store(out, [row + i // wg.PARTS * 64, column + i % wg.PARTS * wg.WIDTH], buffer)
