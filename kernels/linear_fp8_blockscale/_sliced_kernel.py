"""A linear layer of few rows in one launch: the sliced product (templates/small_m_kernels.py) quantises x itself.

A warp's slice of a step along K is one scale block of x. Each thread reads those values of x that it has in the matrix
instruction's operand, where 4 threads hold a row's: nothing is exchanged but the row's largest magnitude. The operand
has 8 rows at least: a single row is quantised once by all threads of a warp, and then copied to all of its registers.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from gemmpipe.templates.device_fns import (
    gdc_wait_after,
    load_k,
    program_tile,
    round_to,
    row_offsets,
    store_tile,
    tile_rows,
)
from gemmpipe.templates.small_m_kernels import load_epilogue_operands, slice_offsets, sum_of_slices

LEAST = tl.constexpr(2.0**-126)
"""The least scale, of zeros, too: the least of which the reciprocal is finite."""
PIECE = tl.constexpr(4)
"""Neighbours along K that a thread holds in the matrix instruction's operand of 8 bits, and copies at once."""


@triton.jit
def piece_offsets(rows, stride, ROWS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr):
    """(row of each piece [pieces], elements from the tile's first row, elements along K: [pieces, 4]).

    Piece i is read by thread i. That thread has it in the matrix instruction's operand, too: 4 threads hold 16
    elements of a row, the next 4 those of the next row, and the next warp is the next slice. The pieces of a single
    row are in the order of K.
    """
    pieces = tl.arange(0, SLICES * DEPTH // PIECE * ROWS)
    if ROWS == 1:
        row, ks = pieces * 0, pieces * PIECE
    else:
        warp, chunk = pieces // 32 % SLICES, pieces // (4 * ROWS * SLICES)
        row = pieces // 4 % 8 + pieces // (32 * SLICES) % (ROWS // 8) * 8
        ks = warp * DEPTH + chunk * (4 * PIECE) + pieces % 4 * PIECE
    ks = ks[:, None] + tl.arange(0, PIECE)[None, :]
    at = row_offsets(tl.minimum(row, rows - 1), stride).to(tl.int64)
    return row, at[:, None] + ks, ks


@triton.jit
def slices_of_pieces(x, SLICES: tl.constexpr, ROWS: tl.constexpr):
    """[SLICES, elements along K, rows] of pieces in the order of `piece_offsets`."""
    DEPTH: tl.constexpr = x.shape[0] * PIECE // (SLICES * ROWS)
    if ROWS > 1:
        x = tl.reshape(x, (DEPTH // (4 * PIECE), ROWS // 8, SLICES, 8, 4, PIECE))
        x = tl.permute(x, (2, 0, 4, 5, 1, 3))
    return tl.reshape(x, (SLICES, DEPTH, ROWS))


@triton.jit
def quantise_slices(x, TOP: tl.constexpr, TO: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """(x [SLICES, DEPTH, rows] in the fp8 type TO, fp32 scale [SLICES, 1, rows]): a row's largest magnitude is TOP.

    COLUMNS: of the matrix instruction; a single row is repeated for all of them. No value needs a clamp: quotients are
    at most TOP, rounded. The reciprocal once per row gives the bits of quantise_tile's division on a GPU, which is a
    product with it.
    """
    SLICES: tl.constexpr = x.shape[0]
    DEPTH: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[2]
    value = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1) / TOP, LEAST)[:, None, :]
    if INTERPRETED:
        value /= scale
    else:
        value *= 1.0 / scale
    if ROWS == 1:
        quantised = tl.broadcast_to(round_to(value, TO, INTERPRETED), (SLICES, DEPTH, COLUMNS))
        scale = tl.broadcast_to(scale, (SLICES, 1, COLUMNS))
    else:
        quantised = round_to(value, TO, INTERPRETED)
    return quantised, scale


@triton.jit
def linear_sliced(
    x_ptr, w_ptr, bias_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, w_scale_stride, out_stride,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, SLICES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
    EVEN_K: tl.constexpr, CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = x @ (w * w_scale)^T + bias; strides in elements between rows, columns are contiguous; bias_ptr may be None.

    w_scale: one of SCALE_BLOCK x SCALE_BLOCK elements of w; a slice of a step along K is as deep. TOP: the greatest
    value of w's type, to which each row's slice of x is quantised. The rows of w are on the matrix instruction's wide
    side; its narrow one has 8 columns at least.
    """
    COLUMNS: tl.constexpr = BLOCK_SIZE_M if BLOCK_SIZE_M > 8 else 8
    _, _, tile_m, tile_n = program_tile(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row = tile_m * BLOCK_SIZE_M
    first_column, columns = tile_rows(tile_n, N, BLOCK_SIZE_N)
    x_ptr += first_row.to(tl.int64) * x_stride
    w_ptr += first_column.to(tl.int64) * w_stride
    row, x_at, x_ks = piece_offsets(M - first_row, x_stride, BLOCK_SIZE_M, SLICES, SCALE_BLOCK)
    present = (row < M - first_row)[:, None]
    w_at, w_ks = slice_offsets(columns, w_stride, SLICES, SCALE_BLOCK, True)
    w_scale_ptr += first_column // SCALE_BLOCK * w_scale_stride
    slices = tl.arange(0, SLICES)
    if OVERLAP:  # without a prefetch, as in `sliced`
        gdc_wait_after(w_ptr)
        gdc_launch_dependents()
    _, _, bias = load_epilogue_operands(bias_ptr, None, None, 0, first_column + columns, "none")
    acc = tl.zeros((SLICES, BLOCK_SIZE_N, COLUMNS), tl.float32)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        w = load_k(w_ptr + w_at, w_ks, K - k, EVEN_K, CACHE)
        pieces = tl.load(x_ptr + x_at, mask=present if EVEN_K else present & (x_ks < K - k), other=0.0)
        w_scale = tl.load(w_scale_ptr + (slices if EVEN_K else tl.minimum(slices, (K - k - 1) // SCALE_BLOCK)))
        x = slices_of_pieces(pieces, SLICES, BLOCK_SIZE_M)
        quantised, x_scale = quantise_slices(x, TOP, w.dtype, COLUMNS, INTERPRETED)
        acc += tl.dot(w, quantised) * (x_scale * w_scale[:, None, None])
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K
        w_scale_ptr += SLICES
    total = sum_of_slices(acc, True) + bias
    store_tile(total, out_ptr, first_row, first_column, tl.minimum(M, first_row + BLOCK_SIZE_M), N, out_stride, False)
