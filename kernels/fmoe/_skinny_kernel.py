"""Fused experts of few rows on the CUDA cores, in two launches: no sorting, no quantisation, no sum of parts.

Each pair of a row and an expert is a product of one row. `skinny_up`: h of one pair, with the expert's number read from
the routing itself. `skinny_down`: some columns of one row's output, over all of its experts, so that their sum stays in
registers. fp8 weights are multiplied by 16-bit rows. Programs of the
same columns follow one another, so that rows with the same expert read its weights from L2 but once from memory.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmpipe.kernels.fmoe._kernel import activation
from gemmpipe.templates.device_fns import load_k, round_to


@triton.jit
def pieces(BLOCK_SIZE_K: tl.constexpr, VECTOR: tl.constexpr):
    """[BLOCK_SIZE_K / VECTOR, VECTOR]: offsets along K; a thread takes whole rows of VECTOR elements, of 16 bytes."""
    return (tl.arange(0, BLOCK_SIZE_K // VECTOR) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]


@triton.jit
def block_scale_rows(
    w_scale_ptr, expert, row, columns, w_rows, K: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr
):
    """[columns, 1] pointers to the first scales along K of the rows of w from `row` on; UNIFORM: [1, 1], all alike."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    at = row + columns
    if UNIFORM:
        at = tl.min(columns, 0) + row + tl.arange(0, 1)
    return (w_scale_ptr + expert * tl.cdiv(w_rows, GROUP) * GROUPS + at // GROUP * GROUPS)[:, None]


@triton.jit
def add_products(
    acc, x, w_ptrs, w_scales, k, ks, K: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """acc [columns, pieces] + the sums over each piece of a K block of x [pieces, VECTOR] * w, times block scales."""
    w = load_k(w_ptrs + k, ks[None, :, :], K - k, EVEN_K, CACHE).to(tl.float32)
    part = tl.sum(x[None, :, :] * w, axis=2)
    if SCALES == "block":
        group = tl.minimum(k + tl.arange(0, x.shape[0]) * x.shape[1], K - 1) // GROUP
        part *= tl.load(w_scales + group[None, :])
    return acc + part


@triton.jit
def finish_pair(
    gate, up, w_scale_ptr, shares_ptr, pair, w_row, columns, N,
    SCALES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums of a pair times the scales of whole rows of w and its share, activated; GATED: act(gate) * up."""
    if SCALES == "row":
        gate *= tl.load(w_scale_ptr + w_row + columns)
        if GATED:
            up *= tl.load(w_scale_ptr + w_row + N + columns)
    if shares_ptr is not None:
        share = tl.load(shares_ptr + pair)
        gate *= share
        up *= share
    gate = activation(gate, ACTIVATION)
    if GATED:
        gate *= up
    return gate


@triton.jit
def skinny_up(
    x_ptr, w_ptr, w_scale_ptr, shares_ptr, ids_ptr, out_ptr, N, w_rows, experts,
    K: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, VECTOR: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, CACHE: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out[pair, N] = act(x[pair // TOPK, K] @ w[the pair's expert, w_rows, K]^T), times the up projection if GATED.

    shares_ptr, if any: both are multiplied by the pair's share before the activation. Pairs whose expert is not in
    [0, experts) are left as they are.
    """
    EVEN_K: tl.constexpr = K % BLOCK_SIZE_K == 0
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pair, first = tl.program_id(0), tl.program_id(1) * BLOCK_SIZE_N
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    # Columns past the end wrap around instead of being masked: their results are never stored.
    columns = (first + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = pieces(BLOCK_SIZE_K, VECTOR)
    x_ptr += (pair // TOPK).to(tl.int64) * K
    w_ptrs = w_ptr + expert * w_rows * K + columns.to(tl.int64)[:, None, None] * K + ks[None, :, :]
    up_ptrs = w_ptrs + N.to(tl.int64) * K if GATED else w_ptrs
    gate_scales, up_scales = w_ptr, w_ptr  # never read unless scales vary along K
    if SCALES == "block":
        gate_scales = block_scale_rows(w_scale_ptr, expert, 0, columns, w_rows, K, GROUP, UNIFORM)
        up_scales = block_scale_rows(w_scale_ptr, expert, N, columns, w_rows, K, GROUP, UNIFORM)
    gate = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_K // VECTOR), tl.float32)
    up = gate
    for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
        x = load_k(x_ptr + k + ks, ks, K - k, EVEN_K, "").to(tl.float32)
        gate = add_products(gate, x, w_ptrs, gate_scales, k, ks, K, EVEN_K, GROUP, SCALES, CACHE)
        if GATED:
            up = add_products(up, x, up_ptrs, up_scales, k, ks, K, EVEN_K, GROUP, SCALES, CACHE)
    total = finish_pair(
        tl.sum(gate, axis=1), tl.sum(up, axis=1), w_scale_ptr, shares_ptr, pair, expert * w_rows, columns, N,
        SCALES, ACTIVATION, GATED,
    )  # fmt: skip
    stored = first + tl.arange(0, BLOCK_SIZE_N)
    out_ptr += pair.to(tl.int64) * N
    tl.store(out_ptr + stored, round_to(total, out_ptr.dtype.element_ty, INTERPRETED), mask=stored < N)


@triton.jit
def skinny_down(
    x_ptr, w_ptr, w_scale_ptr, shares_ptr, ids_ptr, out_ptr, N, experts,
    K: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, VECTOR: tl.constexpr, TOPK: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, CACHE: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[row, N] = the sum over the row's TOPK pairs of share * x[pair, K] @ w[the pair's expert, N, K]^T.

    Without shares_ptr all shares are 1. Pairs whose expert is not in [0, experts) add nothing.
    """
    EVEN_K: tl.constexpr = K % BLOCK_SIZE_K == 0
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK_SIZE_N
    columns = (first + tl.arange(0, BLOCK_SIZE_N)) % N
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    ks = pieces(BLOCK_SIZE_K, VECTOR)
    total = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_K // VECTOR), tl.float32)
    for i in tl.static_range(TOPK):
        pair = row * TOPK + i
        expert = tl.load(ids_ptr + pair)
        known = (expert >= 0) & (expert < experts)
        expert = tl.where(known, expert, 0).to(tl.int64)
        end = tl.where(known, K, 0)
        x_row = x_ptr + pair.to(tl.int64) * K
        w_ptrs = w_ptr + expert * N * K + columns.to(tl.int64)[:, None, None] * K + ks[None, :, :]
        w_scales = w_ptr
        if SCALES == "block":
            w_scales = block_scale_rows(w_scale_ptr, expert, 0, columns, N, K, GROUP, UNIFORM)
        part = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_K // VECTOR), tl.float32)
        for k in tl.range(0, K, BLOCK_SIZE_K, num_stages=STAGES):
            x = tl.load(x_row + k + ks, mask=k + ks < end, other=0.0).to(tl.float32)
            part = add_products(part, x, w_ptrs, w_scales, k, ks, K, EVEN_K, GROUP, SCALES, CACHE)
        if shares_ptr is not None:
            part *= tl.load(shares_ptr + pair)
        if SCALES == "row":
            part *= tl.load(w_scale_ptr + expert * N + columns)[:, None]
        total += part
    added = tl.sum(total, axis=1)
    stored = first + tl.arange(0, BLOCK_SIZE_N)
    out_ptr += row.to(tl.int64) * N
    tl.store(out_ptr + stored, round_to(added, out_ptr.dtype.element_ty, INTERPRETED), mask=stored < N)
