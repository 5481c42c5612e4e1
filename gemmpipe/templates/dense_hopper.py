"""The product whose scales do not vary along K on Hopper, warp-specialised: a loader warp, two math warpgroups.

Programs are persistent: the loader fills the ring for the next tile while the warpgroups finish this one. Written in
Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gemmpipe.templates.dense_hopper_columns import end_split_of_parts, parts_of_piece
from gemmpipe.templates.hopper import (
    accumulator,
    after,
    barriers,
    load_ring,
    part_of_w,
    prepare,
    scaled,
    store_tile,
    wait_for_previous,
)
from gemmpipe.templates.hopper_columns import matrix_descriptors, parts_of, prepare_rings, rings, zeros
from gemmpipe.templates.hopper_order import pieces_of, place_of
from gemmpipe.templates.hopper_splits import come_along, kept_slice, share_of_sum, store_part, sum_of_slice


@gluon.jit
def sum_blocks(
    x_ring, w_ring, full, empty, slot, phase, acc, blocks: gl.constexpr,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add `blocks` K blocks with two products in flight and none at the end; returns (slot, phase, sum)."""
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(full.index(slot), phase)
        x = x_ring.index(slot).slice(ROW, 64)
        w = part_of_w(w_ring, slot, COLUMN, COLUMNS, STAGES)
        flying = warpgroup_mma(x, w, acc, is_async=True)
        if i > 0:
            acc = warpgroup_mma_wait(1, deps=[flying])
            mbarrier.arrive(empty.index(last), count=1)
        else:
            acc = flying
        last = slot
        slot, phase = after(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(last), count=1)
    return slot, phase, acc


