"""Device functions of fused experts: grouped product of both stages, activation, sum."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gemmpipe.templates.device_fns import load_k, round_to, swizzle2d


@triton.jit
def activation(value, NAME: tl.constexpr):
    """silu, gelu (exact, by erf) or the identity of fp32 values."""
    if NAME == "silu":
        value = value / (1 + tl.exp(-value))
    if NAME == "gelu":
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit
def load_block_rows(pairs_ptr, owners_ptr, block, pairs, BLOCK_SIZE_M: tl.constexpr, TOPK: tl.constexpr):
    """(expert of a block of rows, its pairs, mask of those that are no padding, their rows of x)."""
    expert = tl.load(owners_ptr + block).to(tl.int64)
    pair = tl.load(pairs_ptr + block * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M))
    real = pair < pairs
    return expert, pair, real, tl.where(real, pair // TOPK, 0).to(tl.int64)


@triton.jit
def block_scale_pointers(x_scale_ptr, w_scale_ptr, expert, rows, columns, N, K, w_rows, GROUP: tl.constexpr):
    """Pointers to the first scales along K: of rows of x, of columns of the expert's gate and of its up projection."""
    groups = tl.cdiv(K, GROUP)
    x_scales = x_scale_ptr + rows * groups
    w_scale_ptr += expert * tl.cdiv(w_rows, GROUP) * groups
    return x_scales, w_scale_ptr + columns // GROUP * groups, w_scale_ptr + (columns + N) // GROUP * groups


@triton.jit
def scaled_dot(
    x, w, acc, x_scale_ptrs, w_scale_ptrs, SCALES: tl.constexpr, UNIFORM: tl.constexpr, INTERPRETED: tl.constexpr
):
    """acc + x @ w, times this K block's scales if SCALES is `block`; UNIFORM: one scale for all columns of w."""
    if INTERPRETED and x.dtype == tl.bfloat16:  # Triton's interpreter multiplies bf16 as raw integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    if SCALES == "block":
        x_scale, w_scale = tl.load(x_scale_ptrs)[:, None], tl.load(w_scale_ptrs)
        if UNIFORM:
            acc += tl.dot(x, w) * (x_scale * w_scale)
        else:
            acc += tl.dot(x, w) * (x_scale * w_scale[None, :])
    else:
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def apply_epilogue(
    gate, up, x_scale_ptr, w_scale_ptr, shares_ptr, pair, real, rows, w_row, columns, N,
    SCALES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums times the scales of whole rows and the pairs' shares, activated; GATED: act(gate) * up."""
    if SCALES == "row":
        x_scale = tl.load(x_scale_ptr + rows)[:, None]
        w_scale_ptr += w_row
        gate *= x_scale * tl.load(w_scale_ptr + columns)[None, :]
        if GATED:
            up *= x_scale * tl.load(w_scale_ptr + N + columns)[None, :]
    if shares_ptr is not None:
        share = tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
        gate *= share
        up *= share
    gate = activation(gate, ACTIVATION)
    if GATED:
        gate *= up
    return gate


@triton.jit
def store_pairs(total, out_ptr, pair, real, first_column, N, INTERPRETED: tl.constexpr):
    """Store the pairs of a tile that are no padding, in the output's type."""
    columns = first_column + tl.arange(0, total.shape[1])
    ptrs = out_ptr + pair.to(tl.int64)[:, None] * N + columns[None, :]
    inside = real[:, None] & (columns < N)[None, :]
    tl.store(ptrs, round_to(total, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def routed(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, shares_ptr, out_ptr, pairs_ptr, owners_ptr, blocks_ptr,
    pairs, N, K, w_rows, group_m,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    EVEN_K: tl.constexpr, CACHE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[pair, N] = x[pair // TOPK, K] @ w[the pair's expert, N, K]^T, times the pair's share if there are shares.

    Blocks of rows are those of _order.py. SCALES: `none`, `row` (x_scale [rows], w_scale [E, w_rows]) or `block` (GROUP
    wide along K, and along N for w; UNIFORM: one of them along N per tile). out is activated (ACTIVATION, or `none`);
    GATED: w has 2 * N rows, the gate's then the up projection's, and out is act(gate) * up.
    """
    blocks, tiles_n = tl.load(blocks_ptr), tl.cdiv(N, BLOCK_SIZE_N)
    if tl.program_id(0) >= blocks * tiles_n:
        return
    block, tile_n = swizzle2d(tl.program_id(0), blocks, tiles_n, group_m)
    expert, pair, real, rows = load_block_rows(pairs_ptr, owners_ptr, block, pairs, BLOCK_SIZE_M, TOPK)
    # Columns past the end wrap around instead of being masked: their results are never stored.
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    x_ptrs = x_ptr + rows[:, None] * K + ks[None, :]
    w_ptrs = w_ptr + expert * w_rows * K + columns.to(tl.int64)[None, :] * K + ks[:, None]
    x_scales, gate_scales, up_scales = x_ptr, w_ptr, w_ptr  # never read unless scales vary along K
    if SCALES == "block":
        at = tile_n * BLOCK_SIZE_N if UNIFORM else columns
        x_scales, gate_scales, up_scales = block_scale_pointers(
            x_scale_ptr, w_scale_ptr, expert, rows, at, N, K, w_rows, GROUP
        )
    gate = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    up = gate
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptrs, ks[None, :], left, EVEN_K, "")
        w = load_k(w_ptrs, ks[:, None], left, EVEN_K, CACHE)
        group = k * BLOCK_SIZE_K // GROUP
        gate = scaled_dot(x, w, gate, x_scales + group, gate_scales + group, SCALES, UNIFORM, INTERPRETED)
        if GATED:
            w = load_k(w_ptrs + N.to(tl.int64) * K, ks[:, None], left, EVEN_K, CACHE)
            up = scaled_dot(x, w, up, x_scales + group, up_scales + group, SCALES, UNIFORM, INTERPRETED)
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K
    total = apply_epilogue(
        gate, up, x_scale_ptr, w_scale_ptr, shares_ptr, pair, real, rows, expert * w_rows, columns, N,
        SCALES, ACTIVATION, GATED,
    )  # fmt: skip
    store_pairs(total, out_ptr, pair, real, tile_n * BLOCK_SIZE_N, N, INTERPRETED)


@triton.jit
def activate(
    x_ptr, out_ptr, scale_ptr, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[row, columns] = act(x[row, :columns]), times x[row, columns:] when GATED, quantised if scale_ptr is given.

    A program takes GROUPS groups of GROUP columns of one row; a scale is its group's largest magnitude over TOP.
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < columns
    x_ptr += row * columns * (2 if GATED else 1)
    value = activation(tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        value *= tl.load(x_ptr + columns + column, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        largest = tl.max(tl.abs(value), 1)
        scale = tl.where(largest > 0, largest / TOP, 1.0)
        tl.store(scale_ptr + row * tl.cdiv(columns, GROUP) + groups, scale, mask=groups * GROUP < columns)
        value = tl.minimum(tl.maximum(value / scale[:, None], -TOP), TOP)
    tl.store(out_ptr + row * columns + column, round_to(value, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def total(parts_ptr, out_ptr, N, TOPK: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """out[row, N] = the sum of the row's TOPK parts [rows * TOPK, N], added in fp32 in their order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parts_ptr += row * TOPK * N
    added = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOPK):
        added += tl.load(parts_ptr + i * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, round_to(added, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < N)
