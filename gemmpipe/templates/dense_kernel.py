"""The product whose scales do not vary along K: 16 or 8 bits, one or many, plain or pre-shuffled weights."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import k_range, offsets, overlap, place, rows_of, sum_of_parts, xcd_order


@triton.jit
def dense(
    x_ptr,
    w_ptr,
    bias_ptr,
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
    out_stride,
    group_m,
    splits,
    lines,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    SHUFFLED: tl.constexpr,
    BATCHED: tl.constexpr,
    EVEN_K: tl.constexpr,
    CACHE: tl.constexpr,
    UPCAST: tl.constexpr,
    SWAP_AB: tl.constexpr,
    XCDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = (x @ w^T) * x_scale * w_scale + bias; strides in elements between rows, products follow one another.

    SPLIT_K: `none`, `parts` (added up by the last program to arrive) or `atomic` (added to an out of zeros).
    ROW_SCALES: a scale a row of x and of w, else one each. bias and scales are None where absent.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    pid, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = place(xcd_order(pid, tiles_m * tiles_n, XCDS), tiles_m, tiles_n, group_m)
    if BATCHED:
        product = tl.program_id(2).to(tl.int64)
        pid += product * tiles_m * tiles_n
        x_ptr += product * M * x_stride
        w_ptr += product * N * w_stride
        out_ptr += product * M * out_stride
        if ROW_SCALES:
            x_scale_ptr += product * M
            w_scale_ptr += product * N
    first_row, rows = rows_of(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = rows_of(tile_n, N, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    begin, end = k_range(K, split, splits, BLOCK_SIZE_K)
    x_ptr += first_row.to(tl.int64) * x_stride + begin * BLOCK_SIZE_K
    x_at = offsets(rows, x_stride)[:, None] + ks[None, :]
    if SHUFFLED:  # 16 x 16 tiles of bytes, those of 16 columns one after another
        w_step = BLOCK_SIZE_K * 16
        w_ptr += first_column.to(tl.int64) * w_stride
        within = columns // 16 * 16 * w_stride + columns % 16 * 16
        w_at = within[None, :] + (ks // 16 * 256 + ks % 16)[:, None]
    else:
        w_step = BLOCK_SIZE_K
        w_ptr += first_column.to(tl.int64) * w_stride
        w_at = offsets(columns, w_stride)[None, :] + ks[:, None]
    w_ptr += begin.to(tl.int64) * w_step
    if OVERLAP:
        overlap(w_ptr, columns, w_stride, K - begin * BLOCK_SIZE_K, 0 if SHUFFLED else lines)
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    # Swapped, the weight takes the wide side of the matrix instruction (64 on Hopper), few rows its narrow one.
    if SWAP_AB:
        acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), SUM)
    else:
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)
    for k in range(begin, end):
        if EVEN_K:
            x = tl.load(x_ptr + x_at)
            w = tl.load(w_ptr + w_at, cache_modifier=CACHE)
        else:
            left = K - k * BLOCK_SIZE_K
            x = tl.load(x_ptr + x_at, mask=ks[None, :] < left, other=0.0)
            w = tl.load(w_ptr + w_at, mask=ks[:, None] < left, other=0.0, cache_modifier=CACHE)
        if UPCAST:  # Triton's interpreter multiplies bf16 as raw integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        if SWAP_AB:
            acc = tl.dot(tl.trans(w), tl.trans(x), acc, out_dtype=SUM)
        else:
            acc = tl.dot(x, w, acc, out_dtype=SUM)
        x_ptr += BLOCK_SIZE_K
        w_ptr += w_step
    if SWAP_AB:
        acc = tl.trans(acc)
    acc = acc.to(tl.float32)
    last = True
    if SPLIT_K == "parts":
        left = M - tile_m * BLOCK_SIZE_M
        last, acc = sum_of_parts(acc, parts_ptr, counters_ptr, pid, split, splits, left, BLOCK_SIZE_M, BLOCK_SIZE_N)
    if last:
        out_rows = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        out_columns = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        if x_scale_ptr is not None:
            if ROW_SCALES:
                acc *= tl.load(x_scale_ptr + first_row + rows)[:, None]
                acc *= tl.load(w_scale_ptr + first_column + columns)[None, :]
            else:
                acc *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + first_column + columns).to(tl.float32)[None, :]
        out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * out_stride + out_columns[None, :]
        inside = (out_rows < M)[:, None] & (out_columns < N)[None, :]
        if SPLIT_K == "atomic":
            tl.atomic_add(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside, sem="relaxed")
        else:
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
