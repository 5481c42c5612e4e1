"""The product whose scales do not vary along K on Hopper, warp-specialised: a loader warp, two math warpgroups.

Programs are persistent: the loader fills the ring for the next tile while the warpgroups finish this one. Written in
Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gemmpipe.templates.dense_hopper_columns import parts_of_piece
from gemmpipe.templates.hopper import Ring, after, barriers, load_ring, part_of_w, prepare, wait_for_previous
from gemmpipe.templates.hopper_columns import matrix_descriptors, prepare_rings, rings, zeros
from gemmpipe.templates.hopper_order import Work, pieces_of, place_of
from gemmpipe.templates.hopper_output import Output, leave
from gemmpipe.templates.hopper_share import parts_of, share_of
from gemmpipe.templates.hopper_splits import come_along


@gluon.jit
def sum_blocks(ring, share, slot, phase, acc, blocks: gl.constexpr):
    """Add `blocks` K blocks with two products in flight and none at the end; returns (slot, phase, sum)."""
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(ring.full.index(slot), phase)
        x = ring.x.index(slot).slice(share.ROW, 64)
        w = part_of_w(ring, share, slot)
        flying = warpgroup_mma(x, w, acc, is_async=True)
        if i > 0:
            acc = warpgroup_mma_wait(1, deps=[flying])
            mbarrier.arrive(ring.empty.index(last), count=1)
        else:
            acc = flying
        last = slot
        slot, phase = after(slot, phase, ring.x.shape[0])
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index(last), count=1)
    return slot, phase, acc


@gluon.jit
def sum_of_piece(ring, share, slot, phase, acc, blocks):
    """Add all K blocks of a piece of work; returns (slot, phase, sum).

    They come in batches of four with nothing in flight between batches: over a loop's back edge ptxas would serialise
    every matrix instruction.
    """
    for _ in range(blocks // 4):
        slot, phase, acc = sum_blocks(ring, share, slot, phase, acc, 4)
    for _ in range(blocks // 4 * 4, blocks):
        slot, phase, acc = sum_blocks(ring, share, slot, phase, acc, 1)
    return slot, phase, acc


@gluon.jit
def multiply(share, output, ring, work, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile."""
    SUM: gl.constexpr = gl.int32 if ring.x.dtype == gl.int8 else gl.float32
    slot = 0
    phase = 0
    stage = ring.stage.index(share.GROUP)
    x_at, w_at = matrix_descriptors(ring, share)
    mbarrier.wait(ring.ready, 0)
    wait_for_previous()
    for piece in range(gl.program_id(0), pieces_of(work), work.programs):
        place = place_of(work, piece, share.BLOCK_SIZE_M, share.BLOCK_SIZE_N, share.ROW, share.COLUMN)
        blocks = place.end - place.begin
        sums = zeros(share, SUM)
        if share.PARTS == 1:
            slot, phase, acc = sum_of_piece(ring, share, slot, phase, sums[0], blocks)
            sums = (acc,)
        else:
            slot, phase, sums = parts_of_piece(ring, share, x_at, w_at, slot, phase, sums, blocks)
        leave(sums, share, output, stage, work, piece, place, SPLIT_K, SCALES)
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

    SCALES: `none`, `tensor`, `row`. SPLIT_K: `none`; `last`: the last split to arrive adds them up; `cluster`: all do.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    x_ring, w_ring = rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    ring = Ring(x_ring, w_ring, None, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = Work(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = Output(out, bias_ptr, x_scale_ptr, w_scale_ptr)
    BITS: gl.constexpr = x.dtype.primitive_bitwidth
    gl.warp_specialize([
        (multiply, (share_of(0, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), output, ring, work, SPLIT_K, SCALES)),
        (multiply, (share_of(1, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), output, ring, work, SPLIT_K, SCALES)),
        (load_ring, (x, w, None, 0, ring, work, BLOCK_SIZE_N, SPLIT_K)),
        (prepare, (ring, SPLIT_K)) if parts_of(COLUMNS) == 1 else (prepare_rings, (ring, SPLIT_K)),
        (come_along, (SPLIT_K,)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
