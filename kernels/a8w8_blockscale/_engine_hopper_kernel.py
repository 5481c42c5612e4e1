"""The block-scaled product in the form of SGLang's Triton function for sm_90: swapped operands and splits along K.

A split of K is a program along the grid's second axis; its fp32 partial sums are added by a second kernel.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def engine_product_hopper(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr,
    M, N, K, scale_rows, scale_step, x_stride, w_stride, out_stride, x_scale_stride, w_scale_stride, group_m,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    MASKED: tl.constexpr, SWAPPED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Like `engine_product` with steps of scales; with SPLITS above 1 `out_ptr` are parts [SPLITS, M, N] in fp32.

    SWAPPED: the tile of w is the first operand of the product, which then has BLOCK_SIZE_N rows.
    """
    pid = tl.program_id(0)
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(K, BLOCK_SIZE_K), SPLITS)
    first = split * share
    out_ptr += split * M * N
    tiles_m = tl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    whole = group_m * tiles_n
    group = pid // whole
    top = group * group_m
    height = min(tiles_m - top, group_m)
    tile_m = top + (pid % height)
    tile_n = (pid % whole) // height
    rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    x_ptrs = x_ptr + (rows[:, None] * x_stride + ks[None, :])
    w_ptrs = w_ptr + (ks[:, None] + columns[None, :] * w_stride)
    x_scale_ptrs = x_scale_ptr + rows * x_scale_stride
    w_scale_ptrs = w_scale_ptr + (columns // scale_rows) * w_scale_stride
    per_group = scale_step // BLOCK_SIZE_K
    x_ptrs += first * BLOCK_SIZE_K
    w_ptrs += first * BLOCK_SIZE_K
    x_scale_ptrs += first // per_group
    w_scale_ptrs += first // per_group
    if SWAPPED:
        acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(first, tl.minimum(first + share, tl.cdiv(K, BLOCK_SIZE_K))):
        if MASKED:
            x = tl.load(x_ptrs, mask=ks[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
            w = tl.load(w_ptrs, mask=ks[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        else:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        x_scale = tl.load(x_scale_ptrs)
        w_scale = tl.load(w_scale_ptrs)
        step = tl.where((k + 1) % per_group == 0, 1, 0)
        if SWAPPED:
            acc += tl.dot(tl.trans(w), tl.trans(x)) * w_scale[:, None] * x_scale[None, :]
        else:
            acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K
        x_scale_ptrs += step
        w_scale_ptrs += step
    if SWAPPED:
        acc = tl.trans(acc)
    out = acc.to(out_ptr.dtype.element_ty)
    out_rows = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    out_columns = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    out_ptrs = out_ptr + out_stride * out_rows[:, None] + out_columns[None, :]
    inside = (out_rows[:, None] < M) & (out_columns[None, :] < N)
    tl.store(out_ptrs, out, mask=inside)


@triton.jit
def engine_split_sum(parts_ptr, out_ptr, elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of SPLITS parts of `elements` each, both contiguous."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    splits = tl.arange(0, SPLITS)
    inside = offsets < elements
    parts = tl.load(parts_ptr + splits[:, None] * elements + offsets[None, :], mask=inside[None, :], other=0.0)
    tl.store(out_ptr + offsets, tl.sum(parts, axis=0).to(out_ptr.dtype.element_ty), mask=inside)