@gluon.jit
def sum_of_piece(
    x_ring, w_ring, full, empty, slot, phase, acc, blocks,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add all K blocks of a piece of work; returns (slot, phase, sum).

    They come in batches of four with nothing in flight between batches: over a loop's back edge ptxas would serialise
    every matrix instruction.
    """
    for _ in range(blocks // 4):
        slot, phase, acc = sum_blocks(x_ring, w_ring, full, empty, slot, phase, acc, 4, ROW, COLUMN, COLUMNS, STAGES)
    for _ in range(blocks // 4 * 4, blocks):
        slot, phase, acc = sum_blocks(x_ring, w_ring, full, empty, slot, phase, acc, 1, ROW, COLUMN, COLUMNS, STAGES)
    return slot, phase, acc


@gluon.jit
def end_split(
    total, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counters_ptr, place, split, splits,
    row, column, M, N, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, TILE: gl.constexpr, SCALES: gl.constexpr,
    BIAS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Leave this split's part of the tile at `place` among those in splits; finish this split's share of their sum."""
    WIDTH: gl.constexpr = out.block_type.shape[1]
    SLICE: gl.constexpr = accumulator(WIDTH, DEPTH)
    parts = parts_ptr + place.to(gl.int64) * splits * 64 * COLUMNS
    kept = split if SPLIT_K == "cluster" else -1
    store_part(total, parts + split * 64 * COLUMNS, kept, M - row, WIDTH, COLUMNS, TILE)
    own = kept_slice(total, kept, SPLIT_K, SLICE, WIDTH)
    first, step = share_of_sum(counters_ptr + place, split, splits, COLUMNS // WIDTH, SPLIT_K)
    for i in range(first, COLUMNS // WIDTH, step):
        here = column + i * WIDTH
        part = sum_of_slice(own, parts + i * 64 * WIDTH, 64 * COLUMNS, splits, kept, M - row, WIDTH, SLICE)
        part = scaled(part, bias_ptr, x_scale_ptr, w_scale_ptr, row, here, M, N, WIDTH, SLICE, SCALES, BIAS)
        store_tile(part, out, stage, row, here)
        own, kept = gl.zeros([64, WIDTH], gl.float32, SLICE), -1


@gluon.jit
def multiply(
    GROUP: gl.constexpr, out, bias_ptr, x_scale_ptr, w_scale_ptr, x_ring, w_ring, out_stage, full, empty, ready,
    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile."""
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    ROW: gl.constexpr = GROUP * 64 if BLOCK_SIZE_M == 128 else 0
    COLUMN: gl.constexpr = 0 if BLOCK_SIZE_M == 128 else GROUP * COLUMNS
    ELEMENT: gl.constexpr = x_ring.dtype.name
    PARTS: gl.constexpr = parts_of(COLUMNS)
    WIDTH: gl.constexpr = COLUMNS // PARTS
    DEPTH: gl.constexpr = 256 // x_ring.dtype.primitive_bitwidth
    TILE: gl.constexpr = accumulator(WIDTH, DEPTH)
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    slot = 0
    phase = 0
    stage = out_stage.index(GROUP)
    x_at, w_at = matrix_descriptors(PARTS, ROW, STAGES * BLOCK_SIZE_M + COLUMN)
    mbarrier.wait(ready, 0)
    wait_for_previous()
    for piece in range(gl.program_id(0), pieces_of(tiles_m * tiles_n, whole, splits), programs):
        t, split, begin, end, row, tile_n = place_of(
            piece, M, tiles_m, tiles_n, blocks, group_m, whole, splits, BLOCK_SIZE_M
        )
        row = row + ROW
        column = tile_n * BLOCK_SIZE_N + COLUMN
        sums = zeros(PARTS, WIDTH, TILE, SUM)
        if PARTS == 1:
            slot, phase, acc = sum_of_piece(
                x_ring, w_ring, full, empty, slot, phase, sums[0], end - begin, ROW, COLUMN, COLUMNS, STAGES
            )
            sums = (acc,)
        else:
            slot, phase, sums = parts_of_piece(
                sums, x_at, w_at, full, empty, slot, phase, end - begin, TILE, COLUMNS, ELEMENT,
                BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES,
            )  # fmt: skip
        if SPLIT_K == "cluster" or (SPLIT_K == "last" and piece >= whole):
            place = (t - whole) * 2 + GROUP
            if PARTS == 1:
                end_split(
                    sums[0].to(gl.float32), out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counters_ptr,
                    place, split, splits, row, column, M, N, COLUMNS, DEPTH, TILE, SCALES, BIAS, SPLIT_K,
                )  # fmt: skip
            else:
                end_split_of_parts(
                    sums, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr,
                    parts_ptr + place.to(gl.int64) * splits * 64 * COLUMNS, counters_ptr + place, split, splits,
                    row, column, M, N, COLUMNS, TILE, SCALES, BIAS, SPLIT_K,
                )  # fmt: skip
        else:
            for j in gl.static_range(PARTS):
                here = column + j * WIDTH
                part = sums[j].to(gl.float32)
                part = scaled(part, bias_ptr, x_scale_ptr, w_scale_ptr, row, here, M, N, WIDTH, TILE, SCALES, BIAS)
                store_tile(part, out, stage, row, here)
    tma.store_wait(0)


@gluon.jit
def dense_warp_specialised(
    x, w, out, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
    SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """out = (x @ w^T) * x_scale * w_scale + bias; x, w, out are tensor descriptors.

    SCALES: `none`, `tensor`, `row`. SPLIT_K: `none`; `last`: the last split to arrive adds them up; `cluster`: all do.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    x_ring, w_ring = rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    out_stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    gl.warp_specialize([
        (multiply, (0, out, bias_ptr, x_scale_ptr, w_scale_ptr, x_ring, w_ring, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SPLIT_K, SCALES, BIAS)),
        (multiply, (1, out, bias_ptr, x_scale_ptr, w_scale_ptr, x_ring, w_ring, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SPLIT_K, SCALES, BIAS)),
        (load_ring, (x, w, x, x_ring, w_ring, x_ring, full, empty, ready, M, 0, tiles_m, tiles_n, blocks, programs,
                     group_m, whole, splits, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES, False, SPLIT_K)),
        (prepare, (full, empty, ready, STAGES, SPLIT_K)) if parts_of(COLUMNS) == 1 else
        (prepare_rings, (w_ring, full, empty, ready, STAGES, SPLIT_K)),
        (come_along, (SPLIT_K,)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
