"""The second product of the experts on Hopper with a tile of its own for each math warpgroup, in turn.

As _grouped.py with 64-row blocks, whose tile both warpgroups share; here each has every other tile: CUTLASS calls
this schedule ping-pong, and the other cooperative. With K of a few K blocks a tile's start and end take as long as its
products, so that one warpgroup starts or stores a tile while the other multiplies. Written in Gluon, which has no
interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemmpipe.kernels.fmoe._grouped import (
    GroupedEpilogue,
    GroupedWork,
    add_block,
    apply_epilogue,
    epilogue_kind,
    load_x,
    shares_of_rows,
    store_block,
)
from gemmpipe.templates.hopper.gluon_compat import tma_load
from gemmpipe.templates.hopper.pipeline import Ring, advance, allocate_barriers, gdc_launch_dependents, gdc_wait
from gemmpipe.templates.hopper.tile_scheduler import WarpgroupPartition, accumulator_layout, swizzled_tile

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@gluon.constexpr_function
def whole_tile(group, block_n, bits):
    """The partition of a warpgroup that multiplies a whole tile of 64 rows."""
    depth = 256 // bits
    found = (64, block_n, group, 0, 0, block_n, 1, block_n, depth, accumulator_layout(block_n, depth))
    return WarpgroupPartition(*map(gl.constexpr, found))


@gluon.jit
def block_of_tile(t, work, blocks, tiles_n):
    """(the expert, the number of rows) of tile t's block; 0 past the last tile."""
    inside = t < blocks * tiles_n
    row, _ = swizzled_tile(gl.minimum(t, blocks * tiles_n - 1), blocks * 64, blocks, tiles_n, work.group_m, 64)
    return (
        gl.load(work.owners_ptr + row // 64, mask=inside, other=0),
        gl.load(work.rows_ptr + row // 64, mask=inside, other=0),
    )


@gluon.jit
def pingpong_producer_warp(x, w, scales, ring, turns, work, BLOCK_SIZE_N: gl.constexpr):
    """The loader warp: as grouped_producer_warp, for slots that one warpgroup empties.

    The next tile's block is looked up a tile ahead: its latency would delay that tile's copies.
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    for i in gl.static_range(SLOTS):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    mbarrier.arrive(ring.ready, count=1)
    gdc_wait()
    gdc_launch_dependents()
    slot = 0
    phase = 1
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    REST_BYTES: gl.constexpr = W_BYTES + (0 if ring.scales is None else 256)
    blocks = gl.load(work.blocks_ptr)
    tiles_n = gl.cdiv(work.N, BLOCK_SIZE_N)
    next_expert, next_rows = block_of_tile(gl.program_id(0), work, blocks, tiles_n)
    for t in range(gl.program_id(0), blocks * tiles_n, work.programs):
        expert, rows = next_expert, next_rows
        next_expert, next_rows = block_of_tile(t + work.programs, work, blocks, tiles_n)
        row, tile_n = swizzled_tile(t, blocks * 64, blocks, tiles_n, work.group_m, 64)
        w_row = expert * work.w_rows + tile_n * BLOCK_SIZE_N
        for k in range(work.k_blocks):
            mbarrier.wait(ring.empty.index(slot), phase)
            bar = ring.full.index(slot)
            load_x(x, ring.x.index(slot), row, k * BLOCK_SIZE_K, rows, bar, REST_BYTES)
            tma_load(w, [w_row, k * BLOCK_SIZE_K], bar, ring.w.index(slot))
            if ring.scales is not None:
                tma_load(scales, [k * work.capacity + row], bar, ring.scales.index(slot))
            slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def multiply_tile(ring, wg, slot, full, product, turns, turn, w_scales, k_blocks, never):
    """A tile's product over all of K, scaled by x's scales and w_scales[K block], if there are any.

    The other warpgroup's turn begins when the last slot is full: a barrier tells a filling of its slot from the next
    one, but not from the next but one, so that each is waited for in order. Returns (sum, registers of the product).
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    total = gl.zeros([64, wg.COLUMNS], gl.float32, wg.LAYOUT)
    w_scale = 1.0
    if ring.scales is not None:
        w_scale = gl.load(w_scales)
    mbarrier.wait(turns.index(wg.GROUP), turn)
    for k in range(k_blocks):
        mbarrier.wait(ring.full.index(slot), full)
        mbarrier.arrive(turns.index(1 - wg.GROUP), count=1, pred=k == k_blocks - 1)
        w = ring.w.index(slot).permute((1, 0))
        if ring.scales is not None:
            next_scale = gl.load(w_scales + gl.minimum(k + 1, k_blocks - 1))
            scales = ring.scales.index(slot).load(gl.SliceLayout(1, wg.LAYOUT))
            flying = warpgroup_mma(ring.x.index(slot), w, product, use_acc=never, is_async=True)
            product = warpgroup_mma_wait(0, deps=[flying])
            mbarrier.arrive(ring.empty.index(slot), count=1)
            total += product * (scales * w_scale)[:, None]
            w_scale = next_scale
        else:
            flying = warpgroup_mma(ring.x.index(slot), w, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[flying])
            mbarrier.arrive(ring.empty.index(slot), count=1)
        slot, full = advance(slot, full, SLOTS)
    return total, product


@gluon.jit
def pingpong_warpgroup(wg, kind, output, ring, turns, work):
    """A math warpgroup: every other tile of the program, 64 rows by BLOCK_SIZE_N."""
    SLOTS: gl.constexpr = ring.x.shape[0]
    product = gl.zeros([64, wg.COLUMNS], gl.float32, wg.LAYOUT)
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    blocks = gl.load(work.blocks_ptr)
    tiles_n = gl.cdiv(work.N, wg.BLOCK_SIZE_N)
    never = work.N < 0
    step = 2 * work.programs
    first = gl.program_id(0) + wg.GROUP * work.programs
    next_expert, next_rows = block_of_tile(first, work, blocks, tiles_n)
    filled = wg.GROUP * work.k_blocks  # slots that the loader fills before this tile's
    turn = 1 - wg.GROUP  # the first one is taken without waiting
    for t in range(first, blocks * tiles_n, step):
        expert, rows = next_expert, next_rows
        next_expert, next_rows = block_of_tile(t + step, work, blocks, tiles_n)
        row, tile_n = swizzled_tile(t, blocks * 64, blocks, tiles_n, work.group_m, 64)
        column = tile_n * wg.BLOCK_SIZE_N
        w_scales = output.w_scale_ptr
        if ring.scales is not None:
            scale_row = expert * gl.cdiv(work.w_rows, kind.SCALE_BLOCK) + column // kind.SCALE_BLOCK
            w_scales += scale_row * work.k_blocks
        share = 1.0
        if output.shares_ptr is not None:
            share = shares_of_rows(output, row, rows, wg)[:, None]
        total, product = multiply_tile(
            ring, wg, filled % SLOTS, filled // SLOTS & 1, product, turns, turn, w_scales, work.k_blocks, never
        )
        total = apply_epilogue(total, output, row, expert, column, work, wg, kind, wg.LAYOUT)
        if kind.TOPK:
            add_block(total * share, output, ring, row, column, rows, work.N, wg, kind.TOPK)
        else:
            store_block(total, output.out, ring, row, column, rows, work.N, wg, wg.LAYOUT)
        filled += 2 * work.k_blocks
        turn = turn ^ 1
    if ring.stage is not None and not kind.TOPK:
        tma.store_wait(0)


@gluon.jit
def pingpong_warp_specialised(
    x, w, scales, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, sources_ptr, shares_ptr, zeroed_ptr,
    owners_ptr, rows_ptr, blocks_ptr, N, w_rows, capacity, k_blocks, programs, group_m, zeroed,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, SCALES: gl.constexpr,
    ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, TOP: gl.constexpr, FEW: gl.constexpr,
    TOPK: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """out[place, N] = x[place, K] @ w[the block's expert, N, K]^T; arguments as in grouped_warp_specialised.

    BLOCK_SIZE_M is 64, GATED false, ACTIVATION `none`, out_scale_ptr and zeroed_ptr None.
    """
    BITS: gl.constexpr = x.dtype.primitive_bitwidth
    kind: gl.constexpr = epilogue_kind(SCALES, ROW_SCALES, ACTIVATION, GATED, TOP, SCALE_BLOCK, TOPK)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    scale_ring = None
    if SCALES == "block":
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], scales.layout)
    stage = None
    if TOPK:
        SWIZZLE: gl.constexpr = 128 if STAGED >= 64 else 2 * STAGED
        ADDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=2)
        stage = gl.allocate_shared_memory(out.dtype.element_ty, [2, 64, STAGED], ADDED)
    elif not FEW:
        stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    output = GroupedEpilogue(
        out, w_scale_ptr, row_scale_ptr, out_scale_ptr, sources_ptr, shares_ptr, zeroed_ptr, zeroed
    )
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    work = GroupedWork(owners_ptr, rows_ptr, blocks_ptr, N, w_rows, capacity, k_blocks, programs, group_m)
    gl.warp_specialize([
        (pingpong_warpgroup, (whole_tile(0, BLOCK_SIZE_N, BITS), kind, output, ring, turns, work)),
        (pingpong_warpgroup, (whole_tile(1, BLOCK_SIZE_N, BITS), kind, output, ring, turns, work)),
        (pingpong_producer_warp, (x, w, scales, ring, turns, work, BLOCK_SIZE_N)),
    ], [4, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
