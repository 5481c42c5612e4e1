"""Kernels of the product for few rows of x: a program takes a few rows of w over all of K (no split-K).

`skinny`: on the CUDA cores; every weight is read once, by one thread, straight to registers. A matrix instruction's 64
rows would leave too few tiles for the device; here a program takes any number of rows of w.

`skinny_tiles`: the same for a weight in 16 x 16 tiles of bytes. A thread multiplies the 16 bytes along K that it
loaded; the threads' sums are added up once, after all of K.

`sliced`: on the tensor cores, K sliced between the warps of a program (slice-K). The few rows are one warp's matrix
instruction; each warp takes a slice of every step along K, and the slices are added up in shared memory at the end.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from gemmpipe.templates.device_fns import (
    apply_epilogue,
    gdc_wait_after,
    load_k,
    prefetch_and_gdc_wait,
    prefetch_tiles_and_gdc_wait,
    program_tile,
    row_offsets,
    store_tile,
    tile_rows,
)


@triton.jit
def skinny(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
    STAGES: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T + bias; strides in elements between rows.

    SCALES: `none`, `tensor` (one each), `row` (one per row of x and of w) or `block` (1 x 128 of x, 128 x 128 of w).
    x_scale_stride: between rows of block scales, M_MAJOR: between blocks of K. Sums are fp32, for int8 int32.
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    GROUPS: tl.constexpr = BLOCK_SIZE_K // SCALE_BLOCK if SCALES == "block" else 1
    _, _, tile_m, tile_n = program_tile(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    if OVERLAP:
        prefetch_and_gdc_wait(w_ptr, columns, w_stride, K, lines)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    w_ptrs = w_ptr + columns.to(tl.int64)[:, None] * w_stride + ks[None, :]
    groups = tl.arange(0, GROUPS)
    last_group = (K - 1) // SCALE_BLOCK
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        x = load_k(x_ptrs, ks[None, :], K - k, EVEN_K, "").to(SUM)
        w = load_k(w_ptrs, ks[None, :], K - k, EVEN_K, CACHE).to(SUM)
        if SCALES == "block":  # both are applied to x: the rows of w that a program reads have one scale per K block
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
    out = apply_epilogue(acc.to(tl.float32), bias_ptr, x_scale_ptr, w_scale_ptr, 0, rows, 0, columns, SCALES)
    store_tile(out, out_ptr, tile_m * BLOCK_SIZE_M, tile_n * BLOCK_SIZE_N, M, N, out_stride, False)


@triton.jit
def prefetch_first_tiles(w_ptr, first_column, N, w_stride, lines, BLOCK_SIZE_N: tl.constexpr):
    """prefetch_tiles_and_gdc_wait for the columns of one program, counted from the first of a row of tiles."""
    run = first_column // 16 * 16
    columns = tl.minimum(first_column % 16 + tl.arange(0, BLOCK_SIZE_N), N - 1 - run)
    prefetch_tiles_and_gdc_wait(w_ptr + run.to(tl.int64) * w_stride, columns, w_stride, lines)


@triton.jit
def load_rows_and_scales(
    x_ptr, x_scale_ptr, x_at, ks, groups, w_scale, first_row, M, left, x_stride, x_scale_stride,
    ROWS: tl.constexpr, SUM: tl.constexpr, SCALES: tl.constexpr, EVEN_K: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """Tuples over rows, for a block of K: (pieces of x [DEPTH, 128], scales of x times w's [DEPTH])."""
    xs, scales = (), ()
    for i in tl.static_range(ROWS):
        row = tl.minimum(first_row + i, M - 1)
        xs += (load_k(x_ptr + row.to(tl.int64) * x_stride + x_at, ks, left, EVEN_K, "").to(SUM),)
        if SCALES == "block":
            if M_MAJOR:
                scales += (tl.load(x_scale_ptr + row + groups * x_scale_stride) * w_scale,)
            else:
                scales += (tl.load(x_scale_ptr + row * x_scale_stride + groups) * w_scale,)
    return xs, scales


@triton.jit
def accumulate_products(
    acc, xs, scales, w_ptr, w_at, ks, first_column, N, left, w_stride,
    SCALES: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """acc [DEPTH, 8, halves * rows] + the products of these rows' pieces and every 8 columns', not summed over K."""
    ROWS: tl.constexpr = len(xs)
    sums = tl.arange(0, acc.shape[2])[None, None, :]
    for half in tl.static_range(acc.shape[2] // ROWS):
        column = tl.minimum(first_column + half * 8, N - 8)
        begin = (column // 16).to(tl.int64) * 16 * w_stride + column % 16 * 16
        w = load_k(w_ptr + begin + w_at, ks, left, EVEN_K, CACHE).to(acc.dtype)
        for i in tl.static_range(ROWS):
            part = tl.sum(tl.reshape(xs[i] * w, (acc.shape[0], 8, 16)), axis=2)
            if SCALES == "block":
                part *= scales[i][:, None]
            acc += tl.where(sums == half * ROWS + i, part[:, :, None], 0)
    return acc


@triton.jit
def skinny_tiles(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride, lines,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
    STAGES: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """As `skinny`; BLOCK_SIZE_N is a multiple of 8."""
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    DEPTH: tl.constexpr = BLOCK_SIZE_K // 16
    HALVES: tl.constexpr = BLOCK_SIZE_N // 8
    _, _, tile_m, tile_n = program_tile(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, first_column = tile_m * BLOCK_SIZE_M, tile_n * BLOCK_SIZE_N
    if OVERLAP:
        prefetch_first_tiles(w_ptr, first_column, N, w_stride, lines, BLOCK_SIZE_N)
    # One row of x and 8 columns at a time: a thread then loads the same 16 places along K of each, whatever order of
    # dimensions the compiler takes, and nothing goes through shared memory.
    tiles, within = tl.arange(0, DEPTH), tl.arange(0, 128)
    x_at, w_at = tiles[:, None] * 16 + (within % 16)[None, :], tiles[:, None] * 256 + within[None, :]
    w_scale_row = w_scale_ptr + first_column // SCALE_BLOCK * w_scale_stride if SCALES == "block" else w_scale_ptr
    acc = tl.zeros((DEPTH, 8, HALVES * BLOCK_SIZE_M), SUM)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        left, ks = K - k, (tiles * 16)[:, None]
        groups = tl.minimum(k + tiles * 16, K - 1) // SCALE_BLOCK
        w_scale = tl.load(w_scale_row + groups) if SCALES == "block" else 1.0
        xs, scales = load_rows_and_scales(
            x_ptr, x_scale_ptr, x_at, ks, groups, w_scale, first_row, M, left, x_stride, x_scale_stride,
            BLOCK_SIZE_M, SUM, SCALES, EVEN_K, M_MAJOR,
        )  # fmt: skip
        acc = accumulate_products(
            acc, xs, scales, w_ptr, w_at, ks, first_column, N, left, w_stride, SCALES, EVEN_K, CACHE
        )
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K * 16
    total = tl.reshape(tl.sum(acc, axis=0), (8, HALVES, BLOCK_SIZE_M))
    total = tl.reshape(tl.permute(total, (2, 1, 0)), (BLOCK_SIZE_M, BLOCK_SIZE_N)).to(tl.float32)
    rows = tl.minimum(first_row + tl.arange(0, BLOCK_SIZE_M), M - 1)
    columns = tl.minimum(first_column + tl.arange(0, BLOCK_SIZE_N), N - 1)
    total = apply_epilogue(total, bias_ptr, x_scale_ptr, w_scale_ptr, 0, rows, 0, columns, SCALES)
    store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)


@triton.jit
def slice_offsets(rows, stride, SLICES: tl.constexpr, DEPTH: tl.constexpr, INNER: tl.constexpr):
    """(offsets of the rows' elements, offsets along K): [SLICES, rows, DEPTH], or K before rows without INNER.

    A slice takes DEPTH consecutive elements of a step along K, so that a row is read in runs of SLICES * DEPTH.
    """
    begins, within = (tl.arange(0, SLICES) * DEPTH)[:, None, None], tl.arange(0, DEPTH)
    if INNER:
        ks = begins + within[None, None, :]
        at = row_offsets(rows, stride)[None, :, None] + ks
    else:
        ks = begins + within[None, :, None]
        at = row_offsets(rows, stride)[None, None, :] + ks
    return at, ks


@triton.jit
def load_rows(ptrs, rows_left, ks, left, EVEN_K: tl.constexpr, INNER: tl.constexpr):
    """Elements of the first `rows_left` rows of x and along K below `left`, 0 elsewhere: padding is not read at all."""
    inside = tl.arange(0, ptrs.shape[1] if INNER else ptrs.shape[2]) < rows_left
    present = inside[None, :, None] if INNER else inside[None, None, :]
    return tl.load(ptrs, mask=present if EVEN_K else present & (ks < left), other=0.0)


@triton.jit
def load_slice_scales(
    x_scale_rows, x_scale_stride, w_scale_row, slices, last,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """[SLICES, rows of x] for slices that begin at `slices` along K with block scales; None with others."""
    scale = None
    if SCALES == "block":
        group = tl.minimum(slices, last) // SCALE_BLOCK
        blocks = group * x_scale_stride if M_MAJOR else group
        scale = tl.load(x_scale_rows[None, :] + blocks[:, None]) * tl.load(w_scale_row + group)[:, None]
    return scale


@triton.jit
def add_slices(acc, x, w, scale, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr):
    """acc + x @ w in every slice, transposed with SWAP_AB; scale: [SLICES, rows of x] for the product, or None."""
    if UPCAST:  # Triton's interpreter multiplies bf16 as raw integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    wide, narrow = (w, x) if SWAP_AB else (x, w)
    if scale is None:
        acc = tl.dot(wide, narrow, acc, out_dtype=acc.dtype)
    else:
        acc += tl.dot(wide, narrow) * (scale[:, None, :] if SWAP_AB else scale[:, :, None])
    return acc


@triton.jit
def sum_of_slices(acc, SWAP_AB: tl.constexpr):
    """The sum over the first dimension in fp32, [rows of x, rows of w].

    By halves instead of tl.sum: a thread then gets what it adds up in one pass through shared memory instead of three,
    in the layout that is stored (triton 3.6: 2 barriers, not 5).
    """
    total = tl.permute(acc, (2, 1, 0) if SWAP_AB else (1, 2, 0))
    SLICES: tl.constexpr = acc.shape[0]
    HALVINGS: tl.constexpr = (SLICES >= 2) + (SLICES >= 4) + (SLICES >= 8) + (SLICES >= 16) + (SLICES >= 32)
    for _ in tl.static_range(HALVINGS):
        even, odd = tl.split(tl.reshape(total, (total.shape[0], total.shape[1], total.shape[2] // 2, 2)))
        total = even + odd
    return tl.reshape(total, (total.shape[0], total.shape[1])).to(tl.float32)


@triton.jit
def load_epilogue_operands(bias_ptr, x_scale_ptr, w_scale_ptr, rows, columns, SCALES: tl.constexpr):
    """(scales of x, scales of w, bias) for the end of the sum, 1 or 0 if absent.

    Loaded before the sum: after it, nothing would hide the latency.
    """
    x_scale, w_scale, bias = 1.0, 1.0, 0.0
    if SCALES == "row":
        x_scale, w_scale = tl.load(x_scale_ptr + rows)[:, None], tl.load(w_scale_ptr + columns)[None, :]
    if SCALES == "tensor":
        x_scale, w_scale = tl.load(x_scale_ptr), tl.load(w_scale_ptr)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    return x_scale, w_scale, bias


@triton.jit
def sliced(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, SLICES: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_K: tl.constexpr, CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
    M_MAJOR: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T + bias; strides in elements between rows.

    SCALES: `none`, `tensor` (one each), `row` (one per row of x and of w) or `block` (1 x 128 of x, 128 x 128 of w).
    x_scale_stride: between rows of block scales, M_MAJOR: between blocks of K. Sums are fp32, for int8 int32.
    SWAP_AB: the rows of w are on the matrix instruction's wide side.
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    DEPTH: tl.constexpr = BLOCK_SIZE_K // SLICES
    _, _, tile_m, tile_n = program_tile(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, rows = tile_rows(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = tile_rows(tile_n, N, BLOCK_SIZE_N)
    x_ptr += first_row.to(tl.int64) * x_stride
    w_ptr += first_column.to(tl.int64) * w_stride
    x_at, x_ks = slice_offsets(rows, x_stride, SLICES, DEPTH, not SWAP_AB)
    w_at, w_ks = slice_offsets(columns, w_stride, SLICES, DEPTH, SWAP_AB)
    scaled_rows = first_row + rows if M_MAJOR else (first_row + rows) * x_scale_stride
    x_scales = x_scale_ptr + scaled_rows if SCALES == "block" else None
    w_scales = w_scale_ptr + first_column // SCALE_BLOCK * w_scale_stride if SCALES == "block" else None
    if OVERLAP:  # as prefetch_and_gdc_wait without the prefetch, which (measured) only delays these programs' own loads
        gdc_wait_after(w_ptr)
        gdc_launch_dependents()
    x_end, w_end, bias = load_epilogue_operands(
        bias_ptr, x_scale_ptr, w_scale_ptr, first_row + rows, first_column + columns, SCALES
    )
    acc = tl.zeros((SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M) if SWAP_AB else (SLICES, BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        w = load_k(w_ptr + w_at, w_ks, K - k, EVEN_K, CACHE)
        x = load_rows(x_ptr + x_at, M - first_row, x_ks, K - k, EVEN_K, not SWAP_AB)
        slices = k + tl.arange(0, SLICES) * DEPTH
        scale = load_slice_scales(x_scales, x_scale_stride, w_scales, slices, K - 1, SCALES, SCALE_BLOCK, M_MAJOR)
        acc = add_slices(acc, x, w, scale, SWAP_AB, UPCAST)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K
    total = sum_of_slices(acc, SWAP_AB) * x_end * w_end + bias
    store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)
