"""The MXFP4 product on a GPU: one program per tile and split of K; Triton decodes for chips that do not."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.device_fns import k_range, load_k, program_tile, reduce_split_k, store_tile

_E8M0_ONE = tl.constexpr(127)
"""A scale of 1, as e8m0."""


@triton.jit
def load_scales(ptrs, groups, left, EVEN_K: tl.constexpr):
    """[rows, groups] of a K block's scales; 1 beyond K, where memory might hold 255, a NaN."""
    if EVEN_K:
        scales = tl.load(ptrs)
    else:
        scales = tl.load(ptrs, mask=groups[None, :] < left, other=_E8M0_ONE)
    return scales


@triton.jit
def microscaled(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride, group_m, splits,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; strides between rows in bytes (out: elements), K in elements."""
    BYTES: tl.constexpr = BLOCK_SIZE_K // 2
    GROUPS: tl.constexpr = BLOCK_SIZE_K // 32
    pid, split, tile_m, tile_n = program_tile(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, 1)
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
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptrs, ks[None, :], left // 2, EVEN_K, "")
        w = load_k(w_ptrs, ks[:, None], left // 2, EVEN_K, CACHE)
        x_scale = load_scales(x_scale_ptrs, groups, left // 32, EVEN_K)
        w_scale = load_scales(w_scale_ptrs, groups, left // 32, EVEN_K)
        acc = tl.dot_scaled(x, x_scale, "e2m1", w, w_scale, "e2m1", acc)
        x_ptrs += BYTES
        w_ptrs += BYTES
        x_scale_ptrs += GROUPS
        w_scale_ptrs += GROUPS
    last = True
    if SPLIT_K:
        last, acc = reduce_split_k(acc, parts_ptr, counters_ptr, pid, split, splits, M - tile_m * BLOCK_SIZE_M)
    if last:
        store_tile(acc, out_ptr, tile_m * BLOCK_SIZE_M, tile_n * BLOCK_SIZE_N, M, N, out_stride, False)
