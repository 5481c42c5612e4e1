"""The block-scaled product on tiles of weights: one program a tile (and split of K), scales after each K block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.kernels.a8w8_blockscale._kernel import scaled_product
from gemmpipe.templates.tiles import (
    empty_sum,
    k_range,
    load_k,
    offsets,
    rows_of,
    store_tile,
    sum_of_parts,
    tile_of,
)
from gemmpipe.templates.weight_tiles import load_weight, overlap_tiles, weight_at


@triton.jit
def blockscale_tiles(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride, group_m, splits, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
    SWAP_AB: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; strides in elements between rows, of x_scale between blocks of K.

    As the row-major weight's kernel, but for where weights and the scales of x lie.
    """
    pid, split, tile_m, tile_n = tile_of(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, rows = rows_of(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = rows_of(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    x_at = offsets(rows, x_stride)[:, None] + ks[None, :]
    w_ptr += first_column.to(tl.int64) * w_stride + begin * BLOCK_SIZE_K * 16
    w_at = weight_at(tile_n, columns, ks, N, w_stride, True)
    x_scale_ptr += first_row
    # A tile of at most SCALE_BLOCK columns lies within one block of weight scales.
    UNIFORM: tl.constexpr = BLOCK_SIZE_N <= SCALE_BLOCK
    scaled_columns = first_column if UNIFORM else first_column + columns
    w_scale_ptrs = w_scale_ptr + (scaled_columns // SCALE_BLOCK) * w_scale_stride
    if OVERLAP:
        overlap_tiles(w_ptr, columns, w_stride, lines)
    acc = empty_sum(BLOCK_SIZE_M, BLOCK_SIZE_N, SWAP_AB, x_ptr.dtype.element_ty)
    for k in range(begin, end):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptr + x_at, ks[None, :], left, EVEN_K, "")
        w = load_weight(w_ptr + w_at, ks, left, EVEN_K, CACHE, True)
        block = k * BLOCK_SIZE_K // SCALE_BLOCK
        x_scale = tl.load(x_scale_ptr + block.to(tl.int64) * x_scale_stride + rows)
        acc += scaled_product(x, w, x_scale, tl.load(w_scale_ptrs + block), SWAP_AB, UNIFORM)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K * 16
    total = tl.trans(acc) if SWAP_AB else acc
    last = True
    if SPLIT_K:
        last, total = sum_of_parts(total, parts_ptr, counters_ptr, pid, split, splits, M - first_row)
    if last:
        store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)
