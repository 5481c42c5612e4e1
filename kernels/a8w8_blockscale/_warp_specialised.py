"""The block-scaled product on Hopper, warp-specialised: a loader warp fills a ring, two warpgroups multiply.

The scaling of one K block by the CUDA cores runs under the matrix instructions of the next, into a second
temporary accumulator, or of the other warpgroup's where there is room for one alone; programs are persistent. Written
in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gemmpipe.kernels.a8w8_blockscale._columns import parts_in_turns, parts_of_piece, takes_turns
from gemmpipe.templates.dense_hopper_columns import end_split_of_parts
from gemmpipe.templates.hopper import (
    accumulator,
    after,
    barriers,
    load_ring,
    part_of_w,
    prepare,
    store_tile,
    wait_for_previous,
)
from gemmpipe.templates.hopper_columns import matrix_descriptors, parts_of, prepare_rings, rings
from gemmpipe.templates.hopper_order import pieces_of, place_of
from gemmpipe.templates.hopper_splits import come_along, kept_slice, share_of_sum, store_part, sum_of_slice
from gemmpipe.templates.hopper_turns import begin_turns, end_turns


@gluon.jit
def begin_block(
    x_ring, w_ring, scale_ring, full, slot, phase, product, never,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, ROWS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    `never` is false, but the compiler cannot know: a literal False would let it move the scaling below the next
    matrix instruction, into registers that it does not have.
    """
    mbarrier.wait(full.index(slot), phase)
    scales = scale_ring.index(slot).slice(ROW, 64).load(ROWS_LAYOUT)
    x = x_ring.index(slot).slice(ROW, 64)
    w = part_of_w(w_ring, slot, COLUMN, COLUMNS, x_ring.shape[0])
    return scales, warpgroup_mma(x, w, product, use_acc=never, is_async=True)


@gluon.jit
def end_block(acc, flying, scales, w_scale, empty, slot, IN_FLIGHT: gl.constexpr):
    """Wait for the older product in flight, give its slot back, add it scaled; returns (sum, the product's place)."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=[flying])
    mbarrier.arrive(empty.index(slot), count=1)
    acc += product * (scales * w_scale)[:, None]
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=[acc]), product


@gluon.jit
def four_scales(w_scales, k, last):
    """The weight's scales of K blocks k to k + 3; past the last one its own, which nothing is multiplied by."""
    return (
        gl.load(w_scales + gl.minimum(k, last)),
        gl.load(w_scales + gl.minimum(k + 1, last)),
        gl.load(w_scales + gl.minimum(k + 2, last)),
        gl.load(w_scales + gl.minimum(k + 3, last)),
    )


