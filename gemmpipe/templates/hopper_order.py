"""Which piece of a product a program of Hopper's warp-specialised kernels computes, and where its tile lies.

All roles of a program work it out, so that nothing need be handed on; by cheap quotients, as a loader that divided
integers fell behind by 500 clocks a tile (H200, docs/kernels.md).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def quotient(number, divisor):
    """number // divisor of a number from 0 up to 2^20 (warp_specialised_tiles.MOST_PIECES), by a reciprocal in fp32.

    The half keeps (number + 1/2) / divisor at least 1 / (2 divisor) away from any whole number, and the reciprocal,
    good to 2 units in the last place, with the product's rounding moves it by less than 2^-21 of itself.
    """
    return ((number.to(gl.float32) + 0.5) * (1.0 / divisor.to(gl.float32))).to(gl.int32)


@gluon.jit
def pieces_of(tiles, whole, splits):
    """How many pieces of work: `whole` tiles, then the rest of them in splits."""
    return whole + (tiles - whole) * splits


@gluon.jit
def piece_at(piece, blocks, whole, splits):
    """(tile, split, first K block, the one after its last) of a piece of work; no split is empty (see normalise)."""
    part = gl.maximum(piece - whole, 0)
    is_whole = piece < whole
    tile = quotient(part, splits)
    split = gl.where(is_whole, 0, part - tile * splits)
    share = gl.where(is_whole, blocks, quotient(blocks + splits - 1, splits))
    return gl.where(is_whole, piece, whole + tile), split, split * share, gl.minimum(split * share + share, blocks)


@gluon.jit
def tile_at(t, M, tiles_m, tiles_n, group_m, BLOCK_SIZE_M: gl.constexpr):
    """(first row, column of tiles) of tile t: columns vary slowest within `group_m` rows, so that weights stay in L2.

    The last row tile is moved up to end with the matrix, so that no copy is partial (rows computed twice agree); to a
    multiple of 4, as the coordinate of a copy of fp32 scales must be 16-byte aligned.
    """
    width = group_m * tiles_n
    group = quotient(t, width)
    first = group * group_m
    rows = gl.minimum(tiles_m - first, group_m)
    within = t - group * width
    tile_n = quotient(within, rows)
    tile_m = first + within - tile_n * rows
    return gl.minimum(tile_m * BLOCK_SIZE_M, gl.maximum((M - BLOCK_SIZE_M + 3) // 4 * 4, 0)), tile_n


@gluon.jit
def place_of(piece, M, tiles_m, tiles_n, blocks, group_m, whole, splits, BLOCK_SIZE_M: gl.constexpr):
    """(tile, split, first K block, the one after its last, first row, column of tiles) of a piece of work."""
    t, split, begin, end = piece_at(piece, blocks, whole, splits)
    # Rows computed twice agree to the bit where all tiles are whole, or all in splits; elsewhere no tile is moved up.
    alike = (whole == 0) | (whole == tiles_m * tiles_n)
    rows = gl.where(alike, M, tiles_m * BLOCK_SIZE_M)
    row, tile_n = tile_at(t, rows, tiles_m, tiles_n, group_m, BLOCK_SIZE_M)
    return t, split, begin, end, row, tile_n
