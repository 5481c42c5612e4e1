"""The MXFP4 product on a GPU: one program a tile and split of K; Triton decodes where the chip does not."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import k_range, place, sum_of_parts


@triton.jit
def microscaled(
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
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    CACHE: tl.constexpr,
):
    """out = (x * x_scale) @ (w * w_scale)^T; strides between rows in bytes (out: elements), K in elements."""
    BYTES: tl.constexpr = BLOCK_SIZE_K // 2
    GROUPS: tl.constexpr = BLOCK_SIZE_K // 32
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    pid, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = place(pid, tiles_m, tiles_n, group_m)
    # Rows past the end wrap around instead of being masked: their results are never stored.
    rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks, groups = tl.arange(0, BYTES), tl.arange(0, GROUPS)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + (begin * BYTES + ks)[None, :]
    w_ptrs = w_ptr + columns.to(tl.int64)[None, :] * w_stride + (begin * BYTES + ks)[:, None]
    x_scale_ptrs = x_scale_ptr + rows.to(tl.int64)[:, None] * x_scale_stride + (begin * GROUPS + groups)[None, :]
    w_scale_ptrs = w_scale_ptr + columns.to(tl.int64)[:, None] * w_scale_stride + (begin * GROUPS + groups)[None, :]
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for k in range(begin, end):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs, cache_modifier=CACHE)
            x_scale = tl.load(x_scale_ptrs)
            w_scale = tl.load(w_scale_ptrs)
        else:
            left = K - k * BLOCK_SIZE_K
            x = tl.load(x_ptrs, mask=ks[None, :] < left // 2, other=0)
            w = tl.load(w_ptrs, mask=ks[:, None] < left // 2, other=0, cache_modifier=CACHE)
            # 127 is a scale of 1: a value of 0 stays 0, where 255, a NaN, might be read from beyond the row's end.
            x_scale = tl.load(x_scale_ptrs, mask=groups[None, :] < left // 32, other=127)
            w_scale = tl.load(w_scale_ptrs, mask=groups[None, :] < left // 32, other=127)
        acc = tl.dot_scaled(x, x_scale, "e2m1", w, w_scale, "e2m1", acc)
        x_ptrs += BYTES
        w_ptrs += BYTES
        x_scale_ptrs += GROUPS
        w_scale_ptrs += GROUPS
    last = True
    if SPLIT_K:
        rest = M - tile_m * BLOCK_SIZE_M
        last, acc = sum_of_parts(acc, parts_ptr, counters_ptr, pid, split, splits, rest, BLOCK_SIZE_M, BLOCK_SIZE_N)
    if last:
        out_rows = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        out_columns = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * out_stride + out_columns[None, :]
        inside = (out_rows < M)[:, None] & (out_columns < N)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
