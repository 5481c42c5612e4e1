"""The first copies of a warp-specialised kernel, started before its warps take their roles.

Triton starts the roles about 700 clocks after a kernel's first instruction (two barriers of all warps, registers that
move between them), and the loader copies only when all slots have barriers, some 1,000 clocks later. Here all four
warps of the first role initialise the barriers of the first slots and start their copies before that: the roles start
while the first bytes come from memory. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import tma_load
from gemmpipe.templates.hopper.pipeline import (
    advance,
    expect_slot,
    gdc_launch_dependents,
    gdc_wait,
    load_w,
    load_x,
)
from gemmpipe.templates.hopper.tile_scheduler import tile_coord, work_tile_count

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@gluon.jit
def copy_block(x, w, scales, scale_stride, ring, work, slot, row, column, k, BLOCK_SIZE_N: gl.constexpr):
    """Start the copies of a K block into an empty slot: w first, as it comes from memory, then x and x's scales."""
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    SCALE_BYTES: gl.constexpr = 0 if ring.scales is None else BLOCK_SIZE_M * 4
    bar = ring.full.index(slot)
    expect_slot(bar, x, work.M, W_BYTES + SCALE_BYTES, BLOCK_SIZE_M, BLOCK_SIZE_K)
    load_w(w, ring, slot, column, k * BLOCK_SIZE_K, bar, BLOCK_SIZE_N)
    load_x(x, ring.x.index(slot), row, k * BLOCK_SIZE_K, work.M, bar)
    if ring.scales is not None:
        tma_load(scales, [k * scale_stride + row], bar, ring.scales.index(slot))


@gluon.jit
def start_first_copies(
    x, w, scales, scale_stride, ring, work,
    BLOCK_SIZE_N: gl.constexpr, FILLERS: gl.constexpr, FIRST_SLOTS: gl.constexpr,
):  # fmt: skip
    """Initialise the barriers of the first FIRST_SLOTS slots, and start the copies of the first K blocks into them.

    All warps call it before they take their roles. Every program has a work tile.
    """
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    for i in gl.static_range(FIRST_SLOTS):
        mbarrier.init(ring.full.index(i), count=FILLERS)
        mbarrier.init(ring.empty.index(i), count=2)
    fence_async_shared()
    place = tile_coord(work, gl.program_id(0), BLOCK_SIZE_M, BLOCK_SIZE_N)
    row = gdc_wait(place.row)
    for i in gl.static_range(FIRST_SLOTS):
        if place.begin + i < place.end:
            copy_block(x, w, scales, scale_stride, ring, work, i, row, place.column, place.begin + i, BLOCK_SIZE_N)


@gluon.jit
def init_later_slots_warp(ring, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr, FIRST_SLOTS: gl.constexpr):
    """pipeline.barrier_init_warp, for the slots that start_first_copies leaves."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    for i in gl.static_range(FIRST_SLOTS, SLOTS):
        mbarrier.init(ring.full.index(i), count=FILLERS)
        mbarrier.init(ring.empty.index(i), count=2)
    fence_async_shared()
    mbarrier.arrive(ring.ready, count=1)
    cluster_arrive(SPLIT_K)


@gluon.jit
def later_producer_warp(
    x, w, scales, scale_stride, ring, work,
    BLOCK_SIZE_N: gl.constexpr, SPLIT_K: gl.constexpr, FIRST_SLOTS: gl.constexpr,
):  # fmt: skip
    """pipeline.producer_warp, without the copies that start_first_copies has started."""
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    slot = 0
    phase = 1
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        place = tile_coord(work, work_id, BLOCK_SIZE_M, BLOCK_SIZE_N)
        mbarrier.wait(ring.ready, 0)
        row = gdc_wait(place.row)
        gdc_launch_dependents()
        started = place.begin
        if work_id == gl.program_id(0):
            started = place.begin + FIRST_SLOTS
        for k in range(place.begin, place.end):
            if k >= started:
                mbarrier.wait(ring.empty.index(slot), phase)
                copy_block(x, w, scales, scale_stride, ring, work, slot, row, place.column, k, BLOCK_SIZE_N)
            slot, phase = advance(slot, phase, ring.x.shape[0])
    cluster_arrive(SPLIT_K)
