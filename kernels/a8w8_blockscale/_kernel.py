"""The block-scaled product on a GPU: one program a tile (and split of K), both scales applied after each K block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import k_range, offsets, overlap, place, rows_of, sum_of_parts, xcd_order


@triton.jit
def blockscale(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    M,
    N,
    K,
    x_stride,
    w_stride,
    x_scale_stride,
    w_scale_stride,
    out_stride,
    group_m,
    splits,
    lines,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    CACHE: tl.constexpr,
    SWAP_AB: tl.constexpr,
    XCDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = (x * x_scale) @ (w * w_scale)^T; strides in elements between rows, columns are contiguous."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    pid, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = place(xcd_order(pid, tiles_m * tiles_n, XCDS), tiles_m, tiles_n, group_m)
    first_row, rows = rows_of(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = rows_of(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    w_ptr += first_column.to(tl.int64) * w_stride + begin * BLOCK_SIZE_K
    x_at = offsets(rows, x_stride)[:, None] + ks[None, :]
    w_at = offsets(columns, w_stride)[None, :] + ks[:, None]
    x_scale_ptrs = x_scale_ptr + (first_row + rows) * x_scale_stride
    # A tile of at most SCALE_BLOCK columns lies within one block of weight scales: a scalar, worth 9 % on an H200.
    if BLOCK_SIZE_N <= SCALE_BLOCK:
        w_scale_ptrs = w_scale_ptr + (first_column // SCALE_BLOCK) * w_scale_stride
    else:
        w_scale_ptrs = w_scale_ptr + ((first_column + columns) // SCALE_BLOCK) * w_scale_stride
    if OVERLAP:
        overlap(w_ptr, columns, w_stride, K - begin * BLOCK_SIZE_K, lines)
    # Swapped, the weight takes the wide side of the matrix instruction (64 on Hopper), few rows its narrow one.
    if SWAP_AB:
        acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for k in range(begin, end):
        if EVEN_K:
            x = tl.load(x_ptr + x_at)
            w = tl.load(w_ptr + w_at, cache_modifier=CACHE)
        else:
            left = K - k * BLOCK_SIZE_K
            x = tl.load(x_ptr + x_at, mask=ks[None, :] < left, other=0.0)
            w = tl.load(w_ptr + w_at, mask=ks[:, None] < left, other=0.0, cache_modifier=CACHE)
        block = k * BLOCK_SIZE_K // SCALE_BLOCK
        x_scale = tl.load(x_scale_ptrs + block)
        w_scale = tl.load(w_scale_ptrs + block)
        if SWAP_AB:
            product, across, along = tl.dot(tl.trans(w), tl.trans(x)), w_scale, x_scale
        else:
            product, across, along = tl.dot(x, w), x_scale, w_scale
        # `across` scales the product's rows and `along` its columns; the weight's may be one scalar for both.
        if BLOCK_SIZE_N > SCALE_BLOCK:
            acc += product * across[:, None] * along[None, :]
        elif SWAP_AB:
            acc += product * (along * across)[None, :]
        else:
            acc += product * (across * along)[:, None]
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K
    if SWAP_AB:
        acc = tl.trans(acc)
    last = True
    if SPLIT_K:
        left = M - tile_m * BLOCK_SIZE_M
        last, acc = sum_of_parts(acc, parts_ptr, counters_ptr, pid, split, splits, left, BLOCK_SIZE_M, BLOCK_SIZE_N)
    if last:
        out_rows = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        out_columns = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * out_stride + out_columns[None, :]
        inside = (out_rows < M)[:, None] & (out_columns < N)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
