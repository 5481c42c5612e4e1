"""The product for a few rows, on the CUDA cores: every weight is read once, by one thread, straight to registers.

No split of K between programs, hence nothing to add up through memory: a matrix instruction's 64 rows would leave too
few tiles for the device, a program here takes as few rows of w as it likes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import load_k, overlap, scaled, store_tile, tile_of


@triton.jit
def skinny(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
    STAGES: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T + bias; strides in elements between rows.

    SCALES: `none`, `tensor` (one each), `row` (one a row of x and of w) or `block` (1 x 128 of x, 128 x 128 of w).
    x_scale_stride lies between rows of block scales, M_MAJOR: between blocks of K. Sums run in fp32, for int8 in int32.
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    GROUPS: tl.constexpr = BLOCK_SIZE_K // SCALE_BLOCK if SCALES == "block" else 1
    _, _, tile_m, tile_n = tile_of(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    if OVERLAP:
        overlap(w_ptr, columns, w_stride, K, lines)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    w_ptrs = w_ptr + columns.to(tl.int64)[:, None] * w_stride + ks[None, :]
    groups = tl.arange(0, GROUPS)
    last_group = (K - 1) // SCALE_BLOCK
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        x = load_k(x_ptrs, ks[None, :], K - k, EVEN_K, "").to(SUM)
        w = load_k(w_ptrs, ks[None, :], K - k, EVEN_K, CACHE).to(SUM)
        if SCALES == "block":  # both go into x: the rows of w that a program reads have one scale a block of K
            group = tl.minimum(k // SCALE_BLOCK + groups, last_group)
            if M_MAJOR:
                x_scale = tl.load(x_scale_ptr + rows[:, None] + group[None, :] * x_scale_stride)
            else:
                x_scale = tl.load(x_scale_ptr + rows[:, None] * x_scale_stride + group[None, :])
            w_scale = tl.load(w_scale_ptr + tile_n * BLOCK_SIZE_N // SCALE_BLOCK * w_scale_stride + group)
            x = tl.reshape(x, (BLOCK_SIZE_M, GROUPS, SCALE_BLOCK)) * (x_scale * w_scale[None, :])[:, :, None]
            x = tl.reshape(x, (BLOCK_SIZE_M, BLOCK_SIZE_K))
        acc += tl.sum(x[:, None, :] * w[None, :, :], axis=2)
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K
    out = scaled(acc.to(tl.float32), bias_ptr, x_scale_ptr, w_scale_ptr, 0, rows, 0, columns, SCALES)
    store_tile(out, out_ptr, tile_m * BLOCK_SIZE_M, tile_n * BLOCK_SIZE_N, M, N, out_stride, False)
