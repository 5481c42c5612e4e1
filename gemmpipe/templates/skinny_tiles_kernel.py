"""The skinny product with a weight in 16 x 16 tiles of bytes: its 16-byte pieces go straight to the threads' registers.

A thread multiplies the 16 bytes along K that it loaded; what threads hold is added up once, after all of K.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import triton
import triton.language as tl

from gemmpipe.templates.tiles import load_k, scaled, store_tile, tile_of
from gemmpipe.templates.weight_tiles import overlap_tiles


@triton.jit
def first_pieces(w_ptr, first_column, N, w_stride, lines, BLOCK_SIZE_N: tl.constexpr):
    """weight_tiles.overlap_tiles for the columns of one program, counted from the first of a row of tiles."""
    run = first_column // 16 * 16
    columns = tl.minimum(first_column % 16 + tl.arange(0, BLOCK_SIZE_N), N - 1 - run)
    overlap_tiles(w_ptr + run.to(tl.int64) * w_stride, columns, w_stride, lines)


@triton.jit
def row_pieces(
    x_ptr, x_scale_ptr, x_at, ks, groups, w_scale, first_row, M, left, x_stride, x_scale_stride,
    ROWS: tl.constexpr, SUM: tl.constexpr, SCALES: tl.constexpr, EVEN_K: tl.constexpr, M_MAJOR: tl.constexpr,
):  # fmt: skip
    """(each row's pieces of x [DEPTH, 128], each row's scales times w's [DEPTH]) of a block of K, as tuples."""
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
def add_products(
    acc, xs, scales, w_ptr, w_at, ks, first_column, N, left, w_stride,
    SCALES: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """acc [DEPTH, 8, halves * rows] + the products of these rows' pieces and each 8 columns', those along K apart."""
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
    """As skinny_kernel.skinny; BLOCK_SIZE_N is a multiple of 8."""
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    DEPTH: tl.constexpr = BLOCK_SIZE_K // 16
    HALVES: tl.constexpr = BLOCK_SIZE_N // 8
    _, _, tile_m, tile_n = tile_of(M, N, 16, BLOCK_SIZE_M, BLOCK_SIZE_N, XCDS)
    first_row, first_column = tile_m * BLOCK_SIZE_M, tile_n * BLOCK_SIZE_N
    if OVERLAP:
        first_pieces(w_ptr, first_column, N, w_stride, lines, BLOCK_SIZE_N)
    # One row of x and 8 columns after the other: what a thread loads of each is then the same 16 places along K,
    # whichever order the compiler takes dimensions in, and nothing goes through shared memory.
    tiles, within = tl.arange(0, DEPTH), tl.arange(0, 128)
    x_at, w_at = tiles[:, None] * 16 + (within % 16)[None, :], tiles[:, None] * 256 + within[None, :]
    w_scale_row = w_scale_ptr + first_column // SCALE_BLOCK * w_scale_stride if SCALES == "block" else w_scale_ptr
    acc = tl.zeros((DEPTH, 8, HALVES * BLOCK_SIZE_M), SUM)
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        left, ks = K - k, (tiles * 16)[:, None]
        groups = tl.minimum(k + tiles * 16, K - 1) // SCALE_BLOCK
        w_scale = tl.load(w_scale_row + groups) if SCALES == "block" else 1.0
        xs, scales = row_pieces(
            x_ptr, x_scale_ptr, x_at, ks, groups, w_scale, first_row, M, left, x_stride, x_scale_stride,
            BLOCK_SIZE_M, SUM, SCALES, EVEN_K, M_MAJOR,
        )  # fmt: skip
        acc = add_products(acc, xs, scales, w_ptr, w_at, ks, first_column, N, left, w_stride, SCALES, EVEN_K, CACHE)
        x_ptr += BLOCK_SIZE_K
        w_ptr += BLOCK_SIZE_K * 16
    total = tl.reshape(tl.sum(acc, axis=0), (8, HALVES, BLOCK_SIZE_M))
    total = tl.reshape(tl.permute(total, (2, 1, 0)), (BLOCK_SIZE_M, BLOCK_SIZE_N)).to(tl.float32)
    rows = tl.minimum(first_row + tl.arange(0, BLOCK_SIZE_M), M - 1)
    columns = tl.minimum(first_column + tl.arange(0, BLOCK_SIZE_N), N - 1)
    total = scaled(total, bias_ptr, x_scale_ptr, w_scale_ptr, 0, rows, 0, columns, SCALES)
    store_tile(total, out_ptr, first_row, first_column, M, N, out_stride, False)
