"""The block-scaled product on a GPU: one program per tile and split of K, both scales applied after each K block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.device_fns import (
    k_range,
    load_k,
    load_weight,
    mma_operands,
    prefetch_weight_and_gdc_wait,
    program_tile,
    reduce_split_k,
    row_offsets,
    store_tile,
    tile_rows,
    weight_offsets,
    zero_accumulator,
)


@triton.jit
def scaled_product(x, w, x_scale, w_scale, SWAP_AB: tl.constexpr, UNIFORM: tl.constexpr):
    """(x [M, K] @ w [K, N]) * x_scale [M] * w_scale [N] in mma_operands' order; UNIFORM: w_scale is a scalar."""
    wide, narrow = mma_operands(x, w, SWAP_AB)
    product = tl.dot(wide, narrow)
    if UNIFORM:
        scale = x_scale * w_scale
        product *= scale[None, :] if SWAP_AB else scale[:, None]
    elif SWAP_AB:
        product = product * w_scale[:, None] * x_scale[None, :]
    else:
        product = product * x_scale[:, None] * w_scale[None, :]
    return product


@triton.jit
def load_row_scales(ptrs, rows, block, stride, M_MAJOR: tl.constexpr):
    """Scales of rows of x for a block along K; `ptrs`: each row's first scale, M_MAJOR: the first block's scales."""
    if M_MAJOR:
        scales = tl.load(ptrs + block.to(tl.int64) * stride + rows)
    else:
        scales = tl.load(ptrs + block)
    return scales


@triton.jit
def blockscale(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride, group_m, splits, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
    SWAP_AB: tl.constexpr, SHUFFLED: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
    M_MAJOR: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; strides in elements between rows, columns are contiguous.

    x_scale_stride: between rows, M_MAJOR: between blocks of K. SHUFFLED: w is in tiles (family/layouts.py).
    """
    pid, split, tile_m, tile_n = program_tile(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, rows = tile_rows(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = tile_rows(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    STEP: tl.constexpr = 16 if SHUFFLED else 1  # elements of w from one k to the next
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    w_ptr += first_column.to(tl.int64) * w_stride + begin * BLOCK_SIZE_K * STEP
    x_at = row_offsets(rows, x_stride)[:, None] + ks[None, :]
    w_at = weight_offsets(tile_n, columns, ks, N, w_stride, SHUFFLED)
    x_scale_ptrs = x_scale_ptr + (first_row if M_MAJOR else (first_row + rows) * x_scale_stride)
    # A tile of at most SCALE_BLOCK columns has one weight scale per K block: a scalar is 9 % faster on an H200.
    UNIFORM: tl.constexpr = BLOCK_SIZE_N <= SCALE_BLOCK
    scaled_columns = first_column if UNIFORM else first_column + columns
    w_scale_ptrs = w_scale_ptr + (scaled_columns // SCALE_BLOCK) * w_scale_stride
    if OVERLAP:
        prefetch_weight_and_gdc_wait(w_ptr, columns, w_stride, K - begin * BLOCK_SIZE_K, lines, SHUFFLED)
    acc = zero_accumulator(BLOCK_SIZE_M, BLOCK_SIZE_N, SWAP_AB, x_ptr.dtype.element_ty)
    for k in range(begin, end):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptr + x_at, ks[None, :], left, EVEN_K, "")
        w = load_weight(w_ptr + w_at, ks, left, EVEN_K, CACHE, SHUFFLED)
        block = k * BLOCK_SIZE_K // SCALE_BLOCK
        x_scale = load_row_scales(x_scale_ptrs, rows, block, x_scale_stride, M_MAJOR)
        acc += scaled_product(x, w, x_scale, tl.load(w_scale_ptrs + block), SWAP_AB, UNIFORM)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K * STEP
    total = tl.trans(acc) if SWAP_AB else acc
    last = True
    if SPLIT_K:
        last, total = reduce_split_k(total, parts_ptr, counters_ptr, pid, split, splits, M - first_row)
    if last:
        store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)
