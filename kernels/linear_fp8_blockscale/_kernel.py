"""A linear layer on a GPU: x in 16 bits times fp8 weights with scales of 128 x 128 blocks or of rows, in one launch."""

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
from gemmpipe.templates.quantise_kernel import quantise_tile


@triton.jit
def converted_operands(x, w, SWAP_AB: tl.constexpr, INTERPRETED: tl.constexpr):
    """x [M, K] and w [K, N] in x's type, in mma_operands' order."""
    w = w.to(x.dtype)
    if INTERPRETED and x.dtype == tl.bfloat16:  # Triton's interpreter multiplies bf16 as raw integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    return mma_operands(x, w, SWAP_AB)


@triton.jit
def weight_scaled_product(x, w, w_scale, SWAP_AB: tl.constexpr, UNIFORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """(x [M, K] @ w [K, N] in x's type) * w_scale [N] in mma_operands' order; UNIFORM: w_scale is a scalar."""
    wide, narrow = converted_operands(x, w, SWAP_AB, INTERPRETED)
    product = tl.dot(wide, narrow)
    if UNIFORM:
        product *= w_scale
    else:
        product *= w_scale[:, None] if SWAP_AB else w_scale[None, :]
    return product


@triton.jit
def quantised_product(
    x, w, w_scale, TOP: tl.constexpr, SWAP_AB: tl.constexpr, UNIFORM: tl.constexpr, INTERPRETED: tl.constexpr
):
    """(x [M, K] quantised to w's type by rows @ w [K, N]) times both scales, in mma_operands' order."""
    quantised, x_scale = quantise_tile(x, TOP, w.dtype, INTERPRETED)
    wide, narrow = mma_operands(quantised, w, SWAP_AB)
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
def add_block(
    acc, x, w, w_scale_ptrs, block,
    SCALES: tl.constexpr, TOP: tl.constexpr, SWAP_AB: tl.constexpr, UNIFORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """acc + the product of a K block, with the weight's scale `block` along K if SCALES is `block` (see linear)."""
    if SCALES == "row":
        wide, narrow = converted_operands(x, w, SWAP_AB, INTERPRETED)
        acc = tl.dot(wide, narrow, acc)
    elif TOP is None:
        acc += weight_scaled_product(x, w, tl.load(w_scale_ptrs + block), SWAP_AB, UNIFORM, INTERPRETED)
    else:
        acc += quantised_product(x, w, tl.load(w_scale_ptrs + block), TOP, SWAP_AB, UNIFORM, INTERPRETED)
    return acc


@triton.jit
def linear(
    x_ptr, w_ptr, bias_ptr, w_scale_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, x_stride, w_stride, w_scale_stride, out_stride, group_m, splits, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
    SWAP_AB: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
    XCDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = x @ (w * w_scale)^T + bias; strides in elements between rows, columns are contiguous; bias_ptr may be None.

    SCALES: `block`, one for SCALE_BLOCK x SCALE_BLOCK elements of w, or `row`, one for a row of it. TOP: the greatest
    value of w's type: each row's K block of x (SCALE_BLOCK columns) is quantised to it; None: w is converted to x's
    type instead.
    """
    pid, split, tile_m, tile_n = program_tile(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, rows = tile_rows(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = tile_rows(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    w_ptr += first_column.to(tl.int64) * w_stride + begin * BLOCK_SIZE_K
    x_at = row_offsets(rows, x_stride)[:, None] + ks[None, :]
    w_at = weight_offsets(tile_n, columns, ks, N, w_stride, False)
    UNIFORM: tl.constexpr = BLOCK_SIZE_N <= SCALE_BLOCK  # one weight scale per tile and K block
    scaled_columns = first_column if UNIFORM else first_column + columns
    w_scale_ptrs = w_scale_ptr + (scaled_columns // SCALE_BLOCK) * w_scale_stride
    if OVERLAP:
        prefetch_weight_and_gdc_wait(w_ptr, columns, w_stride, K - begin * BLOCK_SIZE_K, lines, False)
    acc = zero_accumulator(BLOCK_SIZE_M, BLOCK_SIZE_N, SWAP_AB, x_ptr.dtype.element_ty)
    for k in range(begin, end):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptr + x_at, ks[None, :], left, EVEN_K, "")
        w = load_weight(w_ptr + w_at, ks, left, EVEN_K, CACHE, False)
        block = k * BLOCK_SIZE_K // SCALE_BLOCK
        acc = add_block(acc, x, w, w_scale_ptrs, block, SCALES, TOP, SWAP_AB, UNIFORM, INTERPRETED)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K
    total = tl.trans(acc) if SWAP_AB else acc
    last = True
    if SPLIT_K:
        last, total = reduce_split_k(total, parts_ptr, counters_ptr, pid, split, splits, M - first_row)
    if last:
        if SCALES == "row":
            total *= tl.load(w_scale_ptr + first_column + columns)[None, :]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + first_column + columns).to(tl.float32)[None, :]
        store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)
