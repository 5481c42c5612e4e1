"""The product with scales that do not vary along K: 16 or 8 bits, one or many, row-major or pre-shuffled weights."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.device_fns import (
    apply_epilogue,
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
def batch_pointer(ptr, rows, stride):
    """Pointer to the operand of this program's product; products of `rows` rows each are contiguous."""
    return ptr + tl.program_id(2).to(tl.int64) * rows * stride


@triton.jit
def dot_accumulate(acc, x, w, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr):
    """acc + x @ w, laid out by `mma_operands`; UPCAST: Triton's interpreter multiplies bf16 as raw integers."""
    if UPCAST:
        x, w = x.to(tl.float32), w.to(tl.float32)
    wide, narrow = mma_operands(x, w, SWAP_AB)
    return tl.dot(wide, narrow, acc, out_dtype=acc.dtype)


@triton.jit
def dense(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, x_stride, w_stride, out_stride, group_m, splits, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr, SCALES: tl.constexpr, SHUFFLED: tl.constexpr, BATCHED: tl.constexpr, EVEN_K: tl.constexpr,
    CACHE: tl.constexpr, UPCAST: tl.constexpr, SWAP_AB: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = (x @ w^T) * x_scale * w_scale + bias; strides in elements between rows.

    SPLIT_K: `none`, `parts` (added up by the last program to arrive) or `atomic` (added to an out of zeros).
    SCALES: `none`, `tensor` (one each) or `row` (one per row of x and of w). bias and scales are None where absent.
    """
    pid, split, tile_m, tile_n = program_tile(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    if BATCHED:
        pid += tl.program_id(2) * tl.num_programs(0)
        x_ptr, w_ptr = batch_pointer(x_ptr, M, x_stride), batch_pointer(w_ptr, N, w_stride)
        out_ptr = batch_pointer(out_ptr, M, out_stride)
        if SCALES == "row":
            x_scale_ptr, w_scale_ptr = batch_pointer(x_scale_ptr, M, 1), batch_pointer(w_scale_ptr, N, 1)
    first_row, rows = tile_rows(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = tile_rows(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    STEP: tl.constexpr = 16 if SHUFFLED else 1  # elements of w from one k to the next
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    w_ptr += first_column.to(tl.int64) * w_stride + begin * BLOCK_SIZE_K * STEP
    x_at = row_offsets(rows, x_stride)[:, None] + ks[None, :]
    w_at = weight_offsets(tile_n, columns, ks, N, w_stride, SHUFFLED)
    if OVERLAP:
        prefetch_weight_and_gdc_wait(w_ptr, columns, w_stride, K - begin * BLOCK_SIZE_K, lines, SHUFFLED)
    acc = zero_accumulator(BLOCK_SIZE_M, BLOCK_SIZE_N, SWAP_AB, x_ptr.dtype.element_ty)
    for k in range(begin, end):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptr + x_at, ks[None, :], left, EVEN_K, "")
        w = load_weight(w_ptr + w_at, ks, left, EVEN_K, CACHE, SHUFFLED)
        acc = dot_accumulate(acc, x, w, SWAP_AB, UPCAST)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K * STEP
    total = (tl.trans(acc) if SWAP_AB else acc).to(tl.float32)
    last = True
    if SPLIT_K == "parts":
        last, total = reduce_split_k(total, parts_ptr, counters_ptr, pid, split, splits, M - first_row)
    if last:
        total = apply_epilogue(
            total, bias_ptr, x_scale_ptr, w_scale_ptr, first_row, rows, first_column, columns, SCALES
        )
        store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, SPLIT_K == "atomic")
