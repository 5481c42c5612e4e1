"""The first product of the experts on Hopper without x's rows at their places: the loader warps gather each block's.

As _grouped.py, with x's rows and block scales copied to a slot by cp.async from where they lie; w comes by TMA. The
second product and the sum are those of _grouped.py. Written in Gluon, which has no interpreter.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.kernels.fmoe._grouped import (
    GroupedEpilogue,
    GroupedWork,
    WarpgroupExchange,
    epilogue_kind,
    math_warpgroup,
    warpgroup_exchange,
)
from gemmpipe.kernels.fmoe._order import order_pairs, rank_pairs
from gemmpipe.kernels.fmoe._sorted import gdc_wait_and_launch
from gemmpipe.templates.hopper.gluon_compat import copy_to_shared, tma_load
from gemmpipe.templates.hopper.pipeline import (
    Ring,
    advance,
    allocate_barriers,
    gdc_launch_dependents,
    gdc_wait,
    init_slot_barriers,
)
from gemmpipe.templates.hopper.tile_scheduler import swizzled_tile, warpgroup_partition
from gemmpipe.templates.quantise_kernel import quantise_tile

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@triton.jit
def quantise_groups(
    x_ptr, out_ptr, scale_ptr, program, groups,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[group, GROUP] and scale[group] of GROUPS groups of x [groups, GROUP]: the largest magnitude over TOP."""
    gdc_wait_and_launch(INTERPRETED)
    group = program * GROUPS + tl.arange(0, GROUPS)
    at = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = group < groups
    x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0)
    quantised, scale = quantise_tile(x, TOP, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + at, quantised, mask=inside[:, None])
    tl.store(scale_ptr + group, scale, mask=inside)


