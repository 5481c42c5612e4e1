"""The block-scaled product on Hopper with more work before the previous kernel has ended.

As _hopper_kernel.py, but `blockscale_prefetched` fetches its TMA descriptors at the start, and the loader of
`blockscale_early_weights`, while it waits for the previous kernel, which must not write w, fills the ring's slots with
the first blocks of w; only x and its scales are copied after the wait. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.kernels.a8w8_blockscale._hopper_kernel import blockscale_warp_specialised, math_warpgroup
from gemmpipe.templates.hopper.epilogue import EpilogueOperands, cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import tma_load
from gemmpipe.templates.hopper.pipeline import (
    Ring,
    advance,
    allocate_barriers,
    barrier_init_warp,
    expect_slot,
    gdc_launch_dependents,
    gdc_wait,
    load_w,
    load_x,
    prefetch_descriptors,
)
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.tile_scheduler import (
    TileSchedule,
    accumulator_parts,
    tile_coord,
    warpgroup_partition,
    work_tile_count,
)
from gemmpipe.templates.hopper.wgmma_any_n import allocate_rings, checked_barrier_init_warp

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.jit
def start_slot(x, w, ring, work, slot, column, k, BLOCK_SIZE_N: gl.constexpr, SCALE_BYTES: gl.constexpr):
    """Announce the bytes of a slot and start the copy of w into it."""
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    bar = ring.full.index(slot)
    expect_slot(bar, x, work.M, W_BYTES + SCALE_BYTES, BLOCK_SIZE_M, BLOCK_SIZE_K)
    load_w(w, ring, slot, column, k * BLOCK_SIZE_K, bar, BLOCK_SIZE_N)


@gluon.jit
def early_producer_warp(
    x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N: gl.constexpr, SPLIT_K: gl.constexpr
):  # fmt: skip
    """pipeline.producer_warp, which starts the first work tile's copies of w before the previous kernel has ended."""
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    SLOTS: gl.constexpr = ring.x.shape[0]
    SCALE_BYTES: gl.constexpr = 0 if ring.scales is None else BLOCK_SIZE_M * 4
    slot = 0
    phase = 1
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        place = tile_coord(work, work_id, BLOCK_SIZE_M, BLOCK_SIZE_N)
        mbarrier.wait(ring.ready, 0)
        started = place.begin
        if work_id == gl.program_id(0):
            started = gl.minimum(place.begin + SLOTS, place.end)
            for k in range(place.begin, started):
                start_slot(x, w, ring, work, k - place.begin, place.column, k, BLOCK_SIZE_N, SCALE_BYTES)
        row = gdc_wait(place.row)
        gdc_launch_dependents()  # not earlier: later kernels would start and occupy this one's multiprocessors
        for k in range(place.begin, place.end):
            if k >= started:
                mbarrier.wait(ring.empty.index(slot), phase)
                start_slot(x, w, ring, work, slot, place.column, k, BLOCK_SIZE_N, SCALE_BYTES)
            bar = ring.full.index(slot)
            load_x(x, ring.x.index(slot), row, k * BLOCK_SIZE_K, work.M, bar)
            if ring.scales is not None:
                tma_load(scales, [k * scale_stride + row], bar, ring.scales.index(slot))
            slot, phase = advance(slot, phase, SLOTS)
    cluster_arrive(SPLIT_K)


@gluon.jit
def blockscale_early_weights(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, READING: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised."""
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    x_ring, w_ring = allocate_rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = EpilogueOperands(out, None, None, None)
    never = M < 0
    COPIED: gl.constexpr = READING == "copied"
    FOURS: gl.constexpr = READING == "fours"
    FILLERS: gl.constexpr = 1 if COPIED else 2
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # for a loader that does not copy scales
    gl.warp_specialize([
        (math_warpgroup,
         (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
          SCALE_BLOCK, SPLIT_K, BATCH)),
        (math_warpgroup,
         (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
          SCALE_BLOCK, SPLIT_K, BATCH)),
        (early_producer_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K)) if COPIED else
        (early_producer_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K)),
        (barrier_init_warp, (ring, SPLIT_K, FILLERS)) if accumulator_parts(COLUMNS) == 1 else
        (checked_barrier_init_warp, (ring, SPLIT_K, FILLERS)),
        (cluster_arrive, (SPLIT_K,)) if COPIED else
        (scale_producer_warps, (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, FOURS, SPLIT_K)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


@gluon.constexpr_function
def descriptor_ranks(x, w, out, copied):
    """The ranks of the descriptors in the order of the parameters; x's scales are the fourth if TMA copies them."""
    return [len(each.block_type.shape) for each in (x, w, out)] + ([1] if copied else [])


@gluon.jit
def blockscale_prefetched(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, READING: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised."""
    RANKS: gl.constexpr = descriptor_ranks(x, w, out, READING == "copied")
    prefetch_descriptors("blockscale_prefetched", RANKS)
    blockscale_warp_specialised(
        x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
        M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES,
        SPLIT_K, REGISTERS, LOADER_REGISTERS, SCALE_BLOCK, BATCH, READING,
    )  # fmt: skip
