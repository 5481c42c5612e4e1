"""The block-scaled product on Hopper, warp-specialised: a loader warp fills a ring, two warpgroups multiply, or one.

The CUDA cores scale one K block while the matrix instructions of the next run, into a second temporary accumulator;
with registers for one accumulator alone, while those of the other warpgroup run (pingpong). Programs are persistent.
Written in Gluon, which has no interpreter.

Tiles of any multiple of 16 columns have sums in parts (gemmpipe/templates/hopper/wgmma_any_n.py). Such a tile may have
columns of two blocks of w's scales: every part takes its own block's. Tiles of up to 96 columns have two products in
addition to the sums, as tiles in one part; wider ones have one, and the warpgroups multiply in turns.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gemmpipe.templates.hopper.epilogue import EpilogueOperands, store_accumulators
from gemmpipe.templates.hopper.pipeline import (
    Ring,
    advance,
    allocate_barriers,
    gdc_wait,
    producer_warp,
    w_operand,
)
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.tile_scheduler import (
    TileSchedule,
    accumulator_parts,
    single_warpgroup_partition,
    tile_coord,
    warpgroup_partition,
    work_tile_count,
)
from gemmpipe.templates.hopper.wgmma_any_n import (
    allocate_rings,
    init_share_warp,
    matrix_descriptors,
    pingpong_begin,
    pingpong_end,
    wgmma_pingpong,
    wgmma_slot,
    zero_accumulators,
)

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


class WeightScales(NamedTuple):
    """w's scales along K of a tile's columns before `edge`, and of those from there on."""

    low_ptr: gl.tensor
    high_ptr: gl.tensor
    edge: gl.tensor


@gluon.constexpr_function
def uses_pingpong(columns):
    """True if a warpgroup's tile of this width leaves no registers for a second product."""
    return accumulator_parts(columns) > 1 and columns > 96


@gluon.jit
def start_any_n_block(ring, wg, x_at, w_at, slot, phase):
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    x_at, w_at: descriptors of this warpgroup's rows in the first slots (wgmma_any_n.matrix_descriptors).
    """
    mbarrier.wait(ring.full.index(slot), phase)
    scales = ring.scales.index(slot).slice(wg.ROW, 64).load(gl.SliceLayout(1, wg.LAYOUT))
    return scales, wgmma_slot((), ring, wg, x_at, w_at, slot)


@gluon.jit
def add_scaled(sums, product, scales, low, high, edge, PARTS: gl.constexpr):
    """sums + product, scaled; low and high: w's scales of the columns before `edge` and from there on."""
    lows, highs = scales * low, scales * high
    total = ()
    for j in gl.static_range(PARTS):
        scale = gl.where(j * product[j].shape[1] < edge, lows, highs)
        total += (sums[j] + product[j] * scale[:, None],)
    return total


@gluon.jit
def finish_any_n_block(sums, flying, scales, low, high, edge, ring, slot, IN_FLIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Wait for the older product in flight, release its slot, add it (see `add_scaled`); returns the sums."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=flying)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    total = add_scaled(sums, product, scales, low, high, edge, PARTS)
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=total)


