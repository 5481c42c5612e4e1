"""The product for a few rows with K sliced between the warps of one program, on the tensor cores.

A program takes a few rows of w over all of K: nothing is added up between programs. So few rows are a matrix
instruction of one warp; the warps each take a slice of every step along K, and add up through shared memory at the end.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from gemmpipe.templates.tiles import load_k, offsets, rows_of, store_tile, tile_of, wait_for_previous


@triton.jit
def slices_of(rows, stride, SLICES: tl.constexpr, DEPTH: tl.constexpr, INNER: tl.constexpr):
    """(where the rows' elements lie, their places along K): [SLICES, rows, DEPTH], or K before rows without INNER.

    A slice takes DEPTH neighbours of a step along K, so that a row is read in runs of SLICES * DEPTH.
    """
    begins, within = (tl.arange(0, SLICES) * DEPTH)[:, None, None], tl.arange(0, DEPTH)
    if INNER:
        ks = begins + within[None, None, :]
        at = offsets(rows, stride)[None, :, None] + ks
    else:
        ks = begins + within[None, :, None]
        at = offsets(rows, stride)[None, None, :] + ks
    return at, ks


@triton.jit
def load_rows(ptrs, rows_left, ks, left, EVEN_K: tl.constexpr, INNER: tl.constexpr):
    """Elements of the first `rows_left` rows of x and along K below `left`, 0 elsewhere: padding is not read at all."""
    inside = tl.arange(0, ptrs.shape[1] if INNER else ptrs.shape[2]) < rows_left
    present = inside[None, :, None] if INNER else inside[None, None, :]
    return tl.load(ptrs, mask=present if EVEN_K else present & (ks < left), other=0.0)


@triton.jit
def scale_of(
    x_scale_rows, x_scale_stride, w_scale_row, slices, last,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """[SLICES, rows of x] for slices that begin at `slices` along K, where scales are by blocks; None elsewhere."""
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

    By halves, not by tl.sum: what a thread adds up then comes to it in one pass through shared memory instead of
    three, in the layout that is stored (triton 3.6: 2 barriers, not 5).
    """
    total = tl.permute(acc, (2, 1, 0) if SWAP_AB else (1, 2, 0))
    SLICES: tl.constexpr = acc.shape[0]
    HALVINGS: tl.constexpr = (SLICES >= 2) + (SLICES >= 4) + (SLICES >= 8) + (SLICES >= 16) + (SLICES >= 32)
    for _ in tl.static_range(HALVINGS):
        even, odd = tl.split(tl.reshape(total, (total.shape[0], total.shape[1], total.shape[2] // 2, 2)))
        total = even + odd
    return tl.reshape(total, (total.shape[0], total.shape[1])).to(tl.float32)


@triton.jit
def load_end(bias_ptr, x_scale_ptr, w_scale_ptr, rows, columns, SCALES: tl.constexpr):
    """(scales of x, scales of w, bias) that the sum needs at its end, 1 or 0 where there are none.

    Loaded before the sum: after it, nothing would hide how long that takes.
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

    SCALES: `none`, `tensor` (one each), `row` (one a row of x and of w) or `block` (1 x 128 of x, 128 x 128 of w).
    x_scale_stride lies between rows of block scales, M_MAJOR: between blocks of K. Sums run in fp32, for int8 in int32.
    SWAP_AB: the rows of w are those of the matrix instruction's wide side.
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    DEPTH: tl.constexpr = BLOCK_SIZE_K // SLICES
    _, _, tile_m, tile_n = tile_of(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, rows = rows_of(tile_m, M, BLOCK_SIZE_M)
    first_column, columns = rows_of(tile_n, N, BLOCK_SIZE_N)
    x_ptr += first_row.to(tl.int64) * x_stride
    w_ptr += first_column.to(tl.int64) * w_stride
    x_at, x_ks = slices_of(rows, x_stride, SLICES, DEPTH, not SWAP_AB)
    w_at, w_ks = slices_of(columns, w_stride, SLICES, DEPTH, SWAP_AB)
    scaled_rows = first_row + rows if M_MAJOR else (first_row + rows) * x_scale_stride
    x_scales = x_scale_ptr + scaled_rows if SCALES == "block" else None
    w_scales = w_scale_ptr + first_column // SCALE_BLOCK * w_scale_stride if SCALES == "block" else None
    if OVERLAP:  # as tiles.overlap, but w is not asked for early: measured, that only delays these programs' own loads
        wait_for_previous(w_ptr)
        gdc_launch_dependents()
    x_end, w_end, bias = load_end(bias_ptr, x_scale_ptr, w_scale_ptr, first_row + rows, first_column + columns, SCALES)
    acc = tl.zeros((SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M) if SWAP_AB else (SLICES, BLOCK_SIZE_M, BLOCK_SIZE_N), SUM)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        w = load_k(w_ptr + w_at, w_ks, K - k, EVEN_K, CACHE)
        x = load_rows(x_ptr + x_at, M - first_row, x_ks, K - k, EVEN_K, not SWAP_AB)
        slices = k + tl.arange(0, SLICES) * DEPTH
        scale = scale_of(x_scales, x_scale_stride, w_scales, slices, K - 1, SCALES, SCALE_BLOCK, M_MAJOR)
        acc = add_slices(acc, x, w, scale, SWAP_AB, UPCAST)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K
    total = sum_of_slices(acc, SWAP_AB) * x_end * w_end + bias
    store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)
