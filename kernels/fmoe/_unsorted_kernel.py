"""Fused experts on the tensor cores without a sort: a program finds the pairs of its expert in the routing itself.

Three launches: h of every pair, every pair's part of the output, the sum of each row's parts. fp8 operands are
quantised in registers, a row of a K block at a time.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.kernels.fmoe._kernel import activation, store_pairs
from gemmpipe.templates.device_fns import gdc_wait_after, load_k, round_to


@triton.jit
def find_pairs(ids_ptr, found_ptr, slot, pairs, experts, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr):
    """(expert of a slot, its number of pairs, where they are stored in their order).

    A slot is an expert, or BY_PAIR a pair: its expert's, if it is the first of them. A slot without pairs has none.
    found_ptr [slots, PAIRS]: all programs of a slot, also those of the next kernel, store the same there.
    """
    at = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + at, mask=at < pairs, other=-1)
    expert = slot
    if BY_PAIR:
        expert = tl.load(ids_ptr + slot)
    mine = (ids == expert) & (at < pairs)
    count = tl.sum(mine.to(tl.int32), 0)
    if BY_PAIR:
        first = tl.min(tl.where(mine, at, PAIRS), 0)
        count = tl.where((first == slot) & (expert >= 0) & (expert < experts), count, 0)
    found_ptr += slot * PAIRS
    stored = tl.where(count > 0, PAIRS, 0)
    tl.store(found_ptr + tl.cumsum(mine.to(tl.int32), 0) - 1, at, mask=mine & (at < stored))
    tl.debug_barrier()  # this program's own stores are read, by other threads of it
    return expert, count, found_ptr


@triton.jit
def quantise_rows(x, TO: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr):
    """(x [rows, K] in 8 bits, [rows] scales: a row's largest magnitude over TOP)."""
    value = x.to(tl.float32)
    largest = tl.max(tl.abs(value), 1)
    scale = tl.where(largest > 0, largest / TOP, 1.0)
    value = tl.minimum(tl.maximum(value / scale[:, None], -TOP), TOP)
    return round_to(value, TO, INTERPRETED), scale


@triton.jit
def add_dot(acc, x, x_scale, w, w_scale_ptrs, SCALES: tl.constexpr, UNIFORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x @ w, times the scales of x's rows and with `block` scales those of w; UNIFORM: one for all columns."""
    if INTERPRETED and x.dtype == tl.bfloat16:  # Triton's interpreter multiplies bf16 as raw integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    if SCALES == "none":
        acc = tl.dot(x, w, acc)
    elif SCALES == "row":
        acc += tl.dot(x, w) * x_scale[:, None]
    elif UNIFORM:
        acc += tl.dot(x, w) * (x_scale * tl.load(w_scale_ptrs))[:, None]
    else:
        acc += tl.dot(x, w) * (x_scale[:, None] * tl.load(w_scale_ptrs)[None, :])
    return acc


@triton.jit
def product_of_block(
    x_ptr, w_ptr, w_scale_ptr, rows, columns, scale_at, expert, N, K, w_rows,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr,
    EVEN_K: tl.constexpr, CACHE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(gate, up) [rows, columns] of rows of x and columns of an expert, over all of K; without GATED up is 0."""
    ks = tl.arange(0, BLOCK_SIZE_K)
    x_ptrs = x_ptr + rows[:, None] * K + ks[None, :]
    w_ptrs = w_ptr + expert * w_rows * K + columns.to(tl.int64)[None, :] * K + ks[:, None]
    gate_scales, up_scales = w_ptr, w_ptr  # never read unless scales vary along K
    if SCALES == "block":
        groups = tl.cdiv(K, GROUP)
        w_scale_ptr += expert * tl.cdiv(w_rows, GROUP) * groups
        gate_scales = w_scale_ptr + scale_at // GROUP * groups
        up_scales = w_scale_ptr + (scale_at + N) // GROUP * groups
    gate = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    up = gate
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        left = K - k * BLOCK_SIZE_K
        x = load_k(x_ptrs, ks[None, :], left, EVEN_K, "")
        w = load_k(w_ptrs, ks[:, None], left, EVEN_K, CACHE)
        group = k * BLOCK_SIZE_K // GROUP
        scale = 1.0
        if SCALES != "none":
            x, scale = quantise_rows(x, w_ptr.dtype.element_ty, TOP, INTERPRETED)
        gate = add_dot(gate, x, scale, w, gate_scales + group, SCALES, UNIFORM, INTERPRETED)
        if GATED:
            w = load_k(w_ptrs + N.to(tl.int64) * K, ks[:, None], left, EVEN_K, CACHE)
            up = add_dot(up, x, scale, w, up_scales + group, SCALES, UNIFORM, INTERPRETED)
        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K
    return gate, up


@triton.jit
def finish_block(
    gate, up, w_scale_ptr, shares_ptr, pair, real, w_row, columns, N,
    SCALES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums times the scales of whole rows of w and the pairs' shares, activated; GATED: act(gate) * up."""
    if SCALES == "row":
        gate *= tl.load(w_scale_ptr + w_row + columns)[None, :]
        if GATED:
            up *= tl.load(w_scale_ptr + w_row + N + columns)[None, :]
    if shares_ptr is not None:
        share = tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
        gate *= share
        up *= share
    gate = activation(gate, ACTIVATION)
    if GATED:
        gate *= up
    return gate


@triton.jit
def unsorted(
    x_ptr, w_ptr, w_scale_ptr, shares_ptr, ids_ptr, found_ptr, out_ptr, pairs, N, K, w_rows, experts,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, TOP: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, CACHE: tl.constexpr, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr,
    ROUTED_BEFORE: tl.constexpr, OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[pair, N] = act(x[pair // TOPK, K] @ w[the pair's expert, w_rows, K]^T), times the pair's share if any.

    A program takes all rows of an expert and BLOCK_SIZE_N columns: see find_pairs. GATED: w has 2 * N rows, the gate's
    then the up projection's. Scales of w: see _kernel.routed. x has 16 bits; SCALES other than `none`: it is quantised.
    ROUTED_BEFORE: the previous kernel has read the routing too, so that it is read before that kernel's end.
    """
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    slot, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    if OVERLAP and not ROUTED_BEFORE:
        gdc_wait()
        gdc_launch_dependents()
    expert, count, found_ptr = find_pairs(ids_ptr, found_ptr, slot, pairs, experts, PAIRS, BY_PAIR)
    if OVERLAP and ROUTED_BEFORE:
        gdc_wait_after(ids_ptr + count)
        gdc_launch_dependents()
    expert = expert.to(tl.int64)
    # Columns past the end wrap around instead of being masked: their results are never stored.
    columns = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    scale_at = tile_n * BLOCK_SIZE_N if UNIFORM else columns
    for block in range(tl.cdiv(count, BLOCK_SIZE_M)):
        place = block * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        real = place < count
        pair = tl.load(found_ptr + place, mask=real, other=0)
        rows = (pair // TOPK).to(tl.int64)
        gate, up = product_of_block(
            x_ptr, w_ptr, w_scale_ptr, rows, columns, scale_at, expert, N, K, w_rows,
            BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, SCALES, GROUP, UNIFORM, TOP, GATED, EVEN_K, CACHE, INTERPRETED,
        )  # fmt: skip
        total = finish_block(
            gate, up, w_scale_ptr, shares_ptr, pair, real, expert * w_rows, columns, N, SCALES, ACTIVATION, GATED
        )
        store_pairs(total, out_ptr, pair, real, tile_n * BLOCK_SIZE_N, N, INTERPRETED)


@triton.jit
def sum_of_pairs(
    parts_ptr, ids_ptr, out_ptr, N, experts,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[row, N] = the sum of the row's TOPK parts [rows * TOPK, N] in their order, without those of no expert."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOPK):
        pair = row * TOPK + i
        expert = tl.load(ids_ptr + pair)
        end = tl.where((expert >= 0) & (expert < experts), N, 0)
        added += tl.load(parts_ptr + pair * N + columns, mask=columns < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, round_to(added, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < N)