@gluon.jit
def scaled_mma_batch(ring, wg, x_at, w_at, slot, phase, sums, w_scales, k, COUNT: gl.constexpr):
    """Add COUNT K blocks from k on, each scaled while the next is multiplied, with none in flight at the end.

    The first block's scales are loaded before its slot is waited for, as a tile's come from memory; others when their
    product starts: they are needed a product's time later. Returns (slot, phase, sums).
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    edge = w_scales.edge
    low, high = gl.load(w_scales.low_ptr + k), gl.load(w_scales.high_ptr + k)
    scales, flying = start_any_n_block(ring, wg, x_at, w_at, slot, phase)
    for i in gl.static_range(1, COUNT):
        next_slot, phase = advance(slot, phase, SLOTS)
        next_scales, newer = start_any_n_block(ring, wg, x_at, w_at, next_slot, phase)
        next_low, next_high = gl.load(w_scales.low_ptr + k + i), gl.load(w_scales.high_ptr + k + i)
        sums = finish_any_n_block(sums, flying, scales, low, high, edge, ring, slot, 1, wg.PARTS)
        slot, flying, scales, low, high = next_slot, newer, next_scales, next_low, next_high
    sums = finish_any_n_block(sums, flying, scales, low, high, edge, ring, slot, 0, wg.PARTS)
    slot, phase = advance(slot, phase, SLOTS)
    return slot, phase, sums


@gluon.jit
def scaled_mma_any_n_work_tile(ring, wg, x_at, w_at, slot, phase, w_scales, begin, end, BATCH: gl.constexpr):
    """scaled_mma_work_tile for a tile in parts, in batches of BATCH; returns (slot, phase, parts)."""
    sums = zero_accumulators(wg, gl.float32)
    for batch in range((end - begin) // BATCH):
        k = begin + batch * BATCH
        slot, phase, sums = scaled_mma_batch(ring, wg, x_at, w_at, slot, phase, sums, w_scales, k, BATCH)
    for k in range(end - (end - begin) % BATCH, end):
        slot, phase, sums = scaled_mma_batch(ring, wg, x_at, w_at, slot, phase, sums, w_scales, k, 1)
    return slot, phase, sums


@gluon.jit
def scaled_mma_pingpong(ring, wg, x_at, w_at, slot, phase, w_scales, begin, end, last):
    """scaled_mma_any_n_work_tile in turns with the other warpgroup: nothing is in flight between K blocks."""
    low, high = gl.load(w_scales.low_ptr + begin), gl.load(w_scales.high_ptr + begin)
    sums = zero_accumulators(wg, gl.float32)
    for k in range(begin, end):
        mbarrier.wait(ring.full.index(slot), phase)
        scales = ring.scales.index(slot).slice(wg.ROW, 64).load(gl.SliceLayout(1, wg.LAYOUT))
        following = gl.minimum(k + 1, last)
        next_low, next_high = gl.load(w_scales.low_ptr + following), gl.load(w_scales.high_ptr + following)
        product = wgmma_pingpong(ring, wg, x_at, w_at, slot)
        mbarrier.arrive(ring.empty.index(slot), count=1)
        sums = add_scaled(sums, product, scales, low, high, w_scales.edge, wg.PARTS)
        slot, phase = advance(slot, phase, ring.x.shape[0])
        low, high = next_low, next_high
    return slot, phase, sums


@gluon.jit
def start_block(ring, wg, slot, phase, product, never):
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    `never` is false, but not for the compiler: with a literal False it moves the scaling below the next matrix
    instruction, for which registers are missing.
    """
    mbarrier.wait(ring.full.index(slot), phase)
    scales = ring.scales.index(slot).slice(wg.ROW, 64).load(gl.SliceLayout(1, wg.LAYOUT))
    x = ring.x.index(slot).slice(wg.ROW, 64)
    w = w_operand(ring, wg, slot)
    return scales, warpgroup_mma(x, w, product, use_acc=never, is_async=True)


@gluon.jit
def finish_block(acc, flying, scales, w_scale, ring, slot, IN_FLIGHT: gl.constexpr):
    """Wait for the older product in flight, release its slot, add it scaled; returns (sum, the product's registers)."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=[flying])
    mbarrier.arrive(ring.empty.index(slot), count=1)
    acc += product * (scales * w_scale)[:, None]
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=[acc]), product


@gluon.jit
def load_four_scales(w_scales, k, last):
    """The weight's scales of K blocks k to k + 3; past the last block the last one's, unused."""
    return (
        gl.load(w_scales + gl.minimum(k, last)),
        gl.load(w_scales + gl.minimum(k + 1, last)),
        gl.load(w_scales + gl.minimum(k + 2, last)),
        gl.load(w_scales + gl.minimum(k + 3, last)),
    )


@gluon.jit
def scaled_mma_four(ring, wg, slot0, phase, acc, d0, d1, four, w_scales, begin, batch, last, never):
    """Add four K blocks, each scaled while the next is multiplied into the other of d0, d1; none in flight at the end.

    `four` are their scales; those of the next batch, of a work tile from K block `begin` on, are loaded during the
    first product, which hides their latency. Returns (the next four scales, slot, phase, sum, d0, d1).
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    s0, f0 = start_block(ring, wg, slot0, phase, d0, never)
    after_four = load_four_scales(w_scales, begin + batch * 4 + 4, last)
    slot1, phase = advance(slot0, phase, SLOTS)
    s1, f1 = start_block(ring, wg, slot1, phase, d1, never)
    acc, d0 = finish_block(acc, f0, s0, four[0], ring, slot0, 1)
    slot0, phase = advance(slot1, phase, SLOTS)
    s0, f0 = start_block(ring, wg, slot0, phase, d0, never)
    acc, d1 = finish_block(acc, f1, s1, four[1], ring, slot1, 1)
    slot1, phase = advance(slot0, phase, SLOTS)
    s1, f1 = start_block(ring, wg, slot1, phase, d1, never)
    acc, d0 = finish_block(acc, f0, s0, four[2], ring, slot0, 1)
    acc, d1 = finish_block(acc, f1, s1, four[3], ring, slot1, 0)
    slot0, phase = advance(slot1, phase, SLOTS)
    return after_four, slot0, phase, acc, d0, d1