@gluon.jit
def sum_four(
    x_ring, w_ring, scale_ring, full, empty, slot0, phase, acc, d0, d1,
    w0, w1, w2, w3, w_scales, begin, batch, last, never,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add four K blocks, one scaled while the next is multiplied into the other of d0 and d1; none is left in flight.

    w0 to w3 are their scales; those of the batch after this one (`batch`, from K block `begin` on) are loaded under the
    first product, as their latency would show otherwise. Returns (the next four scales, slot, phase, sum, d0, d1).
    """
    s0, f0 = begin_block(x_ring, w_ring, scale_ring, full, slot0, phase, d0, never, ROW, COLUMN, COLUMNS, ROWS)
    n0, n1, n2, n3 = four_scales(w_scales, begin + batch * 4 + 4, last)
    slot1, phase = after(slot0, phase, STAGES)
    s1, f1 = begin_block(x_ring, w_ring, scale_ring, full, slot1, phase, d1, never, ROW, COLUMN, COLUMNS, ROWS)
    acc, d0 = end_block(acc, f0, s0, w0, empty, slot0, 1)
    slot0, phase = after(slot1, phase, STAGES)
    s0, f0 = begin_block(x_ring, w_ring, scale_ring, full, slot0, phase, d0, never, ROW, COLUMN, COLUMNS, ROWS)
    acc, d1 = end_block(acc, f1, s1, w1, empty, slot1, 1)
    slot1, phase = after(slot0, phase, STAGES)
    s1, f1 = begin_block(x_ring, w_ring, scale_ring, full, slot1, phase, d1, never, ROW, COLUMN, COLUMNS, ROWS)
    acc, d0 = end_block(acc, f0, s0, w2, empty, slot0, 1)
    acc, d1 = end_block(acc, f1, s1, w3, empty, slot1, 0)
    slot0, phase = after(slot1, phase, STAGES)
    return n0, n1, n2, n3, slot0, phase, acc, d0, d1


@gluon.jit
def sum_of_piece(
    x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, w_scales, begin, end, last, never,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the K blocks of a piece of work; returns (slot, phase, sum, d0, d1).

    Batches of four, then the rest up to `end`, with nothing in flight in between: over a loop's back edge ptxas would
    serialise every matrix instruction.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    n0, n1, n2, n3 = four_scales(w_scales, begin, last)
    acc = gl.zeros([64, COLUMNS], gl.float32, TILE)
    for batch in range((end - begin) // 4):
        n0, n1, n2, n3, slot, phase, acc, d0, d1 = sum_four(
            x_ring, w_ring, scale_ring, full, empty, slot, phase, acc, d0, d1, n0, n1, n2, n3,
            w_scales, begin, batch, last, never, ROW, COLUMN, COLUMNS, ROWS, STAGES,
        )  # fmt: skip
    for i in range((end - begin) % 4):
        w_scale = gl.where(i == 0, n0, gl.where(i == 1, n1, n2))  # they came with the last batch
        s0, f0 = begin_block(x_ring, w_ring, scale_ring, full, slot, phase, d0, never, ROW, COLUMN, COLUMNS, ROWS)
        acc, d0 = end_block(acc, f0, s0, w_scale, empty, slot, 0)
        slot, phase = after(slot, phase, STAGES)
    return slot, phase, acc, d0, d1


@gluon.jit
def end_split(
    acc, out, stage, parts_ptr, counters_ptr, place, split, splits, row, column, M,
    COLUMNS: gl.constexpr, TILE: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Leave this split's part of the tile at `place` among those in splits; store this split's share of their sum."""
    WIDTH: gl.constexpr = out.block_type.shape[1]
    SLICE: gl.constexpr = accumulator(WIDTH, 32)
    parts = parts_ptr + place.to(gl.int64) * splits * 64 * COLUMNS
    kept = split if SPLIT_K == "cluster" else -1
    store_part(acc, parts + split * 64 * COLUMNS, kept, M - row, WIDTH, COLUMNS, TILE)
    own = kept_slice(acc, kept, SPLIT_K, SLICE, WIDTH)
    first, step = share_of_sum(counters_ptr + place, split, splits, COLUMNS // WIDTH, SPLIT_K)
    for i in range(first, COLUMNS // WIDTH, step):
        part = sum_of_slice(own, parts + i * 64 * WIDTH, 64 * COLUMNS, splits, kept, M - row, WIDTH, SLICE)
        store_tile(part, out, stage, row, column + i * WIDTH)
        own, kept = gl.zeros([64, WIDTH], gl.float32, SLICE), -1


@gluon.jit
def sums_of_tile(
    GROUP: gl.constexpr, x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, x_at, w_at,
    w_scale_ptr, w_scale_stride, column, N, begin, end, last, never,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr, BLOCK_SIZE_N: gl.constexpr,
    STAGES: gl.constexpr, SCALE_BLOCK: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """Add a piece's K blocks in the way that a tile of so many columns has; returns (slot, phase, parts, d0, d1)."""
    WIDTH: gl.constexpr = TILE.instr_shape[1]
    if parts_of(COLUMNS) == 1:
        w_scales = w_scale_ptr + gl.minimum(column, N - 1) // SCALE_BLOCK * w_scale_stride
        slot, phase, acc, d0, d1 = sum_of_piece(
            x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, w_scales, begin, end, last, never,
            ROW, COLUMN, COLUMNS, TILE, STAGES,
        )  # fmt: skip
        sums = (acc,)
    else:
        block = gl.minimum(column, N - 1) // SCALE_BLOCK
        low_ptr = w_scale_ptr + block * w_scale_stride
        high_ptr = w_scale_ptr + gl.minimum(block + 1, (N - 1) // SCALE_BLOCK) * w_scale_stride
        edge = (block + 1) * SCALE_BLOCK - column
        if takes_turns(COLUMNS):
            slot, phase, sums = parts_in_turns(
                x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, edge, begin, end, last,
                TILE, COLUMNS, WIDTH, ROW, BLOCK_SIZE_N, STAGES, GROUP,
            )  # fmt: skip
        else:
            slot, phase, sums = parts_of_piece(
                x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, edge, begin, end,
                TILE, COLUMNS, WIDTH, ROW, BLOCK_SIZE_N, STAGES, BATCH,
            )  # fmt: skip
    return slot, phase, sums, d0, d1


@gluon.jit
def multiply(
    GROUP: gl.constexpr, out, w_scale_ptr, w_scale_stride, x_ring, w_ring, scale_ring, out_stage, full, empty, ready,
    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits, never,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    SPLIT_K: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile."""
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    ROW: gl.constexpr = GROUP * 64 if BLOCK_SIZE_M == 128 else 0
    COLUMN: gl.constexpr = 0 if BLOCK_SIZE_M == 128 else GROUP * COLUMNS
    PARTS: gl.constexpr = parts_of(COLUMNS)
    TURNS: gl.constexpr = takes_turns(COLUMNS)
    WIDTH: gl.constexpr = COLUMNS // PARTS
    TILE: gl.constexpr = accumulator(WIDTH, 32)
    slot = 0
    phase = 0
    d0 = gl.zeros([64, WIDTH], gl.float32, TILE)
    d1 = gl.zeros([64, WIDTH], gl.float32, TILE)
    stage = out_stage.index(GROUP)
    x_at, w_at = matrix_descriptors(PARTS, ROW, STAGES * BLOCK_SIZE_M + COLUMN)
    mbarrier.wait(ready, 0)
    wait_for_previous()
    if TURNS:
        begin_turns(GROUP)
    for piece in range(gl.program_id(0), pieces_of(tiles_m * tiles_n, whole, splits), programs):
        t, split, begin, end, row, tile_n = place_of(
            piece, M, tiles_m, tiles_n, blocks, group_m, whole, splits, BLOCK_SIZE_M
        )
        row = row + ROW
        column = tile_n * BLOCK_SIZE_N + COLUMN
        slot, phase, sums, d0, d1 = sums_of_tile(
            GROUP, x_ring, w_ring, scale_ring, full, empty, slot, phase, d0, d1, x_at, w_at,
            w_scale_ptr, w_scale_stride, column, N, begin, end, blocks - 1, never,
            ROW, COLUMN, COLUMNS, TILE, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, BATCH,
        )  # fmt: skip
        if SPLIT_K == "cluster" or (SPLIT_K == "last" and piece >= whole):
            place = (t - whole) * 2 + GROUP
            if PARTS == 1:
                end_split(
                    sums[0], out, stage, parts_ptr, counters_ptr, place, split, splits, row, column, M,
                    COLUMNS, TILE, SPLIT_K,
                )  # fmt: skip
            else:
                end_split_of_parts(
                    sums, out, stage, None, None, None,
                    parts_ptr + place.to(gl.int64) * splits * 64 * COLUMNS, counters_ptr + place, split, splits,
                    row, column, M, N, COLUMNS, TILE, "none", False, SPLIT_K,
                )  # fmt: skip
        else:
            for j in gl.static_range(PARTS):
                store_tile(sums[j], out, stage, row, column + j * WIDTH)
    if TURNS:
        end_turns(GROUP)
    tma.store_wait(0)


@gluon.jit
def blockscale_warp_specialised(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; x, w, out and scales are tensor descriptors, scales flat and K-major.

    SPLIT_K: as dense_hopper.dense_warp_specialised has it. BATCH: of tiles in parts with two products, the K blocks
    after which nothing is in flight.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    x_ring, w_ring = rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], scales.layout)
    out_stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    never = M < 0
    gl.warp_specialize([
        (multiply, (0, out, w_scale_ptr, w_scale_stride, x_ring, w_ring, scale_ring, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits, never,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, SPLIT_K, BATCH)),
        (multiply, (1, out, w_scale_ptr, w_scale_stride, x_ring, w_ring, scale_ring, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits, never,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, SPLIT_K, BATCH)),
        (load_ring, (x, w, scales, x_ring, w_ring, scale_ring, full, empty, ready, M, scale_stride, tiles_m, tiles_n,
                     blocks, programs, group_m, whole, splits, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES, True,
                     SPLIT_K)),
        (prepare, (full, empty, ready, STAGES, SPLIT_K)) if parts_of(COLUMNS) == 1 else
        (prepare_rings, (w_ring, full, empty, ready, STAGES, SPLIT_K)),
        (come_along, (SPLIT_K,)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
