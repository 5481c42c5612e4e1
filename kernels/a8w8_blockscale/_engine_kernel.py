"""The block-scaled product in the form of vLLM's and SGLang's Triton functions, for tuning their configurations.

One program per tile, tiles in groups of rows of tiles, one scale of w per column, no prefetch and no split-K, so that a
configuration takes the same time here as there. The order of the operations is theirs too: with integers specialised
as in their calls, the binary has the same instructions (Triton 3.6, sm_90).

`engine_product_hopper` is SGLang's for sm_90: swapped operands and splits along K. A split is a program along the
grid's second axis; its fp32 partial sums are added by a second kernel.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def engine_tile(M, N, group_m, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr):
    """(row, column) of the program's tile: device_fns.swizzle2d with the engines' order of remainders."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    whole = group_m * tiles_n
    group = pid // whole
    top = group * group_m
    height = min(tiles_m - top, group_m)
    return top + (pid % height), (pid % whole) // height


@triton.jit
def load_operands(x_ptrs, w_ptrs, ks, left, MASKED: tl.constexpr):
    """A tile of x and of w; MASKED: zeros where `left` elements along K end."""
    if MASKED:
        x = tl.load(x_ptrs, mask=ks[None, :] < left, other=0.0)
        w = tl.load(w_ptrs, mask=ks[:, None] < left, other=0.0)
    else:
        x = tl.load(x_ptrs)
        w = tl.load(w_ptrs)
    return x, w


@triton.jit
def store_tile(
    acc, out_ptr, tile_m, tile_n, M, N, out_stride, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):  # fmt: skip
    """Store the part of a tile that is in [M, N]."""
    out = acc.to(out_ptr.dtype.element_ty)
    out_rows = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    out_columns = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    out_ptrs = out_ptr + out_stride * out_rows[:, None] + out_columns[None, :]
    inside = (out_rows[:, None] < M) & (out_columns[None, :] < N)
    tl.store(out_ptrs, out, mask=inside)


@triton.jit
def engine_product(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr,
    M, N, K, scale_rows, scale_step, x_stride, w_stride, out_stride, x_scale_stride, w_scale_stride, group_m,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    MASKED: tl.constexpr, STEPPED: tl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; strides in elements between rows, columns are contiguous.

    A scale of w is for `scale_rows` rows of it, and a scale of x or w for `scale_step` elements along K. MASKED: the
    last tile along K may be ragged. STEPPED: pointers to scales advance with the last tile of a group, instead of being
    computed from the tile's offset. `group_m`, rows of tiles in a group, may be a constant of the binary.
    """
    tile_m, tile_n = engine_tile(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N)
    # Rows and columns beyond the end wrap around: loads need a mask along K only.
    rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    x_ptrs = x_ptr + (rows[:, None] * x_stride + ks[None, :])
    w_ptrs = w_ptr + (ks[:, None] + columns[None, :] * w_stride)
    x_scale_ptrs = x_scale_ptr + rows * x_scale_stride
    w_scale_ptrs = w_scale_ptr + (columns // scale_rows) * w_scale_stride
    per_group = scale_step // BLOCK_SIZE_K
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        x, w = load_operands(x_ptrs, w_ptrs, ks, K - k * BLOCK_SIZE_K, MASKED)
        if STEPPED:
            x_scale = tl.load(x_scale_ptrs)
            w_scale = tl.load(w_scale_ptrs)
            step = tl.where((k + 1) % per_group == 0, 1, 0)
            acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
            x_ptrs += BLOCK_SIZE_K
            w_ptrs += BLOCK_SIZE_K
            x_scale_ptrs += step
            w_scale_ptrs += step
        else:
            block = k * BLOCK_SIZE_K // scale_step
            x_scale = tl.load(x_scale_ptrs + block)
            w_scale = tl.load(w_scale_ptrs + block)
            acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
            x_ptrs += BLOCK_SIZE_K
            w_ptrs += BLOCK_SIZE_K
    store_tile(acc, out_ptr, tile_m, tile_n, M, N, out_stride, BLOCK_SIZE_M, BLOCK_SIZE_N)


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
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(K, BLOCK_SIZE_K), SPLITS)
    first = split * share
    out_ptr += split * M * N
    tile_m, tile_n = engine_tile(M, N, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N)
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
        x, w = load_operands(x_ptrs, w_ptrs, ks, K - k * BLOCK_SIZE_K, MASKED)
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
    store_tile(acc, out_ptr, tile_m, tile_n, M, N, out_stride, BLOCK_SIZE_M, BLOCK_SIZE_N)


@triton.jit
def engine_split_sum(parts_ptr, out_ptr, elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of SPLITS parts of `elements` each, both contiguous."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    splits = tl.arange(0, SPLITS)
    inside = offsets < elements
    parts = tl.load(parts_ptr + splits[:, None] * elements + offsets[None, :], mask=inside[None, :], other=0.0)
    tl.store(out_ptr + offsets, tl.sum(parts, axis=0).to(out_ptr.dtype.element_ty), mask=inside)
