"""The block-scaled product on Hopper, warp-specialised: a loader warp fills a ring, two warpgroups multiply.

The scaling of one K block by the CUDA cores runs under the matrix instructions of the next, into a second
temporary accumulator; programs are persistent. Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemmpipe.gluon_names import tma_load, tma_store


@gluon.jit
def tile_at(t, tiles_m, tiles_n, group_m):
    """(row, column) of tile t: columns vary slowest within `group_m` rows, so that weights stay in L2."""
    width = group_m * tiles_n
    first = t // width * group_m
    rows = gl.minimum(tiles_m - first, group_m)
    within = t % width
    return first + within % rows, within // rows


@gluon.jit
def first_row(tile_m, M, BLOCK_SIZE_M: gl.constexpr):
    """The last row tile is moved up to end with the matrix, so that no copy is partial (rows computed twice agree).

    A multiple of 4: the coordinate of the scales' copy must be 16-byte aligned.
    """
    return gl.minimum(tile_m * BLOCK_SIZE_M, gl.maximum((M - BLOCK_SIZE_M + 3) // 4 * 4, 0))


@gluon.jit
def after(slot, phase, STAGES: gl.constexpr):
    """The slot of the ring that follows, and the phase of its barriers."""
    slot += 1
    wrapped = slot == STAGES
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def load_ring(
    x, w, scales, x_ring, w_ring, scale_ring, full, empty, M, scale_stride, tiles_m, tiles_n, blocks, programs, group_m,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader warp: for each tile and K block, x, w and x's scales into the next slot that is empty."""
    slot = 0
    phase = 1
    for t in range(gl.program_id(0), tiles_m * tiles_n, programs):
        tile_m, tile_n = tile_at(t, tiles_m, tiles_n, group_m)
        row = first_row(tile_m, M, BLOCK_SIZE_M)
        for k in range(blocks):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, (BLOCK_SIZE_M + BLOCK_SIZE_N) * BLOCK_SIZE_K + BLOCK_SIZE_M * 4)
            tma_load(x, [row, k * BLOCK_SIZE_K], bar, x_ring.index(slot))
            tma_load(w, [tile_n * BLOCK_SIZE_N, k * BLOCK_SIZE_K], bar, w_ring.index(slot))
            tma_load(scales, [k * scale_stride + row], bar, scale_ring.index(slot))
            slot, phase = after(slot, phase, STAGES)


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
    w = w_ring.index(slot).slice(COLUMN, COLUMNS).permute((1, 0))
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
def multiply(
    GROUP: gl.constexpr, out, w_scale_ptr, w_scale_stride, x_ring, w_ring, scale_ring, out_stage, full, empty,
    M, N, tiles_m, tiles_n, blocks, programs, group_m, never,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SCALE_BLOCK: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile.

    K blocks come in batches of four with nothing in flight between batches: over a loop's back edge ptxas would
    serialise every matrix instruction.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    ROW: gl.constexpr = GROUP * 64 if BLOCK_SIZE_M == 128 else 0
    COLUMN: gl.constexpr = 0 if BLOCK_SIZE_M == 128 else GROUP * COLUMNS
    TILE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    slot = 0
    phase = 0
    d0 = gl.zeros([64, COLUMNS], gl.float32, TILE)
    d1 = gl.zeros([64, COLUMNS], gl.float32, TILE)
    batches = blocks // 4
    last = blocks - 1
    for t in range(gl.program_id(0), tiles_m * tiles_n, programs):
        tile_m, tile_n = tile_at(t, tiles_m, tiles_n, group_m)
        row = first_row(tile_m, M, BLOCK_SIZE_M)
        column = tile_n * BLOCK_SIZE_N + COLUMN
        p = w_scale_ptr + gl.minimum(column, N - 1) // SCALE_BLOCK * w_scale_stride
        # The weight's scales come one batch ahead: their latency would show otherwise.
        n0 = gl.load(p)
        n1 = gl.load(p + gl.minimum(1, last))
        n2 = gl.load(p + gl.minimum(2, last))
        n3 = gl.load(p + gl.minimum(3, last))
        acc = gl.zeros([64, COLUMNS], gl.float32, TILE)
        for batch in range(batches):
            w0 = n0
            w1 = n1
            w2 = n2
            w3 = n3
            slot0 = slot
            s0, f0 = begin_block(x_ring, w_ring, scale_ring, full, slot, phase, d0, never, ROW, COLUMN, COLUMNS, ROWS)
            n0 = gl.load(p + gl.minimum(batch * 4 + 4, last))
            n1 = gl.load(p + gl.minimum(batch * 4 + 5, last))
            n2 = gl.load(p + gl.minimum(batch * 4 + 6, last))
            n3 = gl.load(p + gl.minimum(batch * 4 + 7, last))
            slot, phase = after(slot, phase, STAGES)
            slot1 = slot
            s1, f1 = begin_block(x_ring, w_ring, scale_ring, full, slot, phase, d1, never, ROW, COLUMN, COLUMNS, ROWS)
            acc, d0 = end_block(acc, f0, s0, w0, empty, slot0, 1)
            slot, phase = after(slot, phase, STAGES)
            slot0 = slot
            s0, f0 = begin_block(x_ring, w_ring, scale_ring, full, slot, phase, d0, never, ROW, COLUMN, COLUMNS, ROWS)
            acc, d1 = end_block(acc, f1, s1, w1, empty, slot1, 1)
            slot, phase = after(slot, phase, STAGES)
            slot1 = slot
            s1, f1 = begin_block(x_ring, w_ring, scale_ring, full, slot, phase, d1, never, ROW, COLUMN, COLUMNS, ROWS)
            acc, d0 = end_block(acc, f0, s0, w2, empty, slot0, 1)
            acc, d1 = end_block(acc, f1, s1, w3, empty, slot1, 0)
            slot, phase = after(slot, phase, STAGES)
        for k in range(batches * 4, blocks):
            w0 = gl.load(p + k)
            s0, f0 = begin_block(x_ring, w_ring, scale_ring, full, slot, phase, d0, never, ROW, COLUMN, COLUMNS, ROWS)
            acc, d0 = end_block(acc, f0, s0, w0, empty, slot, 0)
            slot, phase = after(slot, phase, STAGES)
        tma.store_wait(0)
        stage = out_stage.index(GROUP)
        stage.store(acc.to(stage.dtype))
        fence_async_shared()
        tma_store(out, [row + ROW, column], stage)
    tma.store_wait(0)


@gluon.jit
def blockscale_warp_specialised(
    x, w, scales, out, w_scale_ptr, M, N, w_scale_stride, scale_stride, blocks, programs, group_m,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; x, w, scales and out are tensor descriptors, scales flat and K-major."""
    COLUMNS: gl.constexpr = BLOCK_SIZE_N if BLOCK_SIZE_M == 128 else BLOCK_SIZE_N // 2
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], scales.layout)
    out_stage = gl.allocate_shared_memory(out.dtype, [2, 64, COLUMNS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    never = M < 0
    gl.warp_specialize([
        (multiply, (0, out, w_scale_ptr, w_scale_stride, x_ring, w_ring, scale_ring, out_stage, full, empty,
                    M, N, tiles_m, tiles_n, blocks, programs, group_m, never,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK)),
        (multiply, (1, out, w_scale_ptr, w_scale_stride, x_ring, w_ring, scale_ring, out_stage, full, empty,
                    M, N, tiles_m, tiles_n, blocks, programs, group_m, never,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SCALE_BLOCK)),
        (load_ring, (x, w, scales, x_ring, w_ring, scale_ring, full, empty, M, scale_stride, tiles_m, tiles_n, blocks,
                     programs, group_m, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES)),
    ], [4, 1], [232, 24])  # fmt: skip
