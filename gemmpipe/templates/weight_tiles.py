"""Device functions that read a tile of the weight: row-major, or 16 x 16 tiles of bytes (SHUFFLED, see layouts.py).

Tiles of the same 16 columns follow one another along K: what a program reads of them is one contiguous run. Read so, a
warp has whole lines; read as [K, N], 16 bytes a thread, it touches two sectors of each of eight lines.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import load_k, offsets, overlap, rows_of


@triton.jit
def weight_at(tile_n, columns, ks, N, stride, SHUFFLED: tl.constexpr):
    """Elements from a tile's first column of w to its [K, N]; SHUFFLED: to its [N / 16, K * 16] as it lies."""
    if SHUFFLED:
        _, runs = rows_of(tile_n, N // 16, columns.shape[0] // 16)
        at = offsets(runs * 16, stride)[:, None] + tl.arange(0, ks.shape[0] * 16)[None, :]
    else:
        at = offsets(columns, stride)[None, :] + ks[:, None]
    return at


@triton.jit
def load_weight(ptrs, ks, left, EVEN_K: tl.constexpr, CACHE: tl.constexpr, SHUFFLED: tl.constexpr):
    """[K, N] of what lies at the pointers of `weight_at`; 0 where its place along K is not below `left`."""
    if SHUFFLED:
        RUNS: tl.constexpr = ptrs.shape[0]
        DEPTH: tl.constexpr = ptrs.shape[1] // 256
        w = load_k(ptrs, (tl.arange(0, DEPTH * 256) // 256 * 16)[None, :], left, EVEN_K, CACHE)
        w = tl.permute(tl.reshape(w, (RUNS, DEPTH, 16, 16)), (1, 3, 0, 2))
        w = tl.reshape(w, (DEPTH * 16, RUNS * 16))
    else:
        w = load_k(ptrs, ks[:, None], left, EVEN_K, CACHE)
    return w


@triton.jit
def overlap_tiles(w_ptr, columns, stride, lines):
    """As tiles.overlap for a weight in tiles: as many lines a column, but those of 16 columns lie in one run."""
    LINE: tl.constexpr = 128
    starts = offsets(columns // 16 * 16, stride) + columns % 16 * (lines * LINE)
    overlap(w_ptr, starts, 1, lines * LINE, lines)


@triton.jit
def overlap_weight(w_ptr, columns, stride, left, lines, SHUFFLED: tl.constexpr):
    """tiles.overlap for either weight."""
    if SHUFFLED:
        overlap_tiles(w_ptr, columns, stride, lines)
    else:
        overlap(w_ptr, columns, stride, left, lines)
