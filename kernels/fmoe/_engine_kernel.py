"""The grouped product of experts in the form that vLLM's and SGLang's Triton kernel has.

Engines load configurations for that kernel, to which times of another form (fused activation, early exits, unmasked
operands) do not apply. The form: one program per tile over the largest number of blocks that a routing can make, rows
and the end of K masked in every load, 64-bit row offsets, one load of w's scales per column. The order of operations is
vLLM's too: with integers specialised as in its call, the binary has the same instructions (Triton 3.6, sm_90). That is
why the pointers and loads of `engine_experts` are no functions of their own: Triton compiles others for them.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.device_fns import round_to, swizzle2d


@triton.jit
def set_count(count_ptr, count):
    """Store the number of padded rows, which engines fill in when they do not sort."""
    tl.store(count_ptr, count)


@triton.jit
def count_pairs(ids_ptr, counts_ptr, pairs, experts, CHUNK: tl.constexpr):
    """Count the pairs of each expert; pairs of no expert are left out."""
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
    tl.atomic_add(counts_ptr + ids, 1, mask=(ids >= 0) & (ids < experts), sem="relaxed")


@triton.jit
def begin_experts(
    counts_ptr, next_ptr, owners_ptr, padded_ptr, experts, BLOCK_SIZE_M: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """One program: next_ptr gets each expert's first row, owners_ptr each block's expert, padded_ptr their rows."""
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins, mask=bins < experts, other=0)
    own = (counts + BLOCK_SIZE_M - 1) // BLOCK_SIZE_M
    ends = tl.cumsum(own, 0)
    tl.store(padded_ptr, tl.sum(own, 0) * BLOCK_SIZE_M)
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
def store_rows(out, out_ptr, pair, real, tile_n, N, out_stride, BLOCK_SIZE_N: tl.constexpr):
    """Store a tile's rows of real pairs."""
    out_columns = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    out_ptrs = out_ptr + out_stride * pair[:, None] + out_columns[None, :]
    inside = real[:, None] & (out_columns[None, :] < N)
    tl.store(out_ptrs, out, mask=inside)


@triton.jit
def add_product(acc, x, w, SCALES: tl.constexpr, SWAP_AB: tl.constexpr):
    """acc + the product of two tiles, without block scales."""
    if SCALES == "row":
        if SWAP_AB:
            acc = tl.dot(w, x, acc=acc)
        else:
            acc = tl.dot(x, w, acc=acc)
    else:
        acc += tl.dot(x, w)
    return acc


@triton.jit
def engine_experts(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr, shares_ptr, pairs_ptr, owners_ptr, padded_ptr,
    N, K, rows, pairs, x_stride, w_expert_stride, w_stride, out_stride,
    x_scale_stride, w_scale_expert_stride, w_scale_stride, group_m,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, SWAP_AB: tl.constexpr, NAIVE: tl.constexpr, EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[pair, N] = x[pair // TOPK, K] @ w[expert of the pair, N, K]^T, times the pair's share if there are shares.

    There are tiles for `rows` padded rows; padded_ptr has how many of them this routing needs, owners_ptr the expert of
    each tile. A pair is row * topk + choice, `pairs` itself is padding. NAIVE: every pair is a tile of its own,
    owners_ptr has the pairs' experts. SCALES: `none`, `row` (x_scale [rows], w_scale [E, N]) or `block` (x_scale [rows,
    x_scale_stride], w_scale [E, ceil(N / GROUP), w_scale_stride]). `group_m` may be a constant of the binary.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    tile_m, tile_n = swizzle2d(tl.program_id(0), tiles_m, tiles_n, group_m)
    offsets = tl.arange(0, BLOCK_SIZE_M).to(tl.int64)
    padded = tl.load(padded_ptr)
    if tile_m * BLOCK_SIZE_M >= padded:
        return
    if not NAIVE:
        places = tile_m * BLOCK_SIZE_M + offsets
        pair = tl.load(pairs_ptr + places)
    else:
        pair = tl.where(offsets == 0, tile_m, pairs)
    pair = pair.to(tl.int64)
    real = pair < pairs
    expert = tl.load(owners_ptr + tile_m).to(tl.int64)
    if expert == -1:  # of another device
        zeros = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=out_ptr.dtype.element_ty)
        store_rows(zeros, out_ptr, pair, real, tile_n, N, out_stride, BLOCK_SIZE_N)
        return
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N).to(tl.int64)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    if SWAP_AB:
        x_ptrs = x_ptr + (ks[:, None] + pair[None, :] // TOPK * x_stride)
        w_ptrs = w_ptr + expert * w_expert_stride + (columns[:, None] * w_stride + ks[None, :])
    else:
        x_ptrs = x_ptr + (pair[:, None] // TOPK * x_stride + ks[None, :])
        w_ptrs = w_ptr + expert * w_expert_stride + (ks[:, None] + columns[None, :] * w_stride)
    if SCALES == "block":
        x_scale_ptrs = x_scale_ptr + (pair // TOPK) * x_scale_stride
        w_scale_ptrs = w_scale_ptr + expert * w_scale_expert_stride + (columns // GROUP) * w_scale_stride
    elif SCALES == "row":
        w_scale = tl.load(w_scale_ptr + expert * w_scale_expert_stride + columns[None, :] * w_scale_stride)
        x_scale = tl.load(x_scale_ptr + (pair // TOPK) * x_scale_stride, mask=real, other=0.0)[:, None]
    if SWAP_AB:
        acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        if SWAP_AB:
            x_inside = (ks[:, None] < K - k * BLOCK_SIZE_K) & real[None, :]
            w_inside = ks[None, :] < K - k * BLOCK_SIZE_K
        else:
            x_inside = real[:, None] & (ks[None, :] < K - k * BLOCK_SIZE_K)
            w_inside = ks[:, None] < K - k * BLOCK_SIZE_K
        if EVEN_K:
            x = tl.load(x_ptrs, mask=real[None, :] if SWAP_AB else real[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=x_inside, other=0.0)
            w = tl.load(w_ptrs, mask=w_inside, other=0.0)
        if INTERPRETED and x.dtype == tl.bfloat16:  # Triton's interpreter multiplies bf16 as raw integers
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if SCALES == "block":
            block = k * BLOCK_SIZE_K // GROUP
            x_scale = tl.load(x_scale_ptrs + block, mask=real, other=0.0)
            w_scale = tl.load(w_scale_ptrs + block)
            if SWAP_AB:
                acc += tl.dot(w, x) * w_scale[:, None] * x_scale[None, :]
            else:
                acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        else:
            acc = add_product(acc, x, w, SCALES, SWAP_AB)
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K
    if SWAP_AB:
        acc = tl.trans(acc)
    if SCALES == "row":
        acc = acc * x_scale * w_scale
    if shares_ptr is not None:
        share = tl.load(shares_ptr + pair, mask=real, other=0)
        acc *= share[:, None]
    out = round_to(acc, out_ptr.dtype.element_ty, INTERPRETED)
    store_rows(out, out_ptr, pair, real, tile_n, N, out_stride, BLOCK_SIZE_N)
