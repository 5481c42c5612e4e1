"""_warp_specialised with tiles of any multiple of 16 columns a warpgroup (gemmpipe/templates/hopper_columns.py).

Such a tile may hold columns of two blocks of w's scales: every part of it takes its own block's.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from gemmpipe.kernels.a8w8_blockscale._warp_specialised import four_scales
from gemmpipe.templates.dense_hopper_columns import end_split
from gemmpipe.templates.hopper import accumulator, after, barriers, load_ring, store_tile, wait_for_previous
from gemmpipe.templates.hopper_columns import descriptor, multiply_parts, prepare_rings, rings, zeros
from gemmpipe.templates.hopper_order import pieces_of, place_of
from gemmpipe.templates.hopper_splits import come_along


@gluon.jit
def begin_block(
    x_at, w_at, scale_ring, full, slot, phase, TILE: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr,
    W_ROWS: gl.constexpr,
):  # fmt: skip
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    x_at, w_at: descriptors of this warpgroup's rows in the first slots (hopper_columns); ROW: its first of x's scales.
    """
    mbarrier.wait(full.index(slot), phase)
    scales = scale_ring.index(slot).slice(ROW, 64).load(gl.SliceLayout(1, TILE))
    X_ROWS: gl.constexpr = scale_ring.shape[1]
    return scales, multiply_parts((), x_at + slot * X_ROWS * 8, w_at + slot * W_ROWS * 8, TILE, COLUMNS, "fp8e4nv")


@gluon.jit
def end_block(sums, flying, scales, low, high, edge, empty, slot, IN_FLIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Wait for the older product in flight, give its slot back, add it scaled; returns the sums.

    low and high: w's scales of the columns before `edge` and from there on.
    """
    product = warpgroup_mma_wait(IN_FLIGHT, deps=flying)
    mbarrier.arrive(empty.index(slot), count=1)
    lows, highs = scales * low, scales * high
    total = ()
    for j in gl.static_range(PARTS):
        scale = gl.where(j * product[j].shape[1] < edge, lows, highs)
        total += (sums[j] + product[j] * scale[:, None],)
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=total)


@gluon.jit
def sum_of_piece(
    x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, edge, begin, end, last,
    TILE: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr, W_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As _warp_specialised.sum_of_piece, of parts; returns (slot, phase, parts)."""
    PARTS: gl.constexpr = COLUMNS // WIDTH
    l0, l1, l2, l3 = four_scales(low_ptr, begin, last)
    h0, h1, h2, h3 = four_scales(high_ptr, begin, last)
    sums = zeros(PARTS, WIDTH, TILE, gl.float32)
    for batch in range((end - begin) // 4):
        slot0 = slot
        s0, f0 = begin_block(x_at, w_at, scale_ring, full, slot0, phase, TILE, COLUMNS, ROW, W_ROWS)
        m0, m1, m2, m3 = four_scales(low_ptr, begin + batch * 4 + 4, last)
        n0, n1, n2, n3 = four_scales(high_ptr, begin + batch * 4 + 4, last)
        slot1, phase = after(slot0, phase, STAGES)
        s1, f1 = begin_block(x_at, w_at, scale_ring, full, slot1, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f0, s0, l0, h0, edge, empty, slot0, 1, PARTS)
        slot0, phase = after(slot1, phase, STAGES)
        s0, f0 = begin_block(x_at, w_at, scale_ring, full, slot0, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f1, s1, l1, h1, edge, empty, slot1, 1, PARTS)
        slot1, phase = after(slot0, phase, STAGES)
        s1, f1 = begin_block(x_at, w_at, scale_ring, full, slot1, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f0, s0, l2, h2, edge, empty, slot0, 1, PARTS)
        sums = end_block(sums, f1, s1, l3, h3, edge, empty, slot1, 0, PARTS)
        slot, phase = after(slot1, phase, STAGES)
        l0, l1, l2, l3, h0, h1, h2, h3 = m0, m1, m2, m3, n0, n1, n2, n3
    for i in range((end - begin) % 4):
        low = gl.where(i == 0, l0, gl.where(i == 1, l1, l2))  # they came with the last batch
        high = gl.where(i == 0, h0, gl.where(i == 1, h1, h2))
        s0, f0 = begin_block(x_at, w_at, scale_ring, full, slot, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f0, s0, low, high, edge, empty, slot, 0, PARTS)
        slot, phase = after(slot, phase, STAGES)
    return slot, phase, sums


@gluon.jit
def multiply(
    GROUP: gl.constexpr, out, w_scale_ptr, w_scale_stride, scale_ring, out_stage, full, empty, ready,
    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile."""
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    ROW: gl.constexpr = GROUP * 64 if BLOCK_SIZE_M == 128 else 0
    COLUMN: gl.constexpr = 0 if BLOCK_SIZE_M == 128 else GROUP * COLUMNS
    WIDTH: gl.constexpr = out.block_type.shape[1]
    TILE: gl.constexpr = accumulator(WIDTH, 32)
    slot = 0
    phase = 0
    stage = out_stage.index(GROUP)
    x_at, w_at = descriptor(ROW), descriptor(STAGES * BLOCK_SIZE_M + COLUMN)
    mbarrier.wait(ready, 0)
    wait_for_previous()
    for piece in range(gl.program_id(0), pieces_of(tiles_m * tiles_n, whole, splits), programs):
        t, split, begin, end, row, tile_n = place_of(
            piece, M, tiles_m, tiles_n, blocks, group_m, whole, splits, BLOCK_SIZE_M
        )
        row = row + ROW
        column = tile_n * BLOCK_SIZE_N + COLUMN
        block = gl.minimum(column, N - 1) // SCALE_BLOCK
        low_ptr = w_scale_ptr + block * w_scale_stride
        high_ptr = w_scale_ptr + gl.minimum(block + 1, (N - 1) // SCALE_BLOCK) * w_scale_stride
        slot, phase, sums = sum_of_piece(
            x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, (block + 1) * SCALE_BLOCK - column,
            begin, end, blocks - 1, TILE, COLUMNS, WIDTH, ROW, BLOCK_SIZE_N, STAGES,
        )  # fmt: skip
        if SPLIT_K == "cluster" or (SPLIT_K == "last" and piece >= whole):
            place = (t - whole) * 2 + GROUP
            end_split(
                sums, out, stage, w_scale_ptr, w_scale_ptr, w_scale_ptr,
                parts_ptr + place.to(gl.int64) * splits * 64 * COLUMNS, counters_ptr + place, split, splits,
                row, column, M, N, COLUMNS, TILE, "none", False, SPLIT_K,
            )  # fmt: skip
        else:
            for j in gl.static_range(COLUMNS // WIDTH):
                store_tile(sums[j], out, stage, row, column + j * WIDTH)
    tma.store_wait(0)


@gluon.jit
def blockscale_any_columns(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
):  # fmt: skip
    """As _warp_specialised.blockscale_warp_specialised."""
    places, x_ring = rings(x, out.block_type.shape[1], BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], scales.layout)
    out_stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    gl.warp_specialize([
        (multiply, (0, out, w_scale_ptr, w_scale_stride, scale_ring, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, SPLIT_K)),
        (multiply, (1, out, w_scale_ptr, w_scale_stride, scale_ring, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK, SPLIT_K)),
        (load_ring, (x, w, scales, x_ring, places, scale_ring, full, empty, ready, M, scale_stride, tiles_m, tiles_n,
                     blocks, programs, group_m, whole, splits, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES, True,
                     SPLIT_K)),
        (prepare_rings, (places, full, empty, ready, STAGES, SPLIT_K)),
        (come_along, (SPLIT_K,)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
