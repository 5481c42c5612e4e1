"""The block-scaled product on tiles of weights: one program a tile (and split of K), scales after each K block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import k_range, place, sum_of_parts


@triton.jit
def blockscale_tiles(
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
    SCALE_BLOCK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    CACHE: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    """out = (x * x_scale) @ (w * w_scale)^T; strides in elements between rows, of x_scale between blocks of K."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    pid, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = place(pid, tiles_m, tiles_n, group_m)
    # Rows past the end wrap around instead of being masked: their results are never stored.
    rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + (begin * BLOCK_SIZE_K + ks)[None, :]
    # 16 x 16 tiles of bytes, those of 16 columns one after another.
    w_ptrs = w_ptr + ((columns // 16).to(tl.int64) * w_stride + columns % 16)[None, :] * 16
    w_ptrs += begin.to(tl.int64) * (BLOCK_SIZE_K * 16) + (ks // 16 * 256 + ks % 16)[:, None]
    # A tile of at most SCALE_BLOCK columns lies within one block of weight scales.
    if BLOCK_SIZE_N <= SCALE_BLOCK:
        w_scale_ptrs = w_scale_ptr + (tile_n * BLOCK_SIZE_N // SCALE_BLOCK) * w_scale_stride
    else:
        w_scale_ptrs = w_scale_ptr + (columns // SCALE_BLOCK) * w_scale_stride
    # Swapped, the weight takes the wide side of the matrix instruction (64 on Hopper), few rows its narrow one.
    if SWAP_AB:
        acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for k in range(begin, end):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs, cache_modifier=CACHE)
        else:
            left = K - k * BLOCK_SIZE_K
            x = tl.load(x_ptrs, mask=ks[None, :] < left, other=0.0)
            w = tl.load(w_ptrs, mask=ks[:, None] < left, other=0.0, cache_modifier=CACHE)
        block = k * BLOCK_SIZE_K // SCALE_BLOCK
        x_scale = tl.load(x_scale_ptr + block.to(tl.int64) * x_scale_stride + rows)
        w_scale = tl.load(w_scale_ptrs + block)
        if SWAP_AB:
            if BLOCK_SIZE_N <= SCALE_BLOCK:
                acc += tl.dot(tl.trans(w), tl.trans(x)) * (x_scale * w_scale)[None, :]
            else:
                acc += tl.dot(tl.trans(w), tl.trans(x)) * x_scale[None, :] * w_scale[:, None]
        elif BLOCK_SIZE_N <= SCALE_BLOCK:
            acc += tl.dot(x, w) * (x_scale * w_scale)[:, None]
        else:
            acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K * 16
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
