"""The product whose scales do not vary along K: 16 or 8 bits, one or many, plain or pre-shuffled weights."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import (
    k_range,
    load_k,
    offsets,
    out_tile,
    overlap,
    rows_of,
    scaled,
    sides,
    sum_of_parts,
    tile_of,
)


@triton.jit
def weight_at(columns, ks, stride, SHUFFLED: tl.constexpr):
    """Elements from a tile's first column of w to its [K, N]; SHUFFLED: w is 16 x 16 tiles of bytes (layouts.py)."""
    if SHUFFLED:  # the tiles of 16 columns follow one another
        within = columns // 16 * 16 * stride + columns % 16 * 16
        at = within[None, :] + (ks // 16 * 256 + ks % 16)[:, None]
    else:
        at = offsets(columns, stride)[None, :] + ks[:, None]
    return at


@triton.jit
def dense(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, x_stride, w_stride, out_stride, group_m, splits, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr, SCALES: tl.constexpr, SHUFFLED: tl.constexpr, BATCHED: tl.constexpr,
    EVEN_K: tl.constexpr, CACHE: tl.constexpr, UPCAST: tl.constexpr, SWAP_AB: tl.constexpr,
    SHORT_START: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = (x @ w^T) * x_scale * w_scale + bias; strides in elements between rows, products follow one another.

    SPLIT_K: `none`, `parts` (added up by the last program to arrive) or `atomic` (added to an out of zeros).
    SCALES: `none`, `tensor` (one each) or `row` (one a row of x and of w). bias and scales are None where absent.
    SHORT_START: where a split begins in w is computed in 32 bits (see Dense).
    """
    pid, split, tile_m, tile_n = tile_of(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    if BATCHED:
        product = tl.program_id(2).to(tl.int64)
        pid += product * tl.cdiv(M, BLOCK_SIZE_M) * tl.cdiv(N, BLOCK_SIZE_N)
        x_ptr += product * M * x_stride
        w_ptr += product * N * w_stride
        out_ptr += product * M * out_stride
        if SCALES == "row":
            x_scale_ptr += product * M
            w_scale_ptr += product * N
    first_row, rows = rows_of(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = rows_of(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    W_STEP: tl.constexpr = BLOCK_SIZE_K * (16 if SHUFFLED else 1)
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    w_begin = begin if SHORT_START else begin.to(tl.int64)
    w_ptr += first_column.to(tl.int64) * w_stride + w_begin * W_STEP
    x_at = offsets(rows, x_stride)[:, None] + ks[None, :]
    w_at = weight_at(columns, ks, w_stride, SHUFFLED)
    if OVERLAP:
        overlap(w_ptr, columns, w_stride, K - begin * BLOCK_SIZE_K, 0 if SHUFFLED else lines)
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M) if SWAP_AB else (BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)
    for k in range(begin, end):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptr + x_at, ks[None, :], left, EVEN_K, "")
        w = load_k(w_ptr + w_at, ks[:, None], left, EVEN_K, CACHE)
        if UPCAST:  # Triton's interpreter multiplies bf16 as raw integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        wide, narrow = sides(x, w, SWAP_AB)
        acc = tl.dot(wide, narrow, acc, out_dtype=SUM)
        x_ptr += BLOCK_SIZE_K
        w_ptr += W_STEP
    if SWAP_AB:
        acc = tl.trans(acc)
    acc = acc.to(tl.float32)
    last = True
    if SPLIT_K == "parts":
        left = M - tile_m * BLOCK_SIZE_M
        last, acc = sum_of_parts(acc, parts_ptr, counters_ptr, pid, split, splits, left, BLOCK_SIZE_M, BLOCK_SIZE_N)
    if last:
        out_rows, out_columns = first_row + tl.arange(0, BLOCK_SIZE_M), first_column + tl.arange(0, BLOCK_SIZE_N)
        acc = scaled(acc, bias_ptr, x_scale_ptr, w_scale_ptr, first_row, rows, first_column, columns, SCALES)
        out_ptrs, inside = out_tile(out_ptr, out_rows, out_columns, M, N, out_stride)
        if SPLIT_K == "atomic":
            tl.atomic_add(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside, sem="relaxed")
        else:
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
