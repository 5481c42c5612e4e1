"""The block-scaled product on Hopper in tiles of 256 rows, and in wide tiles at each warpgroup's own pace.

As _hopper_kernel.py, with the same roles, ring and scales; a warpgroup has one or two waves of 64 rows
(gemmpipe/templates/hopper/waves.py). Up to 96 columns two products are in flight in addition to the sums; above, one,
and each warpgroup multiplies at its own pace. Programs are persistent. Written in Gluon, which has no
interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from gemmpipe.kernels.a8w8_blockscale._hopper_kernel import WeightScales
from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.pipeline import Ring, advance, allocate_barriers, gdc_wait, producer_warp
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.tile_scheduler import TileSchedule
from gemmpipe.templates.hopper.waves import (
    WholeTiles,
    add_scaled_wave,
    allocate_wave_rings,
    hold_order,
    store_waves,
    wave_count,
    wave_partition,
    wave_scales,
    wgmma_wave,
    whole_tile_place,
    zero_waves,
)
from gemmpipe.templates.hopper.wgmma_any_n import checked_barrier_init_warp, matrix_descriptors, wgmma_slot

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def holds_two_products(columns, waves):
    """True if there are registers for two products of this width in addition to the sums of these waves."""
    return columns * (waves + 2) <= 384


@gluon.constexpr_function
def crosses_blocks(columns, block):
    """True if a tile of so many columns, from a multiple of them on, can have columns of two blocks of w's scales."""
    return block % columns != 0


@gluon.jit
def load_w_scales(w_scales, k, EDGES: gl.constexpr):
    """w's scales of K block k: of the columns before the edge and from there on; the same without EDGES."""
    low = gl.load(w_scales.low_ptr + k)
    high = low
    if EDGES:
        high = gl.load(w_scales.high_ptr + k)
    return low, high


@gluon.jit
def multiply_in_order(
    ring, wg, x_at, w_at, slot, phase, never, w_scales, blocks, WAVES: gl.constexpr, EDGES: gl.constexpr
):
    """The sums of a work tile with one product at a time; returns (slot, phase, sums).

    A wait for a slot that is full already is a branch, over which ptxas moves nothing. Without the one before a product
    it moves additions below, for which registers are missing; without the one after it scales are multiplied between
    the product's instructions, and the other warpgroup's come in between.
    """
    low, high = load_w_scales(w_scales, 0, EDGES)
    sums = zero_waves(wg, WAVES)
    for k in range(blocks):
        next_low, next_high, product = low, high, ()
        for wave in gl.static_range(WAVES):
            if wave == 0:
                mbarrier.wait(ring.full.index(slot), phase)
            else:
                hold_order(never)
            if wave == 0:
                flying = wgmma_slot((), ring, wg, x_at, w_at, slot)
            else:
                flying = wgmma_wave(product, never, ring, wg, x_at, w_at, slot, wave)
            product = warpgroup_mma_wait(0, deps=flying)
            hold_order(never)
            if wave == 0:
                next_low, next_high = load_w_scales(w_scales, gl.minimum(k + 1, blocks - 1), EDGES)
            scales = wave_scales(ring, wg, slot, wave)
            if wave == WAVES - 1:
                mbarrier.arrive(ring.empty.index(slot), count=1)
            sums = add_scaled_wave(sums, product, scales, low, high, w_scales.edge, wave, wg.PARTS, EDGES)
            # No instruction: holds the additions above the next matrix instruction.
            sums = warpgroup_mma_wait(0, deps=sums)
        slot, phase = advance(slot, phase, ring.x.shape[0])
        low, high = next_low, next_high
    return slot, phase, sums


