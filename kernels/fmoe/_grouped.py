"""The product of rows sorted by expert on Hopper, warp-specialised: a loader warp, two math warpgroups.

Programs are persistent; they read the number of blocks of rows and each block's expert from memory. The epilogue
scales, activates, quantises and stores a block. Written in Gluon, which has no interpreter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gemmpipe.kernels.a8w8_blockscale._hopper_kernel import scaled_mma_work_tile as scaled_sum
from gemmpipe.kernels.fmoe._kernel import activation
from gemmpipe.templates.hopper.dense_kernel import mma_work_tile as plain_sum
from gemmpipe.templates.hopper.epilogue import store_tile
from gemmpipe.templates.hopper.gluon_compat import tma_load
from gemmpipe.templates.hopper.pipeline import (
    Ring,
    advance,
    allocate_barriers,
    gdc_launch_dependents,
    gdc_wait,
    init_slot_barriers,
)
from gemmpipe.templates.hopper.tile_scheduler import accumulator_layout, swizzled_tile, warpgroup_partition

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


class EpilogueKind(NamedTuple):
    """The epilogue's constants (see grouped_warp_specialised).

    PAIRED: one warpgroup has the gate's columns, the other the up projection's. TOPK: 0, or the pairs of a row of the
    output, to which rows are added (add_block).
    """

    SCALES: gl.constexpr
    ROW_SCALES: gl.constexpr
    ACTIVATION: gl.constexpr
    GATED: gl.constexpr
    PAIRED: gl.constexpr
    TOP: gl.constexpr
    SCALE_BLOCK: gl.constexpr
    TOPK: gl.constexpr

    def mangle(self) -> str:
        """Its part of the mangled name of a function that takes it."""
        return "kind_" + "_".join(str(each.value) for each in self)


@gluon.constexpr_function
def epilogue_kind(scales, row_scales, act, gated, top, scale_block, topk):
    """The EpilogueKind of a kernel's constants."""
    found = (scales, row_scales, act, gated, gated and scales == "block", top, scale_block, topk)
    return EpilogueKind(*map(gl.constexpr, found))


class GroupedEpilogue(NamedTuple):
    """The output (a tensor descriptor or a pointer), and the scales that the epilogue reads and writes, or None.

    For rows that are added up, or None: sources_ptr, the pair of each place; shares_ptr, the factor of each pair;
    zeroed_ptr, zeroed elements that the first product sets to zero, to which the second one adds.
    """

    out: object
    w_scale_ptr: gl.tensor
    row_scale_ptr: gl.tensor
    out_scale_ptr: gl.tensor
    sources_ptr: gl.tensor
    shares_ptr: gl.tensor
    zeroed_ptr: gl.tensor
    zeroed: gl.tensor


class WarpgroupExchange(NamedTuple):
    """Shared memory of two warpgroups with one side each: halves of their sums, largest magnitudes, barriers."""

    swap: gl.shared_memory_descriptor
    maxima: gl.shared_memory_descriptor
    meetings: gl.shared_memory_descriptor


