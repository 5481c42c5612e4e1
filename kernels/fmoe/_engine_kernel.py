"""The grouped product of experts in the form that vLLM's and SGLang's Triton kernel has.

Engines load configurations for that kernel, to which times of another form (fused activation, early exits, unmasked
operands) do not apply. The form: one program per tile over the largest number of blocks that a routing can make, rows
and the end of K masked in every load, 64-bit row offsets, one load of w's scales per column.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.device_fns import round_to, swizzle2d


@triton.jit
def load_tile_pairs(pairs_ptr, tile_m, pairs, BLOCK_SIZE_M: tl.constexpr, NAIVE: tl.constexpr):
    """The pairs (row * topk + choice) of a tile in 64 bits; `pairs` itself is padding. NAIVE: one pair per tile."""
    offsets = tl.arange(0, BLOCK_SIZE_M).to(tl.int64)
    if NAIVE:
        pair = tl.where(offsets == 0, tile_m, pairs)
    else:
        pair = tl.load(pairs_ptr + tile_m * BLOCK_SIZE_M + offsets)
    return pair.to(tl.int64)


@triton.jit
def set_count(count_ptr, count):
    """Store the number of blocks, which engines fill in when they do not sort."""
    tl.store(count_ptr, count)


@triton.jit
def count_pairs(ids_ptr, counts_ptr, pairs, experts, CHUNK: tl.constexpr):
    """Count the pairs of each expert; pairs of no expert are left out."""
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
    tl.atomic_add(counts_ptr + ids, 1, mask=(ids >= 0) & (ids < experts), sem="relaxed")


@triton.jit
def begin_experts(
    counts_ptr, next_ptr, owners_ptr, blocks_ptr, experts, BLOCK_SIZE_M: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """One program: next_ptr gets each expert's first row, owners_ptr each block's expert, blocks_ptr their number."""
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins, mask=bins < experts, other=0)
    own = (counts + BLOCK_SIZE_M - 1) // BLOCK_SIZE_M
    ends = tl.cumsum(own, 0)
    tl.store(blocks_ptr, tl.sum(own, 0))
    tl.store(next_ptr + bins, (ends - own) * BLOCK_SIZE_M)
    for i in range(tl.max(own, 0)):
        tl.store(owners_ptr + ends - own + i, bins, mask=i < own)


@triton.jit
def scatter_pairs(ids_ptr, next_ptr, pairs_ptr, pairs, experts, CHUNK: tl.constexpr):
    """Write each pair to the next free row of its expert; the order within an expert is that of arrival."""
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
    known = (ids >= 0) & (ids < experts)
    row = tl.atomic_add(next_ptr + ids, 1, mask=known, sem="relaxed")
    tl.store(pairs_ptr + row, places, mask=known)


@triton.jit
def fill_pairs(pairs_ptr, counts_ptr, rows, value, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Fill the sorted pairs with `value`, which marks padding, and the counts with 0."""
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    tl.store(pairs_ptr + places, places * 0 + value, mask=places < rows)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(counts_ptr + bins, bins * 0)


@triton.jit
def load_operand(ptrs, rows_present, ks_present, EVEN_K: tl.constexpr):
    """Load a tile of x or w; `rows_present` is None for w, whose rows past the end repeat others."""
    if rows_present is None:
        value = tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=ks_present, other=0.0)
    else:
        present = rows_present if EVEN_K else rows_present & ks_present
        value = tl.load(ptrs, mask=present, other=0.0)
    return value