@gluon.jit
def scaled_mma_work_tile(ring, wg, slot, phase, d0, d1, w_scales, begin, end, last, never):
    """Add the K blocks of a work tile; returns (slot, phase, sum, d0, d1).

    Batches of four, then the rest up to `end`, with nothing in flight in between: over a loop's back edge ptxas would
    serialise every matrix instruction.
    """
    four = load_four_scales(w_scales, begin, last)
    acc = gl.zeros([64, wg.COLUMNS], gl.float32, wg.LAYOUT)
    for batch in range((end - begin) // 4):
        four, slot, phase, acc, d0, d1 = scaled_mma_four(
            ring, wg, slot, phase, acc, d0, d1, four, w_scales, begin, batch, last, never
        )
    for i in range((end - begin) % 4):
        w_scale = gl.where(i == 0, four[0], gl.where(i == 1, four[1], four[2]))  # loaded with the last batch
        scales, flying = start_block(ring, wg, slot, phase, d0, never)
        acc, d0 = finish_block(acc, flying, scales, w_scale, ring, slot, 0)
        slot, phase = advance(slot, phase, ring.x.shape[0])
    return slot, phase, acc, d0, d1


@gluon.jit
def scaled_mma_tile(
    ring, wg, x_at, w_at, slot, phase, d0, d1, w_scale_ptr, w_scale_stride, work, coord, never,
    SCALE_BLOCK: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """Add a work tile's K blocks, by the method for its number of columns; returns (slot, phase, parts, d0, d1)."""
    begin, end, last = coord.begin, coord.end, work.blocks - 1
    if wg.PARTS == 1:
        w_scales = w_scale_ptr + gl.minimum(coord.column, work.N - 1) // SCALE_BLOCK * w_scale_stride
        slot, phase, acc, d0, d1 = scaled_mma_work_tile(
            ring, wg, slot, phase, d0, d1, w_scales, begin, end, last, never
        )
        sums = (acc,)
    else:
        block = gl.minimum(coord.column, work.N - 1) // SCALE_BLOCK
        low_ptr = w_scale_ptr + block * w_scale_stride
        high_ptr = w_scale_ptr + gl.minimum(block + 1, (work.N - 1) // SCALE_BLOCK) * w_scale_stride
        w_scales = WeightScales(low_ptr, high_ptr, (block + 1) * SCALE_BLOCK - coord.column)
        if uses_pingpong(wg.COLUMNS):
            slot, phase, sums = scaled_mma_pingpong(ring, wg, x_at, w_at, slot, phase, w_scales, begin, end, last)
        else:
            slot, phase, sums = scaled_mma_any_n_work_tile(
                ring, wg, x_at, w_at, slot, phase, w_scales, begin, end, BATCH
            )
    return slot, phase, sums, d0, d1


@gluon.jit
def math_warpgroup(
    wg, output, w_scale_ptr, w_scale_stride, ring, work, never,
    SCALE_BLOCK: gl.constexpr, SPLIT_K: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: 64 rows of a 128-row tile; of 64 rows half of the columns, or all if it is the only one."""
    TURNS: gl.constexpr = uses_pingpong(wg.COLUMNS)
    slot = 0
    phase = 0
    d0 = gl.zeros([64, wg.WIDTH], gl.float32, wg.LAYOUT)
    d1 = gl.zeros([64, wg.WIDTH], gl.float32, wg.LAYOUT)
    x_at, w_at = matrix_descriptors(ring, wg)
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    if TURNS:
        pingpong_begin(wg.GROUP)
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        coord = tile_coord(work, work_id, wg.BLOCK_SIZE_M, wg.BLOCK_SIZE_N, wg.ROW, wg.COLUMN)
        slot, phase, sums, d0, d1 = scaled_mma_tile(
            ring, wg, x_at, w_at, slot, phase, d0, d1, w_scale_ptr, w_scale_stride, work, coord, never,
            SCALE_BLOCK, BATCH,
        )  # fmt: skip
        store_accumulators(sums, wg, output, ring.stage, work, work_id, coord, SPLIT_K, "none")
    if TURNS:
        pingpong_end(wg.GROUP)
    tma.store_wait(0)


@gluon.jit
def run_two_warpgroups(
    x, w, output, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, ring, bare, work, never,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, COLUMNS: gl.constexpr, SPLIT_K: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, BATCH: gl.constexpr,
    COPIED: gl.constexpr, FOURS: gl.constexpr,
):  # fmt: skip
    """All warps, with two math warpgroups. bare: the ring for a loader that does not copy scales."""
    if COPIED:
        gl.warp_specialize([
            (math_warpgroup,
             (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work,
              never, SCALE_BLOCK, SPLIT_K, BATCH)),
            (math_warpgroup,
             (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work,
              never, SCALE_BLOCK, SPLIT_K, BATCH)),
            (producer_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K)),
            # One role fills a slot, two warpgroups empty it; each of three warps initialises a third.
            (init_share_warp, (ring, COLUMNS, SPLIT_K, 1, 2, 0, 3)),
            (init_share_warp, (ring, COLUMNS, SPLIT_K, 1, 2, 1, 3)),
            (init_share_warp, (ring, COLUMNS, SPLIT_K, 1, 2, 2, 3)),
        ], [4, 1, 1, 1, 1],
           [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_warpgroup,
             (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work,
              never, SCALE_BLOCK, SPLIT_K, BATCH)),
            (math_warpgroup,
             (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work,
              never, SCALE_BLOCK, SPLIT_K, BATCH)),
            (producer_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K)),
            (init_share_warp, (ring, COLUMNS, SPLIT_K, 2, 2, 0, 1)),  # two roles fill a slot; one warp initialises all
            (scale_producer_warps,
             (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, FOURS, SPLIT_K)),
        ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


@gluon.jit
def run_one_warpgroup(
    x, w, output, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, ring, bare, work, never,
    BLOCK_SIZE_N: gl.constexpr, SPLIT_K: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, COPIED: gl.constexpr, FOURS: gl.constexpr,
):  # fmt: skip
    """All warps, with one math warpgroup, which has the registers that the others leave; see run_two_warpgroups."""
    if COPIED:
        gl.warp_specialize([
            (math_warpgroup,
             (single_warpgroup_partition(BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
              SCALE_BLOCK, SPLIT_K, BATCH)),
            (producer_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 1, 1, 0, 3)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 1, 1, 1, 3)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 1, 1, 2, 3)),
        ], [1, 1, 1, 1], [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_warpgroup,
             (single_warpgroup_partition(BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
              SCALE_BLOCK, SPLIT_K, BATCH)),
            (producer_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 2, 1, 0, 1)),
            (scale_producer_warps,
             (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, FOURS, SPLIT_K)),
        ], [1, 1, 2], [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


@gluon.jit
def blockscale_warp_specialised(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr, BATCH: gl.constexpr, READING: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; x, w and out are tensor descriptors.

    SPLIT_K: as in dense_kernel.dense_warp_specialised. BUFFERS: constraints.stage_buffers. BATCH: for
    tiles in parts with two products, the K blocks after which nothing is in flight. READING: the load mode of x's
    scales; scale_stride is between K blocks, scale_row_stride between rows. `copied`: by TMA, M-major; `scales` is a
    descriptor of them as one row. `fours` and `strided`: by two warps (scales.scale_producer_warps); `scales` is a
    pointer. WARPGROUPS: those that multiply, two, or one for tiles of 64 rows.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // (64 * WARPGROUPS)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    x_ring, w_ring = allocate_rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = gl.allocate_shared_memory(out.dtype, [WARPGROUPS * BUFFERS, 64, out.block_type.shape[1]], out.layout)
    COPIED: gl.constexpr = READING == "copied"
    FOURS: gl.constexpr = READING == "fours"
    full, empty, ready = allocate_barriers(STAGES, 3 if COPIED else 1)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = EpilogueOperands(out, None, None, None)
    never = M < 0
    if WARPGROUPS == 1:
        run_one_warpgroup(
            x, w, output, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, ring, bare, work, never,
            BLOCK_SIZE_N, SPLIT_K, LOADER_REGISTERS, SCALE_BLOCK, BATCH, COPIED, FOURS,
        )  # fmt: skip
    else:
        run_two_warpgroups(
            x, w, output, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, ring, bare, work, never,
            BLOCK_SIZE_M, BLOCK_SIZE_N, COLUMNS, SPLIT_K, REGISTERS, LOADER_REGISTERS, SCALE_BLOCK, BATCH, COPIED,
            FOURS,
        )  # fmt: skip