@gluon.jit
def warpgroup_exchange(COLUMNS: gl.constexpr):
    """A WarpgroupExchange for warpgroups of COLUMNS columns each, in shared memory of its own."""
    SWAPPED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    swap = gl.allocate_shared_memory(gl.bfloat16, [2, 64, COLUMNS // 2], SWAPPED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    meetings = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(meetings.index(i), count=2)
    fence_async_shared()
    return WarpgroupExchange(swap, maxima, meetings)


@gluon.jit
def fast_activation(value, NAME: gl.constexpr):
    """_kernel.activation; silu by 5 instructions per element, not 15, whose approximations err by 2^-22.

    Below -88, where exp(-value) is infinite, the result is 0 instead of less than 1e-36 in magnitude.
    """
    if NAME == "silu":
        asm: gl.constexpr = """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }"""  # -log2(e), 1
        value = gl.inline_asm_elementwise(asm, "=f,f", [value], dtype=gl.float32, is_pure=True, pack=1)
    else:
        value = activation(value, NAME)
    return value


@gluon.jit
def apply_epilogue(total, output, row, expert, column, work, wg, kind, HALF: gl.constexpr):
    """[64, columns] times the scales of whole rows and columns, activated; GATED: act(first half) * second half."""
    if kind.ROW_SCALES:
        total = total * gl.load(output.row_scale_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, wg.LAYOUT)))[:, None]
    if kind.SCALES == "row":
        columns = gl.arange(0, total.shape[1], gl.SliceLayout(0, wg.LAYOUT))
        if kind.GATED:
            SIDE: gl.constexpr = total.shape[1] // 2
            columns = gl.where(columns < SIDE, columns, columns - SIDE + work.N)
        inside = gl.minimum(column + columns, work.w_rows - 1)
        total = total * gl.load(output.w_scale_ptr + expert * work.w_rows + inside)[None, :]
    if kind.GATED:
        gate, up = total.reshape([64, 2, total.shape[1] // 2]).permute((0, 2, 1)).split()
        total = gl.convert_layout(fast_activation(gate, kind.ACTIVATION) * up, HALF)
    else:
        total = fast_activation(total, kind.ACTIVATION)
    return total


@gluon.jit
def warpgroups_sync(bar, phase):
    """Wait until both math warpgroups have arrived; what each wrote to shared memory before may then be read."""
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, phase)


@gluon.jit
def exchange_and_quantise(total, pair, phase, scale_ptr, wg, kind, LAYOUT: gl.constexpr):
    """[64, 128] of the gate in one warpgroup and of the up projection in the other: act(gate) * up, half of it in each.

    It is one group of columns along the next product's K: quantised with the scale (a row's largest magnitude over TOP)
    that is stored at scale_ptr.
    """
    GROUP: gl.constexpr = wg.GROUP
    low, high = total.reshape([64, 2, total.shape[1] // 2]).permute((0, 2, 1)).split()
    if GROUP == 0:
        own = gl.convert_layout(low, LAYOUT)
        given = gl.convert_layout(high, LAYOUT)
    else:
        own = gl.convert_layout(high, LAYOUT)
        given = gl.convert_layout(low, LAYOUT)
    pair.swap.index(GROUP).store(given.to(pair.swap.dtype))
    warpgroups_sync(pair.meetings.index(0), phase)
    other = pair.swap.index(1 - GROUP).load(LAYOUT).to(gl.float32)
    if GROUP == 0:
        value = fast_activation(own, kind.ACTIVATION) * other
    else:
        value = fast_activation(other, kind.ACTIVATION) * own
    largest = gl.max(gl.abs(value), 1)
    pair.maxima.index(GROUP).store(largest)
    warpgroups_sync(pair.meetings.index(1), phase)
    largest = gl.maximum(largest, pair.maxima.index(1 - GROUP).load(gl.SliceLayout(1, LAYOUT)))
    scale = gl.where(largest > 0, largest / kind.TOP, 1.0)
    if GROUP == 0:
        gl.store(scale_ptr + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), scale)
    return value / scale[:, None]


@gluon.jit
def store_rows(total, out_ptr, row, column, rows, N, LAYOUT: gl.constexpr):
    """Store the first `rows` rows of [64, columns], converted; the rest of the block is padding."""
    at = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = out_ptr + (row + at).to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(ptrs, total.to(out_ptr.dtype.element_ty), mask=(at < rows)[:, None] & (columns < N)[None, :])


@gluon.jit
def store_block(total, out, ring, row, column, rows, N, wg, LAYOUT: gl.constexpr):
    """Store a warpgroup's [64, columns] through the stage buffer; without one the first `rows`, the rest is padding."""
    if ring.stage is None:
        store_rows(total, out, row, column, rows, N, LAYOUT)
    else:
        store_tile(total, out, ring.stage.index(wg.GROUP), row, column)


@gluon.constexpr_function
def added_layout(columns):
    """Threads of a tile's additions to the output: 16 bytes per thread, a row's threads side by side."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def shares_of_rows(output, row, rows, wg):
    """The factors of the first `rows` of 64 rows, those of their pairs."""
    at = gl.arange(0, 64, gl.SliceLayout(1, wg.LAYOUT))
    return gl.load(output.shares_ptr + gl.load(output.sources_ptr + row + at, mask=at < rows, other=0))


@gluon.jit
def add_block(total, output, ring, row, column, rows, N, wg, TOPK: gl.constexpr):
    """Add the first `rows` rows of a warpgroup's [64, columns], converted, to the output's rows of their pairs.

    By atomic additions of 8 columns, whose order varies. Through the stage buffer, wide tiles by halves.
    """
    STAGED: gl.constexpr = ring.stage.shape[2]
    if total.shape[1] == STAGED:
        _stage_and_add(total, output, ring, row, column, rows, N, wg, TOPK)
    else:
        low, high = total.reshape([64, 2, STAGED]).permute((0, 2, 1)).split()
        _stage_and_add(low, output, ring, row, column, rows, N, wg, TOPK)
        _stage_and_add(high, output, ring, row, column + STAGED, rows, N, wg, TOPK)


@gluon.jit
def _stage_and_add(total, output, ring, row, column, rows, N, wg, TOPK: gl.constexpr):
    LAYOUT: gl.constexpr = added_layout(total.shape[1])
    at = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    target = gl.load(output.sources_ptr + row + at, mask=at < rows, other=0) // TOPK
    columns = column + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    stage = ring.stage.index(wg.GROUP)
    stage.store(total.to(stage.dtype))
    ptrs = output.out + target.to(gl.int64)[:, None] * N + columns[None, :]
    gl.atomic_add(ptrs, stage.load(LAYOUT), mask=(at < rows)[:, None] & (columns < N)[None, :], sem="relaxed")


class GroupedWork(NamedTuple):
    """Rows sorted by expert, in blocks of a tile's height, and their product.

    owners_ptr: the expert of each block; rows_ptr: its number of rows; blocks_ptr: the number of blocks. Each expert's
    weight has w_rows rows and gives N columns of the output. capacity: places for rows. k_blocks: K blocks. group_m:
    see swizzled_tile.
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
def expert_of_tile(t, work, blocks, tiles_n, BLOCK_SIZE_M: gl.constexpr):
    """The expert of tile t; 0 past the last tile."""
    tile = gl.minimum(t, blocks * tiles_n - 1)
    row, _ = swizzled_tile(tile, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
    return gl.load(work.owners_ptr + row // BLOCK_SIZE_M, mask=t < blocks * tiles_n, other=0)


@gluon.jit
def load_x(x, place, row, k, rows, bar, REST_BYTES: gl.constexpr):
    """Start the copy of a block's rows; if boxes are smaller than a block, without boxes of padding alone.

    Rows that are not copied keep the slot's former contents; their results are never read. The slot is full after these
    copies and REST_BYTES of others.
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
def grouped_producer_warp(x, w, scales, ring, work, BLOCK_SIZE_N: gl.constexpr, GATED: gl.constexpr):
    """The loader warp: for each tile and K block, copies x, w and x's scales (or None) into the next empty slot.

    GATED: boxes of the gate's rows and of the up projection's alternate.
    """
    init_slot_barriers(ring)
    gdc_wait()
    gdc_launch_dependents()
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
        row, tile_n = swizzled_tile(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
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
            slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def mma_tile(
    ring, wg, slot, phase, d0, d1, w_scale_ptr, expert, w_row, work, never, SCALE_BLOCK: gl.constexpr
):  # fmt: skip
    """A tile's product over all of K, with x's block scales, if any, and those of w's rows from `w_row` on.

    Returns (slot, phase, sum, d0, d1).
    """
    if ring.scales is not None:
        scale_row = expert * gl.cdiv(work.w_rows, SCALE_BLOCK) + gl.minimum(w_row, work.w_rows - 1) // SCALE_BLOCK
        w_scales = w_scale_ptr + scale_row * work.k_blocks
        slot, phase, total, d0, d1 = scaled_sum(
            ring, wg, slot, phase, d0, d1, w_scales, 0, work.k_blocks, work.k_blocks - 1, never
        )  # fmt: skip
    else:
        acc = gl.zeros([64, wg.COLUMNS], gl.float32, wg.LAYOUT)
        slot, phase, total = plain_sum(ring, wg, slot, phase, acc, work.k_blocks)
    return slot, phase, total, d0, d1


@gluon.jit
def store_zeros(out_ptr, entries, programs, GROUP: gl.constexpr):
    """out[entries] = 0, divided among the math warpgroups of all programs."""
    STEP: gl.constexpr = 1024
    at = gl.arange(0, STEP, gl.BlockedLayout([8], [32], [4], [0]))
    zeros = gl.zeros([STEP], out_ptr.dtype.element_ty, gl.BlockedLayout([8], [32], [4], [0]))
    for begin in range((gl.program_id(0) * 2 + GROUP) * STEP, entries, programs * 2 * STEP):
        gl.store(out_ptr + begin + at, zeros, mask=begin + at < entries)


@gluon.jit
def math_warpgroup(wg, kind, output, ring, pair, work):
    """A math warpgroup: 64 rows of a 128-row tile, or half of the columns of a 64-row tile.

    PAIRED: that half is the gate's in one and the up projection's in the other, as each has its own scales along K.
    """
    BLOCK_SIZE_M: gl.constexpr = wg.BLOCK_SIZE_M
    SIDES: gl.constexpr = 2 if kind.GATED else 1
    HALF: gl.constexpr = accumulator_layout(wg.COLUMNS // SIDES, wg.DEPTH)
    slot = 0
    phase = 0
    turn = 0
    d0 = gl.zeros([64, wg.COLUMNS], gl.float32, wg.LAYOUT)
    d1 = gl.zeros([64, wg.COLUMNS], gl.float32, wg.LAYOUT)
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    if output.zeroed_ptr is not None:
        store_zeros(output.zeroed_ptr, output.zeroed, work.programs, wg.GROUP)
    blocks = gl.load(work.blocks_ptr)
    tiles_n = gl.cdiv(work.N, wg.BLOCK_SIZE_N // SIDES)
    never = work.N < 0
    following = expert_of_tile(gl.program_id(0), work, blocks, tiles_n, BLOCK_SIZE_M)
    for t in range(gl.program_id(0), blocks * tiles_n, work.programs):
        # The next tile's expert is loaded now: its latency would delay that tile's first scales.
        expert = following
        following = expert_of_tile(t + work.programs, work, blocks, tiles_n, BLOCK_SIZE_M)
        row, tile_n = swizzled_tile(t, blocks * BLOCK_SIZE_M, blocks, tiles_n, work.group_m, BLOCK_SIZE_M)
        rows = gl.load(work.rows_ptr + row // BLOCK_SIZE_M)
        column = (tile_n * wg.BLOCK_SIZE_N + wg.COLUMN) // SIDES
        w_row = tile_n * wg.COLUMNS + wg.GROUP * work.N if kind.PAIRED else column
        share = 1.0
        if output.shares_ptr is not None:
            share = shares_of_rows(output, row + wg.ROW, rows - wg.ROW, wg)[:, None]
        slot, phase, total, d0, d1 = mma_tile(
            ring, wg, slot, phase, d0, d1, output.w_scale_ptr, expert, w_row, work, never, kind.SCALE_BLOCK
        )
        if kind.PAIRED:
            scale_ptr = output.out_scale_ptr + tile_n * work.capacity + row
            total = exchange_and_quantise(total, pair, turn, scale_ptr, wg, kind, HALF)
            turn = turn ^ 1
        else:
            total = apply_epilogue(total, output, row + wg.ROW, expert, column, work, wg, kind, HALF)
        if kind.TOPK:
            add_block(total * share, output, ring, row + wg.ROW, column, rows - wg.ROW, work.N, wg, kind.TOPK)
        else:
            store_block(total, output.out, ring, row + wg.ROW, column, rows - wg.ROW, work.N, wg, HALF)
    if ring.stage is not None and not kind.TOPK:
        tma.store_wait(0)


@gluon.jit
def grouped_warp_specialised(
    x, w, scales, out, w_scale_ptr, row_scale_ptr, out_scale_ptr, sources_ptr, shares_ptr, zeroed_ptr,
    owners_ptr, rows_ptr, blocks_ptr, N, w_rows, capacity, k_blocks, programs, group_m, zeroed,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, SCALES: gl.constexpr,
    ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, TOP: gl.constexpr, FEW: gl.constexpr,
    TOPK: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """out[place, N] = act(x[place, K] @ w[the block's expert, w_rows, K]^T) of rows ordered by expert (see _order.py).

    x, w [experts * w_rows, K] and scales are tensor descriptors; out is one too, or with FEW, if a block is mostly
    padding, a pointer. SCALES: `none`, `row` (w_scale [experts, w_rows]) or `block` (SCALE_BLOCK rows of w and one K
    block; scales [K blocks, capacity] of x). ROW_SCALES: each row of the product is multiplied by its own scale. GATED:
    w has the gate's N rows, then the up projection's, and out is act(gate) * up; with `block` scales it is quantised to
    8 bits, of at most TOP, with scales [groups of columns, capacity]. ACTIVATION: `none`, `silu`, `gelu`.

    With TOPK rows are not stored but added, times shares[pair] if there are any, to row sources[place] // TOPK of out,
    a pointer to zeros, STAGED columns at a time; the first product sets its `zeroed` elements to zero at zeroed_ptr.
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
    pair = WarpgroupExchange(None, None, None)
    if kind.PAIRED:
        pair = warpgroup_exchange(BLOCK_SIZE_N // 2)
    output = GroupedEpilogue(
        out, w_scale_ptr, row_scale_ptr, out_scale_ptr, sources_ptr, shares_ptr, zeroed_ptr, zeroed
    )
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    work = GroupedWork(owners_ptr, rows_ptr, blocks_ptr, N, w_rows, capacity, k_blocks, programs, group_m)
    gl.warp_specialize([
        (math_warpgroup, (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), kind, output, ring, pair, work)),
        (math_warpgroup, (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, BITS), kind, output, ring, pair, work)),
        (grouped_producer_warp, (x, w, scales, ring, work, BLOCK_SIZE_N, GATED)),
    ], [4, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