@gluon.jit
def multiply_batch(
    ring, wg, x_at, w_at, slot, phase, sums, product, other, never, w_scales, k,
    WAVES: gl.constexpr, COUNT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Add COUNT K blocks from k on, each wave scaled while the next is multiplied; none is in flight at the end.

    product, other: the registers of the products. Waits as in multiply_in_order. Returns (slot, phase, sums, product,
    other).
    """
    mbarrier.wait(ring.full.index(slot), phase)
    flying = wgmma_wave(product, never, ring, wg, x_at, w_at, slot, 0)
    low, high = load_w_scales(w_scales, k, EDGES)
    for i in gl.static_range(1, COUNT * WAVES):
        next_slot, next_phase, next_low, next_high = slot, phase, low, high
        if i % WAVES == 0:
            next_slot, next_phase = advance(slot, phase, ring.x.shape[0])
            mbarrier.wait(ring.full.index(next_slot), next_phase)
        else:
            hold_order(never)
        newer = wgmma_wave(other, never, ring, wg, x_at, w_at, next_slot, i % WAVES)
        other = warpgroup_mma_wait(1, deps=flying)
        hold_order(never)
        if i % WAVES == 0:
            next_low, next_high = load_w_scales(w_scales, k + i // WAVES, EDGES)
        scales = wave_scales(ring, wg, slot, (i - 1) % WAVES)
        if i % WAVES == 0:
            mbarrier.arrive(ring.empty.index(slot), count=1)
        sums = add_scaled_wave(sums, other, scales, low, high, w_scales.edge, (i - 1) % WAVES, wg.PARTS, EDGES)
        # No instruction: holds the additions above the next matrix instruction.
        sums = warpgroup_mma_wait(1, deps=sums)
        slot, phase, flying, low, high = next_slot, next_phase, newer, next_low, next_high
    product = warpgroup_mma_wait(0, deps=flying)
    hold_order(never)
    scales = wave_scales(ring, wg, slot, WAVES - 1)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    sums = add_scaled_wave(sums, product, scales, low, high, w_scales.edge, WAVES - 1, wg.PARTS, EDGES)
    slot, phase = advance(slot, phase, ring.x.shape[0])
    if COUNT * WAVES % 2 == 0:  # each in its registers: the last product is in those of the second
        product, other = other, product
    return slot, phase, sums, product, other


@gluon.jit
def multiply_in_batches(
    ring, wg, x_at, w_at, slot, phase, never, w_scales, blocks, WAVES: gl.constexpr, BATCH: gl.constexpr,
    EDGES: gl.constexpr,
):  # fmt: skip
    """The sums of a work tile with two products in flight, in batches of BATCH; returns (slot, phase, sums)."""
    sums, product, other = zero_waves(wg, WAVES), zero_waves(wg, 1), zero_waves(wg, 1)
    for batch in range(blocks // BATCH):
        slot, phase, sums, product, other = multiply_batch(
            ring, wg, x_at, w_at, slot, phase, sums, product, other, never, w_scales, batch * BATCH, WAVES, BATCH, EDGES
        )
    for k in range(blocks // BATCH * BATCH, blocks):
        slot, phase, sums, product, other = multiply_batch(
            ring, wg, x_at, w_at, slot, phase, sums, product, other, never, w_scales, k, WAVES, 1, EDGES
        )
    return slot, phase, sums


@gluon.jit
def scales_of_columns(w_scale_ptr, w_scale_stride, column, work, SCALE_BLOCK: gl.constexpr):
    """The WeightScales of a tile's columns from `column` on."""
    block = gl.minimum(column, work.N - 1) // SCALE_BLOCK
    low_ptr = w_scale_ptr + block * w_scale_stride
    high_ptr = w_scale_ptr + gl.minimum(block + 1, (work.N - 1) // SCALE_BLOCK) * w_scale_stride
    return WeightScales(low_ptr, high_ptr, (block + 1) * SCALE_BLOCK - column)


@gluon.jit
def math_warpgroup(
    wg, out, w_scale_ptr, w_scale_stride, ring, work,
    SCALE_BLOCK: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: all columns of its waves."""
    WAVES: gl.constexpr = wave_count(wg.BLOCK_SIZE_M)
    EDGES: gl.constexpr = crosses_blocks(wg.COLUMNS, SCALE_BLOCK)
    slot = 0
    phase = 0
    x_at, w_at = matrix_descriptors(ring, wg)
    never = (work.M < 0).to(gl.int32)
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    for work_id in range(gl.program_id(0), work.tiles_m * work.tiles_n, work.programs):
        row, column = whole_tile_place(work, work_id, wg.BLOCK_SIZE_M, wg.BLOCK_SIZE_N)
        w_scales = scales_of_columns(w_scale_ptr, w_scale_stride, column, work, SCALE_BLOCK)
        if holds_two_products(wg.COLUMNS, WAVES):
            slot, phase, sums = multiply_in_batches(
                ring, wg, x_at, w_at, slot, phase, never, w_scales, work.blocks, WAVES, BATCH, EDGES
            )
        else:
            slot, phase, sums = multiply_in_order(
                ring, wg, x_at, w_at, slot, phase, never, w_scales, work.blocks, WAVES, EDGES
            )
        store_waves(sums, wg, out, ring.stage, row + wg.ROW, column, WAVES)
    tma.store_wait(0)


@gluon.jit
def blockscale_waves(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, READING: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised.

    BATCH: with two products, the K blocks after which nothing is in flight. BUFFERS: a warpgroup's for the output.
    """
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    x_ring, w_ring = allocate_wave_rings(x, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    own = WholeTiles(M, N, tiles_m, tiles_n, blocks, programs, group_m)
    COPIED: gl.constexpr = READING == "copied"
    FOURS: gl.constexpr = READING == "fours"
    FILLERS: gl.constexpr = 1 if COPIED else 2
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # for a loader that does not copy scales
    gl.warp_specialize([
        (math_warpgroup,
         (wave_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, w_scale_ptr, w_scale_stride, ring, own,
          SCALE_BLOCK, BATCH)),
        (math_warpgroup,
         (wave_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, w_scale_ptr, w_scale_stride, ring, own,
          SCALE_BLOCK, BATCH)),
        (producer_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K)) if COPIED else
        (producer_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K)),
        (checked_barrier_init_warp, (ring, SPLIT_K, FILLERS)),
        (cluster_arrive, (SPLIT_K,)) if COPIED else
        (scale_producer_warps, (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, FOURS, SPLIT_K)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