@triton.jit
def dot_accumulate(acc, x, w, SWAP_AB: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x @ w, or with SWAP_AB w @ x with the operands transposed."""
    if INTERPRETED and x.dtype == tl.bfloat16:  # Triton's interpreter multiplies bf16 as raw integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    if SWAP_AB:
        acc = tl.dot(w, x, acc=acc)
    else:
        acc = tl.dot(x, w, acc=acc)
    return acc


@triton.jit
def accumulate_scaled(acc, product, x_scale, w_scale, SWAP_AB: tl.constexpr):
    """acc + product times the scales of this K block: x_scale per row of x, w_scale per column of w."""
    if SWAP_AB:
        acc += product * w_scale[:, None] * x_scale[None, :]
    else:
        acc += product * x_scale[:, None] * w_scale[None, :]
    return acc


@triton.jit
def store_rows(
    total, x_scale_ptr, w_scale_ptr, shares_ptr, out_ptr, pair, real, row, expert, columns, tile_n, N,
    BLOCK_SIZE_N: tl.constexpr, SCALES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store a tile in the output's type, times the scales of whole rows and the pairs' shares."""
    if SCALES == "row":
        x_scale = tl.load(x_scale_ptr + row, mask=real, other=0.0)
        total *= x_scale[:, None] * tl.load(w_scale_ptr + expert * N + columns)[None, :]
    if shares_ptr is not None:
        total *= tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
    stored = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    out_ptrs = out_ptr + pair[:, None] * N + stored[None, :]
    inside = real[:, None] & (stored < N)[None, :]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def engine_experts(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, shares_ptr, out_ptr, pairs_ptr, owners_ptr, blocks_ptr,
    N, K, tiles_m, pairs, x_scale_stride, w_scale_stride, group_m,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, SWAP_AB: tl.constexpr, NAIVE: tl.constexpr, EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[pair, N] = x[pair // TOPK, K] @ w[expert of the pair, N, K]^T, times the pair's share if there are shares.

    Blocks of rows are those of `align`: owners_ptr has the expert of each, blocks_ptr their number. NAIVE: every pair
    is a block of its own, owners_ptr has the pairs' experts. SCALES: `none`, `row` (x_scale [rows],
    w_scale [E, N]) or `block` (x_scale [rows, x_scale_stride], w_scale [E, ceil(N / GROUP), w_scale_stride]).
    """
    tile_m, tile_n = swizzle2d(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_SIZE_N), group_m)
    if tile_m >= tl.load(blocks_ptr):
        return
    pair = load_tile_pairs(pairs_ptr, tile_m, pairs, BLOCK_SIZE_M, NAIVE)
    real, row = pair < pairs, pair // TOPK
    expert = tl.load(owners_ptr + tile_m).to(tl.int64)
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N).to(tl.int64)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    w_ptr += expert * N * K
    if SWAP_AB:
        x_ptrs = x_ptr + (ks[:, None] + row[None, :] * K)
        w_ptrs = w_ptr + (columns[:, None] * K + ks[None, :])
        acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    else:
        x_ptrs = x_ptr + (row[:, None] * K + ks[None, :])
        w_ptrs = w_ptr + (ks[:, None] + columns[None, :] * K)
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    x_scales, w_scales = row, columns  # read only where scales vary along K
    if SCALES == "block":
        x_scales = x_scale_ptr + row * x_scale_stride
        w_scales = w_scale_ptr + expert * tl.cdiv(N, GROUP) * w_scale_stride + columns // GROUP * w_scale_stride
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        left = K - k * BLOCK_SIZE_K
        if SWAP_AB:
            x = load_operand(x_ptrs, real[None, :], ks[:, None] < left, EVEN_K)
            w = load_operand(w_ptrs, None, ks[None, :] < left, EVEN_K)
        else:
            x = load_operand(x_ptrs, real[:, None], ks[None, :] < left, EVEN_K)
            w = load_operand(w_ptrs, None, ks[:, None] < left, EVEN_K)
        if SCALES == "block":
            group = k * BLOCK_SIZE_K // GROUP
            x_scale = tl.load(x_scales + group, mask=real, other=0.0)
            w_scale = tl.load(w_scales + group)
            product = dot_accumulate(tl.zeros_like(acc), x, w, SWAP_AB, INTERPRETED)
            acc = accumulate_scaled(acc, product, x_scale, w_scale, SWAP_AB)
        else:
            acc = dot_accumulate(acc, x, w, SWAP_AB, INTERPRETED)
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K
    total = tl.trans(acc) if SWAP_AB else acc
    store_rows(
        total, x_scale_ptr, w_scale_ptr, shares_ptr, out_ptr, pair, real, row, expert, columns, tile_n, N,
        BLOCK_SIZE_N, SCALES, INTERPRETED,
    )  # fmt: skip
