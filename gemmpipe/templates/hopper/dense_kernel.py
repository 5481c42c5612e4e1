"""The dense product (scales do not vary along K) on Hopper, warp-specialised: a loader warp, two math warpgroups.

Programs are persistent: the loader fills the ring for the next tile while the warpgroups finish this one. Tiles of any
multiple of 16 columns have sums in parts (wgmma_any_n.py). Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gemmpipe.templates.hopper.epilogue import EpilogueOperands, cluster_arrive, store_accumulators
from gemmpipe.templates.hopper.pipeline import (
    Ring,
    advance,
    allocate_barriers,
    barrier_init_warp,
    gdc_wait,
    producer_warp,
    w_operand,
)
from gemmpipe.templates.hopper.tile_scheduler import (
    TileSchedule,
    accumulator_parts,
    tile_coord,
    warpgroup_partition,
    work_tile_count,
)
from gemmpipe.templates.hopper.wgmma_any_n import (
    allocate_rings,
    checked_barrier_init_warp,
    matrix_descriptors,
    wgmma_slot,
    zero_accumulators,
)

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@gluon.jit
def mma_any_n_k_blocks(ring, wg, x_at, w_at, slot, phase, sums, blocks: gl.constexpr):
    """mma_k_blocks for a tile in parts; returns (slot, phase, parts).

    x_at, w_at: descriptors of this warpgroup's rows in the first slots (wgmma_any_n.matrix_descriptors).
    """
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(ring.full.index(slot), phase)
        sums = wgmma_slot(sums, ring, wg, x_at, w_at, slot)
        if i > 0:
            sums = warpgroup_mma_wait(1, deps=sums)
            mbarrier.arrive(ring.empty.index(last), count=1)
        last = slot
        slot, phase = advance(slot, phase, ring.x.shape[0])
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(ring.empty.index(last), count=1)
    return slot, phase, sums


@gluon.jit
def mma_any_n_work_tile(ring, wg, x_at, w_at, slot, phase, sums, blocks):
    """mma_work_tile for a tile in parts; x_at, w_at: as in mma_any_n_k_blocks."""
    for _ in range(blocks // 4):
        slot, phase, sums = mma_any_n_k_blocks(ring, wg, x_at, w_at, slot, phase, sums, 4)
    for _ in range(blocks % 4):
        slot, phase, sums = mma_any_n_k_blocks(ring, wg, x_at, w_at, slot, phase, sums, 1)
    return slot, phase, sums


@gluon.jit
def mma_k_blocks(ring, wg, slot, phase, acc, blocks: gl.constexpr):
    """Add `blocks` K blocks, two products in flight at most and none at the end; returns (slot, phase, sum)."""
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(ring.full.index(slot), phase)
        x = ring.x.index(slot).slice(wg.ROW, 64)
        w = w_operand(ring, wg, slot)
        flying = warpgroup_mma(x, w, acc, is_async=True)
        if i > 0:
            acc = warpgroup_mma_wait(1, deps=[flying])
            mbarrier.arrive(ring.empty.index(last), count=1)
        else:
            acc = flying
        last = slot
        slot, phase = advance(slot, phase, ring.x.shape[0])
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index(last), count=1)
    return slot, phase, acc


@gluon.jit
def mma_work_tile(ring, wg, slot, phase, acc, blocks):
    """Add all K blocks of a work tile; returns (slot, phase, sum).

    In batches of four with nothing in flight between batches: over a loop's back edge ptxas would serialise every
    matrix instruction.
    """
    for _ in range(blocks // 4):
        slot, phase, acc = mma_k_blocks(ring, wg, slot, phase, acc, 4)
    for _ in range(blocks // 4 * 4, blocks):
        slot, phase, acc = mma_k_blocks(ring, wg, slot, phase, acc, 1)
    return slot, phase, acc


@gluon.jit
def math_warpgroup(wg, output, ring, work, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """A math warpgroup: 64 rows of a 128-row tile, or half of the columns of a 64-row tile."""
    SUM: gl.constexpr = gl.int32 if ring.x.dtype == gl.int8 else gl.float32
    slot = 0
    phase = 0
    x_at, w_at = matrix_descriptors(ring, wg)
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        coord = tile_coord(work, work_id, wg.BLOCK_SIZE_M, wg.BLOCK_SIZE_N, wg.ROW, wg.COLUMN)
        blocks = coord.end - coord.begin
        sums = zero_accumulators(wg, SUM)
        if wg.PARTS == 1:
            slot, phase, acc = mma_work_tile(ring, wg, slot, phase, sums[0], blocks)
            sums = (acc,)
        else:
            slot, phase, sums = mma_any_n_work_tile(ring, wg, x_at, w_at, slot, phase, sums, blocks)
        store_accumulators(sums, wg, output, ring.stage, work, work_id, coord, SPLIT_K, SCALES)
    tma.store_wait(0)


@gluon.jit
def dense_warp_specialised(
    x, w, out, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """out = (x @ w^T) * x_scale * w_scale + bias; x, w, out are tensor descriptors.

    SCALES: `none`, `tensor`, `row`. SPLIT_K: `none`; `last`: the last split to arrive adds up all; `cluster`: each a
    share. M, N: sizes; blocks: K blocks; the other integers as in TileSchedule.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    x_ring, w_ring = allocate_rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES)
    ring = Ring(x_ring, w_ring, None, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = EpilogueOperands(out, bias_ptr, x_scale_ptr, w_scale_ptr)
    BITS: gl.constexpr = x.dtype.primitive_bitwidth
    gl.warp_specialize([
        (math_warpgroup,
         (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), output, ring, work, SPLIT_K, SCALES)),
        (math_warpgroup,
         (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), output, ring, work, SPLIT_K, SCALES)),
        (producer_warp, (x, w, None, 0, ring, work, BLOCK_SIZE_N, SPLIT_K)),
        (barrier_init_warp, (ring, SPLIT_K)) if accumulator_parts(COLUMNS) == 1 else
        (checked_barrier_init_warp, (ring, SPLIT_K)),
        (cluster_arrive, (SPLIT_K,)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
