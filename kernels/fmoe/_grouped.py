"""The product of rows sorted by expert on Hopper, warp-specialised: a loader warp, two math warpgroups.

Programs are persistent; how many blocks of rows there are, and whose each is, they read from memory. Written in Gluon,
which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gemmpipe.kernels.a8w8_blockscale._warp_specialised import sum_of_piece as scaled_sum
from gemmpipe.kernels.fmoe._grouped_output import finished, quantised_pair, store_block
from gemmpipe.templates.dense_hopper import sum_of_piece as plain_sum
from gemmpipe.templates.gluon_names import tma_load
from gemmpipe.templates.hopper import (
    accumulator,
    after,
    barriers,
    begin_slots,
    let_next_start,
    wait_for_previous,
)
from gemmpipe.templates.hopper_order import tile_at


@gluon.jit
def owner_of(t, owners_ptr, blocks, tiles_n, group_m, BLOCK_SIZE_M: gl.constexpr):
    """The expert of tile t; of one that is past the last, 0."""
    row, _ = tile_at(gl.minimum(t, blocks * tiles_n - 1), blocks * BLOCK_SIZE_M, blocks, tiles_n, group_m, BLOCK_SIZE_M)
    return gl.load(owners_ptr + row // BLOCK_SIZE_M, mask=t < blocks * tiles_n, other=0)


@gluon.jit
def load_x(x, place, row, k, rows, bar, REST_BYTES: gl.constexpr):
    """Start the copy of a block's rows; where boxes are smaller than a block, without those that hold no row.

    Rows that are not copied are whatever the slot held before; their results are never read. The slot is full after
    these copies and REST_BYTES of others.
    """
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = ROWS * x.block_type.shape[1] * x.dtype.primitive_bitwidth // 8
    if place.shape[0] == ROWS:
        mbarrier.expect(bar, REST_BYTES + BYTES)
        tma_load(x, [row, k], bar, place)
    else:
        for i in gl.static_range(place.shape[0] // ROWS):
            last = (i * ROWS < rows) & ((i + 1) * ROWS >= rows)
            mbarrier.expect(bar, REST_BYTES + (i + 1) * BYTES, pred=last)
        for i in gl.static_range(place.shape[0] // ROWS):
            tma_load(x, [row + i * ROWS, k], bar, place.slice(i * ROWS, ROWS), pred=i * ROWS < rows)


@gluon.jit
def load_blocks(
    x, w, scales, x_ring, w_ring, scale_ring, full, empty, ready, owners_ptr, rows_ptr, blocks_ptr,
    N, w_rows, capacity, depth, programs, group_m,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SCALED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The loader warp: for each tile and K block, x and w (SCALED: and x's scales) into the next empty slot.

    GATED: boxes of the gate's rows and of the up side's take turns.
    """
    begin_slots(full, empty, ready, STAGES)
    wait_for_previous()
    let_next_start()
    slot = 0
    phase = 1
    WIDTH: gl.constexpr = BLOCK_SIZE_N // 2 if GATED else BLOCK_SIZE_N
    BOX: gl.constexpr = w.block_type.shape[0]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    REST_BYTES: gl.constexpr = W_BYTES + (BLOCK_SIZE_M * 4 if SCALED else 0)
    blocks = gl.load(blocks_ptr)
    tiles_n = gl.cdiv(N, WIDTH)
    for t in range(gl.program_id(0), blocks * tiles_n, programs):
        row, tile_n = tile_at(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, group_m, BLOCK_SIZE_M)
        block = row // BLOCK_SIZE_M
        rows = gl.load(rows_ptr + block)
        w_row = gl.load(owners_ptr + block) * w_rows + tile_n * WIDTH
        for k in range(depth):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            load_x(x, x_ring.index(slot), row, k * BLOCK_SIZE_K, rows, bar, REST_BYTES)
            for i in gl.static_range(BLOCK_SIZE_N // BOX):
                w_place = w_ring.index(slot).slice(i * BOX, BOX)
                if GATED:
                    tma_load(w, [w_row + i // 2 * BOX + i % 2 * N, k * BLOCK_SIZE_K], bar, w_place)
                else:
                    tma_load(w, [w_row + i * BOX, k * BLOCK_SIZE_K], bar, w_place)
            if SCALED:
                tma_load(scales, [k * capacity + row], bar, scale_ring.index(slot))
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def sum_of_tile(
    x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, w_scale_ptr, expert, w_row, w_rows, depth, never,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A tile's product over all of K, SCALED by block (of w's rows from `w_row` on) or not at all.

    Returns (slot, phase, sum, d0, d1).
    """
    if SCALED:
        blocks = expert * gl.cdiv(w_rows, SCALE_BLOCK) + gl.minimum(w_row, w_rows - 1) // SCALE_BLOCK
        w_scales = w_scale_ptr + blocks * depth
        slot, phase, total, d0, d1 = scaled_sum(
            x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, w_scales, 0, depth, depth - 1, never,
            ROW, COLUMN, COLUMNS, TILE, STAGES,
        )  # fmt: skip
    else:
        acc = gl.zeros([64, COLUMNS], gl.float32, TILE)
        slot, phase, total = plain_sum(
            x_ring, w_ring, full, empty, slot, phase, acc, depth, ROW, COLUMN, COLUMNS, STAGES
        )
    return slot, phase, total, d0, d1


@gluon.jit
def multiply_blocks(
    GROUP: gl.constexpr, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, x_ring, w_ring, scale_ring, out_stage,
    swap, maxima, meetings, full, empty, ready, owners_ptr, rows_ptr, blocks_ptr,
    N, w_rows, capacity, depth, programs, group_m,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    SCALES: gl.constexpr, ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    PAIRED: gl.constexpr, TOP: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile.

    PAIRED: that half is the gate's in one and the up side's in the other, as each side has its own scales along K.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    ROW: gl.constexpr = GROUP * 64 if BLOCK_SIZE_M == 128 else 0
    COLUMN: gl.constexpr = 0 if BLOCK_SIZE_M == 128 else GROUP * COLUMNS
    SIDES: gl.constexpr = 2 if GATED else 1
    DEPTH: gl.constexpr = 256 // x_ring.dtype.primitive_bitwidth
    TILE: gl.constexpr = accumulator(COLUMNS, DEPTH)
    HALF: gl.constexpr = accumulator(COLUMNS // SIDES, DEPTH)
    slot = 0
    phase = 0
    turn = 0
    d0 = gl.zeros([64, COLUMNS], gl.float32, TILE)
    d1 = gl.zeros([64, COLUMNS], gl.float32, TILE)
    mbarrier.wait(ready, 0)
    wait_for_previous()
    blocks = gl.load(blocks_ptr)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N // SIDES)
    never = N < 0
    following = owner_of(gl.program_id(0), owners_ptr, blocks, tiles_n, group_m, BLOCK_SIZE_M)
    for t in range(gl.program_id(0), blocks * tiles_n, programs):
        # Whose the next tile is, is asked for now: the latency would show before that tile's first scales.
        expert = following
        following = owner_of(t + programs, owners_ptr, blocks, tiles_n, group_m, BLOCK_SIZE_M)
        row, tile_n = tile_at(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, group_m, BLOCK_SIZE_M)
        rows = gl.load(rows_ptr + row // BLOCK_SIZE_M)
        column = (tile_n * BLOCK_SIZE_N + COLUMN) // SIDES
        w_row = tile_n * COLUMNS + GROUP * N if PAIRED else column
        slot, phase, total, d0, d1 = sum_of_tile(
            x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, w_scale_ptr, expert, w_row, w_rows, depth,
            never, ROW, COLUMN, COLUMNS, TILE, STAGES, SCALE_BLOCK, SCALES == "block",
        )  # fmt: skip
        if PAIRED:
            scale_ptr = out_scale_ptr + tile_n * capacity + row
            total = quantised_pair(GROUP, total, swap, maxima, meetings, turn, scale_ptr, HALF, ACTIVATION, TOP)
            turn = turn ^ 1
        else:
            total = finished(
                total, row_scale_ptr, w_scale_ptr, row + ROW, expert, column, N, w_rows, TILE, HALF,
                SCALES, ROW_SCALES, ACTIVATION, GATED,
            )  # fmt: skip
        store_block(total, out, out_stage, row + ROW, column, rows - ROW, N, GROUP, HALF, FEW)
    if not FEW:
        tma.store_wait(0)


@gluon.jit
def grouped_warp_specialised(
    x, w, scales, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, owners_ptr, rows_ptr, blocks_ptr,
    N, w_rows, capacity, depth, programs, group_m,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, SCALES: gl.constexpr,
    ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, TOP: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """out[place, N] = act(x[place, K] @ w[the block's expert, w_rows, K]^T) of rows sorted by expert (see sort_pairs).

    x, w [experts * w_rows, K] and scales are tensor descriptors, and so is out, unless FEW: then a block is mostly
    padding, and out a pointer. SCALES: `none`, `row` (w_scale [experts, w_rows]) or `block` (SCALE_BLOCK rows of w and
    one K block; scales [K blocks, capacity] of x). ROW_SCALES: each row of the product is multiplied by its own.
    GATED: w has the gate's N rows, then the up side's, and out is act(gate) * up; with scales by `block` it is
    quantised, to 8 bits of at most TOP, with scales [groups of columns, capacity].
    """
    SCALED: gl.constexpr = SCALES == "block"
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    scale_ring = x_ring
    if SCALED:
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], scales.layout)
    out_stage = x_ring
    if not FEW:
        out_stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    PAIRED: gl.constexpr = GATED and SCALED
    swap = x_ring
    maxima = x_ring
    meetings = full
    if PAIRED:
        SWAPPED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        swap = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BLOCK_SIZE_N // 4], SWAPPED)
        maxima = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        meetings = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(meetings.index(i), count=2)
        fence_async_shared()
    gl.warp_specialize([
        (multiply_blocks, (0, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, x_ring, w_ring, scale_ring, out_stage,
                           swap, maxima, meetings, full, empty, ready, owners_ptr, rows_ptr, blocks_ptr, N, w_rows,
                           capacity, depth, programs, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, SCALES,
                           ROW_SCALES, ACTIVATION, GATED, PAIRED, TOP, FEW)),
        (multiply_blocks, (1, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, x_ring, w_ring, scale_ring, out_stage,
                           swap, maxima, meetings, full, empty, ready, owners_ptr, rows_ptr, blocks_ptr, N, w_rows,
                           capacity, depth, programs, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, SCALES,
                           ROW_SCALES, ACTIVATION, GATED, PAIRED, TOP, FEW)),
        (load_blocks, (x, w, scales, x_ring, w_ring, scale_ring, full, empty, ready, owners_ptr, rows_ptr, blocks_ptr,
                       N, w_rows, capacity, depth, programs, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
                       STAGES, SCALED, GATED)),
    ], [4, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
