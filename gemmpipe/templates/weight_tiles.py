"""Device functions that read a weight in 16 x 16 tiles of bytes (layouts.py): as it lies, then turned to [K, N]."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import load_k, offsets, overlap, rows_of


@triton.jit
def runs_of(tile_n, N, stride, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr):
    """(elements to the first column of a tile, from there to a K block of its columns: [N / 16, K * 16]).

    The tiles of 16 columns follow one another along K, so that a row of it is one contiguous run: a warp reads whole
    lines. Read as [K, N], 16 bytes a thread, it touched two sectors of each of eight lines (H200: half the speed).
    """
    first, runs = rows_of(tile_n, N // 16, BLOCK_SIZE_N // 16)
    within = tl.arange(0, BLOCK_SIZE_K * 16)
    return first.to(tl.int64) * 16 * stride, offsets(runs * 16, stride)[:, None] + within[None, :]


@triton.jit
def load_tiles(ptrs, left, EVEN_K: tl.constexpr, CACHE: tl.constexpr):
    """[K, N] of what lies at the pointers of `runs_of`; 0 from `left` along K on, which is a multiple of 16."""
    RUNS: tl.constexpr = ptrs.shape[0]
    DEPTH: tl.constexpr = ptrs.shape[1] // 256
    ks = tl.arange(0, DEPTH * 256) // 256 * 16
    w = tl.reshape(load_k(ptrs, ks[None, :], left, EVEN_K, CACHE), (RUNS, DEPTH, 16, 16))
    return tl.reshape(tl.permute(w, (1, 3, 0, 2)), (DEPTH * 16, RUNS * 16))


@triton.jit
def overlap_tiles(w_ptr, columns, stride, lines):
    """As tiles.overlap: so many lines a column, but those of 16 columns lie in one run."""
    LINE: tl.constexpr = 128
    starts = offsets(columns // 16 * 16, stride) + columns % 16 * (lines * LINE)
    overlap(w_ptr, starts, 1, lines * LINE, lines)
