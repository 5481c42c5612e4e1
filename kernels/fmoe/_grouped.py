"""The product of rows sorted by expert on Hopper, warp-specialised: a loader warp, two math warpgroups.

Programs are persistent; how many blocks of rows there are, and whose each is, they read from memory. Written in Gluon,
which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gemmpipe.kernels.a8w8_blockscale._warp_specialised import sum_of_piece as scaled_sum
from gemmpipe.kernels.fmoe._grouped_output import (
    GroupedOutput,
    Pair,
    finished,
    kind_of,
    pair_of,
    quantised_pair,
    store_block,
)
from gemmpipe.templates.dense_hopper import sum_of_piece as plain_sum
from gemmpipe.templates.gluon_names import tma_load
from gemmpipe.templates.hopper import Ring, after, barriers, begin_slots, let_next_start, wait_for_previous
from gemmpipe.templates.hopper_order import tile_at
from gemmpipe.templates.hopper_share import accumulator, share_of


class GroupedWork(NamedTuple):
    """Rows sorted by expert, in blocks of a tile's height, and the product that is made of them.

    owners_ptr: the expert of each block; rows_ptr: how many rows it has; blocks_ptr: how many blocks there are. Each
    expert's weight has w_rows, of which N columns leave. capacity: places for rows. k_blocks: of the product. group_m:
    see tile_at.
    """

    owners_ptr: gl.tensor
    rows_ptr: gl.tensor
    blocks_ptr: gl.tensor
    N: gl.tensor
    w_rows: gl.tensor
    capacity: gl.tensor
    k_blocks: gl.tensor
    programs: gl.tensor
    group_m: gl.tensor


@gluon.jit
def owner_of(t, work, blocks, tiles_n, BLOCK_SIZE_M: gl.constexpr):
    """The expert of tile t; of one that is past the last, 0."""
    tile = gl.minimum(t, blocks * tiles_n - 1)
    row, _ = tile_at(tile, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
    return gl.load(work.owners_ptr + row // BLOCK_SIZE_M, mask=t < blocks * tiles_n, other=0)


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
def load_blocks(x, w, scales, ring, work, BLOCK_SIZE_N: gl.constexpr, GATED: gl.constexpr):
    """The loader warp: for each tile and K block, x, w and the scales (or None) of x into the next empty slot.

    GATED: boxes of the gate's rows and of the up side's take turns.
    """
    begin_slots(ring)
    wait_for_previous()
    let_next_start()
    slot = 0
    phase = 1
    SLOTS: gl.constexpr = ring.x.shape[0]
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    WIDTH: gl.constexpr = BLOCK_SIZE_N // 2 if GATED else BLOCK_SIZE_N
    BOX: gl.constexpr = w.block_type.shape[0]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    REST_BYTES: gl.constexpr = W_BYTES + (0 if ring.scales is None else BLOCK_SIZE_M * 4)
    blocks = gl.load(work.blocks_ptr)
    tiles_n = gl.cdiv(work.N, WIDTH)
    for t in range(gl.program_id(0), blocks * tiles_n, work.programs):
        row, tile_n = tile_at(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
        block = row // BLOCK_SIZE_M
        rows = gl.load(work.rows_ptr + block)
        w_row = gl.load(work.owners_ptr + block) * work.w_rows + tile_n * WIDTH
        for k in range(work.k_blocks):
            mbarrier.wait(ring.empty.index(slot), phase)
            bar = ring.full.index(slot)
            load_x(x, ring.x.index(slot), row, k * BLOCK_SIZE_K, rows, bar, REST_BYTES)
            for i in gl.static_range(BLOCK_SIZE_N // BOX):
                w_place = ring.w.index(slot).slice(i * BOX, BOX)
                if GATED:
                    tma_load(w, [w_row + i // 2 * BOX + i % 2 * work.N, k * BLOCK_SIZE_K], bar, w_place)
                else:
                    tma_load(w, [w_row + i * BOX, k * BLOCK_SIZE_K], bar, w_place)
            if ring.scales is not None:
                tma_load(scales, [k * work.capacity + row], bar, ring.scales.index(slot))
            slot, phase = after(slot, phase, SLOTS)


@gluon.jit
def sum_of_tile(
    ring, share, slot, phase, d0, d1, w_scale_ptr, expert, w_row, work, never, SCALE_BLOCK: gl.constexpr
):  # fmt: skip
    """A tile's product over all of K, scaled by block (of w's rows from `w_row` on) where x has such scales.

    Returns (slot, phase, sum, d0, d1).
    """
    if ring.scales is not None:
        scale_row = expert * gl.cdiv(work.w_rows, SCALE_BLOCK) + gl.minimum(w_row, work.w_rows - 1) // SCALE_BLOCK
        w_scales = w_scale_ptr + scale_row * work.k_blocks
        slot, phase, total, d0, d1 = scaled_sum(
            ring, share, slot, phase, d0, d1, w_scales, 0, work.k_blocks, work.k_blocks - 1, never
        )  # fmt: skip
    else:
        acc = gl.zeros([64, share.COLUMNS], gl.float32, share.LAYOUT)
        slot, phase, total = plain_sum(ring, share, slot, phase, acc, work.k_blocks)
    return slot, phase, total, d0, d1


@gluon.jit
def multiply_blocks(share, kind, output, ring, pair, work):
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile.

    PAIRED: that half is the gate's in one and the up side's in the other, as each side has its own scales along K.
    """
    BLOCK_SIZE_M: gl.constexpr = share.BLOCK_SIZE_M
    SIDES: gl.constexpr = 2 if kind.GATED else 1
    HALF: gl.constexpr = accumulator(share.COLUMNS // SIDES, share.DEPTH)
    slot = 0
    phase = 0
    turn = 0
    d0 = gl.zeros([64, share.COLUMNS], gl.float32, share.LAYOUT)
    d1 = gl.zeros([64, share.COLUMNS], gl.float32, share.LAYOUT)
    mbarrier.wait(ring.ready, 0)
    wait_for_previous()
    blocks = gl.load(work.blocks_ptr)
    tiles_n = gl.cdiv(work.N, share.BLOCK_SIZE_N // SIDES)
    never = work.N < 0
    following = owner_of(gl.program_id(0), work, blocks, tiles_n, BLOCK_SIZE_M)
    for t in range(gl.program_id(0), blocks * tiles_n, work.programs):
        # Whose the next tile is, is asked for now: the latency would show before that tile's first scales.
        expert = following
        following = owner_of(t + work.programs, work, blocks, tiles_n, BLOCK_SIZE_M)
        row, tile_n = tile_at(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
        rows = gl.load(work.rows_ptr + row // BLOCK_SIZE_M)
        column = (tile_n * share.BLOCK_SIZE_N + share.COLUMN) // SIDES
        w_row = tile_n * share.COLUMNS + share.GROUP * work.N if kind.PAIRED else column
        slot, phase, total, d0, d1 = sum_of_tile(
            ring, share, slot, phase, d0, d1, output.w_scale_ptr, expert, w_row, work, never, kind.SCALE_BLOCK
        )
        if kind.PAIRED:
            scale_ptr = output.out_scale_ptr + tile_n * work.capacity + row
            total = quantised_pair(total, pair, turn, scale_ptr, share, kind, HALF)
            turn = turn ^ 1
        else:
            total = finished(total, output, row + share.ROW, expert, column, work, share, kind, HALF)
        store_block(total, output.out, ring, row + share.ROW, column, rows - share.ROW, work.N, share, HALF)
    if ring.stage is not None:
        tma.store_wait(0)


@gluon.jit
def grouped_warp_specialised(
    x, w, scales, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, owners_ptr, rows_ptr, blocks_ptr,
    N, w_rows, capacity, k_blocks, programs, group_m,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, SCALES: gl.constexpr,
    ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, TOP: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """out[place, N] = act(x[place, K] @ w[the block's expert, w_rows, K]^T) of rows sorted by expert (see sort_pairs).

    x, w [experts * w_rows, K] and scales are tensor descriptors, and so is out, unless FEW: then a block is mostly
    padding, and out a pointer. SCALES: `none`, `row` (w_scale [experts, w_rows]) or `block` (SCALE_BLOCK rows of w and
    one K block; scales [K blocks, capacity] of x). ROW_SCALES: each row of the product is multiplied by its own.
    GATED: w has the gate's N rows, then the up side's, and out is act(gate) * up; with scales by `block` it is
    quantised, to 8 bits of at most TOP, with scales [groups of columns, capacity]. ACTIVATION: `none`, `silu`, `gelu`.
    """
    BITS: gl.constexpr = x.dtype.primitive_bitwidth
    kind: gl.constexpr = kind_of(SCALES, ROW_SCALES, ACTIVATION, GATED, TOP, SCALE_BLOCK)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    scale_ring = None
    if SCALES == "block":
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], scales.layout)
    stage = None
    if not FEW:
        stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    pair = Pair(None, None, None)
    if kind.PAIRED:
        pair = pair_of(BLOCK_SIZE_N // 2)
    output = GroupedOutput(out, w_scale_ptr, row_scale_ptr, out_scale_ptr)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    work = GroupedWork(owners_ptr, rows_ptr, blocks_ptr, N, w_rows, capacity, k_blocks, programs, group_m)
    gl.warp_specialize([
        (multiply_blocks, (share_of(0, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), kind, output, ring, pair, work)),
        (multiply_blocks, (share_of(1, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), kind, output, ring, pair, work)),
        (load_blocks, (x, w, scales, ring, work, BLOCK_SIZE_N, GATED)),
    ], [4, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