@triton.jit
def order_and_quantise(
    ids_ptr, counts_ptr, places_ptr, pairs_ptr, sources_ptr, owners_ptr, rows_ptr, blocks_ptr,
    x_ptr, out_ptr, scale_ptr, pairs, experts, share, entries, chunks, groups,
    BINS: tl.constexpr, CHUNK: tl.constexpr, ORDERING: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, FILL: tl.constexpr,
    OVERLAP: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """order_pairs by the first program (`chunks` is 1), quantise_groups by the others."""
    if tl.program_id(0) < chunks:
        order_pairs(
            ids_ptr, counts_ptr, places_ptr, pairs_ptr, sources_ptr, owners_ptr, rows_ptr, blocks_ptr,
            pairs, experts, share, entries, BINS, CHUNK, ORDERING, BLOCK_SIZE_M, FILL, OVERLAP,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - chunks
        quantise_groups(x_ptr, out_ptr, scale_ptr, program, groups, GROUPS, GROUP, TOP, INTERPRETED)


@triton.jit
def rank_and_quantise(
    ids_ptr, counts_ptr, places_ptr, pairs_ptr, x_ptr, out_ptr, scale_ptr,
    pairs, experts, share, entries, chunks, groups,
    BINS: tl.constexpr, CHUNK: tl.constexpr, ORDERING: tl.constexpr, FILL: tl.constexpr, OVERLAP: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """rank_pairs by the first `chunks` programs, quantise_groups by the others."""
    if tl.program_id(0) < chunks:
        rank_pairs(
            ids_ptr, counts_ptr, places_ptr, pairs_ptr, pairs, experts, share, entries,
            BINS, CHUNK, ORDERING, FILL, OVERLAP,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - chunks
        quantise_groups(x_ptr, out_ptr, scale_ptr, program, groups, GROUPS, GROUP, TOP, INTERPRETED)


class GatheredRows(NamedTuple):
    """x [rows, K], its scales [rows, K blocks] or None, and the pair of each place (places of no pair: anything)."""

    x_ptr: gl.tensor
    scale_ptr: gl.tensor
    sources_ptr: gl.tensor
    K: gl.tensor


@gluon.constexpr_function
def copy_layout(dtype, warps):
    """Threads of a copy to slots with rows of 128 bytes: 16 bytes per thread, 4 rows per warp."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def scale_copy_layout(warps):
    """Threads of a copy of a block's scales: one per thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def load_w_boxes(w, place, w_row, k, N, bar, GATED: gl.constexpr):
    """Start the copies of a tile of w; GATED: boxes of the gate's rows and of the up projection's alternate."""
    BOX: gl.constexpr = w.block_type.shape[0]
    for i in gl.static_range(place.shape[0] // BOX):
        if GATED:
            tma_load(w, [w_row + i // 2 * BOX + i % 2 * N, k], bar, place.slice(i * BOX, BOX))
        else:
            tma_load(w, [w_row + i * BOX, k], bar, place.slice(i * BOX, BOX))


@gluon.jit
def gathering_warps(gathered, w, ring, work, GATED: gl.constexpr, TOPK: gl.constexpr, WARPS: gl.constexpr):
    """The loader warps: for each tile and K block, w by TMA, x's rows and scales by cp.async into the next empty slot.

    A slot is full after w's bytes and an arrival of each thread, which the end of its own copies triggers. The copies
    are of the generic proxy: the mainloops of CUTLASS with cp.async and wgmma hand them over in the same way. K is a
    multiple of BLOCK_SIZE_K.
    """
    init_slot_barriers(ring, 1 + 32 * WARPS)
    gdc_wait()
    gdc_launch_dependents()
    SLOTS: gl.constexpr = ring.x.shape[0]
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    BLOCK_SIZE_N: gl.constexpr = ring.w.shape[1]
    WIDTH: gl.constexpr = BLOCK_SIZE_N // 2 if GATED else BLOCK_SIZE_N
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    COPY: gl.constexpr = copy_layout(w.dtype, WARPS)
    slot = 0
    phase = 1
    blocks = gl.load(work.blocks_ptr)
    tiles_n = gl.cdiv(work.N, WIDTH)
    at = gl.arange(0, BLOCK_SIZE_M, gl.SliceLayout(1, COPY))
    columns = gl.arange(0, BLOCK_SIZE_K, gl.SliceLayout(0, COPY))
    scale_at = gl.arange(0, BLOCK_SIZE_M, scale_copy_layout(WARPS))
    for t in range(gl.program_id(0), blocks * tiles_n, work.programs):
        row, tile_n = swizzled_tile(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
        block = row // BLOCK_SIZE_M
        rows = gl.load(work.rows_ptr + block)
        w_row = gl.load(work.owners_ptr + block) * work.w_rows + tile_n * WIDTH
        source = gl.load(gathered.sources_ptr + row + at, mask=at < rows, other=0) // TOPK
        x_at = source[:, None] * gathered.K + columns[None, :]  # in 32 bits: 64 would not fit the registers
        if ring.scales is not None:
            scale_source = gl.load(gathered.sources_ptr + row + scale_at, mask=scale_at < rows, other=0) // TOPK
            scale_ptrs = gathered.scale_ptr + scale_source * work.k_blocks
        for k in range(work.k_blocks):
            mbarrier.wait(ring.empty.index(slot), phase)
            bar = ring.full.index(slot)
            mbarrier.expect(bar, W_BYTES)
            load_w_boxes(w, ring.w.index(slot), w_row, k * BLOCK_SIZE_K, work.N, bar, GATED)
            copy_to_shared(ring.x.index(slot), gathered.x_ptr + (x_at + k * BLOCK_SIZE_K), (at < rows)[:, None])
            if ring.scales is not None:
                copy_to_shared(ring.scales.index(slot), scale_ptrs + k, scale_at < rows)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def gathered_warp_specialised(
    x_ptr, x_scale_ptr, sources_ptr, w, out, w_scale_ptr, out_scale_ptr, zeroed_ptr, owners_ptr, rows_ptr,
    blocks_ptr, N, K, w_rows, capacity, k_blocks, programs, group_m, zeroed,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, TOP: gl.constexpr, FEW: gl.constexpr,
    TOPK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """out[place, N] = act(x[sources[place] // TOPK, K] @ w[the block's expert, w_rows, K]^T) of rows ordered by expert.

    w [experts * w_rows, K] is a tensor descriptor, and out, or with FEW, if a block is mostly padding, a pointer.
    x_scale: [rows of x, K blocks]. SCALES (`none` or `block`), ACTIVATION, GATED, TOP: as grouped_warp_specialised.
    """
    BITS: gl.constexpr = w.dtype.primitive_bitwidth
    X_SLOT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    kind: gl.constexpr = epilogue_kind(SCALES, False, ACTIVATION, GATED, TOP, SCALE_BLOCK, 0)
    x_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], X_SLOT)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    scale_ring = None
    if SCALES == "block":
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = None
    if not FEW:
        stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES)
    pair = WarpgroupExchange(None, None, None)
    if kind.PAIRED:
        pair = warpgroup_exchange(BLOCK_SIZE_N // 2)
    output = GroupedEpilogue(out, w_scale_ptr, None, out_scale_ptr, None, None, zeroed_ptr, zeroed)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    work = GroupedWork(owners_ptr, rows_ptr, blocks_ptr, N, w_rows, capacity, k_blocks, programs, group_m)
    gathered = GatheredRows(x_ptr, x_scale_ptr, sources_ptr, K)
    gl.warp_specialize([
        (math_warpgroup, (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), kind, output, ring, pair, work)),
        (math_warpgroup, (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), kind, output, ring, pair, work)),
        (gathering_warps, (gathered, w, ring, work, GATED, TOPK, WARPS)),
    ], [4, WARPS], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
