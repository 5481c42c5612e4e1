"""dense_hopper with tiles of any multiple of 16 columns a warpgroup (hopper_columns)."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from gemmpipe.templates.dense_hopper import scaled
from gemmpipe.templates.hopper import accumulator, after, barriers, load_ring, store_tile, wait_for_previous
from gemmpipe.templates.hopper_columns import descriptor, multiply_parts, prepare_rings, rings, zeros
from gemmpipe.templates.hopper_order import pieces_of, place_of
from gemmpipe.templates.hopper_splits import come_along, share_of_sum, store_part, sum_of_slice


@gluon.jit
def sum_blocks(
    sums, x_at, w_at, full, empty, slot, phase, blocks: gl.constexpr, TILE: gl.constexpr, COLUMNS: gl.constexpr,
    ELEMENT: gl.constexpr, X_ROWS: gl.constexpr, W_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As dense_hopper.sum_blocks, of parts; returns (slot, phase, parts).

    x_at, w_at: descriptors of this warpgroup's rows in the first slots, which are X_ROWS and W_ROWS apart.
    """
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(full.index(slot), phase)
        sums = multiply_parts(sums, x_at + slot * X_ROWS * 8, w_at + slot * W_ROWS * 8, TILE, COLUMNS, ELEMENT)
        if i > 0:
            sums = warpgroup_mma_wait(1, deps=sums)
            mbarrier.arrive(empty.index(last), count=1)
        last = slot
        slot, phase = after(slot, phase, STAGES)
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(empty.index(last), count=1)
    return slot, phase, sums


@gluon.jit
def end_split(
    sums, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counter_ptr, split, splits, row, column, M, N,
    COLUMNS: gl.constexpr, TILE: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """As dense_hopper.end_split; the slices that are shared out are the parts of the tile."""
    WIDTH: gl.constexpr = out.block_type.shape[1]
    PARTS: gl.constexpr = COLUMNS // WIDTH
    for j in gl.static_range(PARTS):
        to = parts_ptr + (split * PARTS + j) * 64 * WIDTH
        store_part(sums[j].to(gl.float32), to, -1, M - row, WIDTH, WIDTH, TILE)
    first, step = share_of_sum(counter_ptr, split, splits, PARTS, SPLIT_K)
    for i in range(first, PARTS, step):
        here = column + i * WIDTH
        none = gl.zeros([64, WIDTH], gl.float32, TILE)
        part = sum_of_slice(none, parts_ptr + i * 64 * WIDTH, 64 * COLUMNS, splits, -1, M - row, WIDTH, TILE)
        part = scaled(part, bias_ptr, x_scale_ptr, w_scale_ptr, row, here, M, N, WIDTH, TILE, SCALES, BIAS)
        store_tile(part, out, stage, row, here)


@gluon.jit
def multiply(
    GROUP: gl.constexpr, out, bias_ptr, x_scale_ptr, w_scale_ptr, out_stage, full, empty, ready,
    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    SCALES: gl.constexpr, BIAS: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile."""
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    ROW: gl.constexpr = GROUP * 64 if BLOCK_SIZE_M == 128 else 0
    COLUMN: gl.constexpr = 0 if BLOCK_SIZE_M == 128 else GROUP * COLUMNS
    WIDTH: gl.constexpr = out.block_type.shape[1]
    PARTS: gl.constexpr = COLUMNS // WIDTH
    TILE: gl.constexpr = accumulator(WIDTH, 32 if ELEMENT == "int8" or ELEMENT == "fp8e4nv" else 16)
    SUM: gl.constexpr = gl.int32 if ELEMENT == "int8" else gl.float32
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
        sums = zeros(PARTS, WIDTH, TILE, SUM)
        for _ in range((end - begin) // 4):
            slot, phase, sums = sum_blocks(
                sums, x_at, w_at, full, empty, slot, phase, 4, TILE, COLUMNS, ELEMENT,
                BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES,
            )  # fmt: skip
        for _ in range((end - begin) % 4):
            slot, phase, sums = sum_blocks(
                sums, x_at, w_at, full, empty, slot, phase, 1, TILE, COLUMNS, ELEMENT,
                BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES,
            )  # fmt: skip
        if SPLIT_K == "cluster" or (SPLIT_K == "last" and piece >= whole):
            place = (t - whole) * 2 + GROUP
            end_split(
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
def dense_any_columns(
    x, w, out, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
    SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """As dense_hopper.dense_warp_specialised."""
    ELEMENT: gl.constexpr = x.dtype.name
    places, x_ring = rings(x, out.block_type.shape[1], BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES)
    out_stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    gl.warp_specialize([
        (multiply, (0, out, bias_ptr, x_scale_ptr, w_scale_ptr, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SPLIT_K, SCALES, BIAS, ELEMENT)),
        (multiply, (1, out, bias_ptr, x_scale_ptr, w_scale_ptr, out_stage, full, empty, ready,
                    parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SPLIT_K, SCALES, BIAS, ELEMENT)),
        (load_ring, (x, w, x, x_ring, places, x_ring, full, empty, ready, M, 0, tiles_m, tiles_n, blocks, programs,
                     group_m, whole, splits, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES, False, SPLIT_K)),
        (prepare_rings, (places, full, empty, ready, STAGES, SPLIT_K)),
        (come_along, (SPLIT_K,)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
