"""The loop over K of a block-scaled tile, each warpgroup at its own pace: one product at a time, as PTX.

While one warpgroup adds up a product, the other's runs, if adding up and all that leads to the next product takes less
time than a product. Triton synchronises the warps of a warpgroup before each wait for a barrier and before each arrival,
and orders scales, waits and additions as it likes: with that a K block of 160 columns took longer than two products
(docs/explanation/kernels.md). Here every warp waits and arrives by itself, a slot is tested before the additions that
lead to it, w's scales are loaded a K block ahead, and x's and their products while the matrix instructions run.

The instructions need addresses, which Gluon does not expose: slots, x's scales and barriers are one allocation at the
beginning of the program's shared memory (`allocate`), as in wgmma_any_n.py. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import view_as, view_as_ring
from gemmpipe.templates.hopper.waves import wave_part_columns
from gemmpipe.templates.hopper.wgmma_any_n import _check_ring_address

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

WARPS = gl.constexpr(8)
"""Warps of both warpgroups, each of which releases a slot."""


@gluon.constexpr_function
def row_bytes():
    """Bytes of the rows in which scales and barriers are placed; a function, as a kernel's hash covers its code."""
    return 512


@gluon.constexpr_function
def scale_rows(block_m, stages):
    """Rows that x's scales take."""
    return stages * block_m * 4 // row_bytes()


@gluon.constexpr_function
def control_bytes(block_m, block_n, stages):
    """Bytes between the slots of x and of w: x's scales and a row for each of the two groups of barriers.

    Whole buffers of a part, and a power of two, by which the slots of x can be divided.
    """
    needed = (scale_rows(block_m, stages) + 2) * row_bytes()
    return max(1 << (needed - 1).bit_length(), wave_part_columns(block_n) * 128)


@gluon.jit
def allocate(x, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr):
    """(x's slots, w's slots, x's scales, full, empty): views of one allocation of buffers as wide as a part.

    It is the largest, which Triton places first. w's view is all of it, with its slots last.
    """
    WIDTH: gl.constexpr = wave_part_columns(BLOCK_SIZE_N)
    CONTROL: gl.constexpr = control_bytes(BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES)
    X_BYTES: gl.constexpr = STAGES * BLOCK_SIZE_M * 128
    BUFFERS: gl.constexpr = STAGES * (BLOCK_SIZE_M + BLOCK_SIZE_N) // WIDTH + CONTROL // (WIDTH * 128)
    ROWS: gl.constexpr = scale_rows(BLOCK_SIZE_M, STAGES)
    LENGTH: gl.constexpr = row_bytes() // 4
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    everything = gl.allocate_shared_memory(x.dtype, [BUFFERS, WIDTH, 128], x.layout)
    x_ring = view_as_ring(everything, STAGES, BLOCK_SIZE_M)
    # A view is at most as large as what it views (Triton 3.9).
    control = view_as(everything, gl.float32, [X_BYTES // CONTROL + 1, CONTROL // 4], FLAT).index(X_BYTES // CONTROL)
    scales = view_as(control, gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    rows = view_as(control, gl.float32, [ROWS + 2, LENGTH], FLAT)
    full = view_as(rows.index(ROWS), gl.int64, [STAGES, 1], BARRIERS)
    empty = view_as(rows.index(ROWS + 1), gl.int64, [STAGES, 1], BARRIERS)
    return x_ring, everything, scales, full, empty


@gluon.jit
def init_warp(ring, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr):
    """pipeline.barrier_init_warp for slots that every math warp releases, after a check of the allocation's address."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    _check_ring_address(ring.w)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ring.full.index(i), count=FILLERS)
        mbarrier.init(ring.empty.index(i), count=WARPS)
    fence_async_shared()
    mbarrier.arrive(ring.ready, count=1)
    cluster_arrive(SPLIT_K)


@gluon.constexpr_function
def first_row_of_w(block_m, block_n, stages):
    """The row of the allocation with which w's slots begin."""
    return stages * block_m + control_bytes(block_m, block_n, stages) // 128


@gluon.constexpr_function
def _product(columns, wave):
    """PTX: start the product of a wave's rows and a K block in the registers d, with none of the sums in it."""
    names = ", ".join(f"d{i}" for i in range(columns // 2))
    steps = [
        f"setp.ne.b32 p, {int(i > 0)}, 0; add.s64 x, x_slot, {512 * wave + 2 * i}; add.s64 w, w_slot, {2 * i};"
        f" wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{names}}}, x, w, p, 1, 1;"
        for i in range(4)
    ]
    return " ".join(["wgmma.fence.sync.aligned;", *steps, "wgmma.commit_group.sync.aligned;"])


@gluon.constexpr_function
def _scale_products(parts, edges):
    """PTX: s<2 part + row>, the products of scales of the parts' columns and the thread's two rows."""
    text = ["mul.f32 l0, r0, low; mul.f32 l1, r1, low;"]
    if not edges:
        return text[0]
    text += ["mul.f32 h0, r0, high; mul.f32 h1, r1, high;"]
    text += [f"selp.f32 s{2 * j + row}, l{row}, h{row}, e{j};" for j in range(parts) for row in range(2)]
    return " ".join(text)


@gluon.constexpr_function
def _additions(columns, parts, edges, first):
    """PTX: add the product d, scaled, to the sums, which are the operands from `first` on."""
    width = columns // 2 // parts
    scales = [f"s{2 * (i // width) + i // 2 % 2}" if edges else f"l{i // 2 % 2}" for i in range(columns // 2)]
    return " ".join(f"fma.rn.f32 ${first + i}, d{i}, {scale}, ${first + i};" for i, scale in enumerate(scales))


@gluon.constexpr_function
def _slot_addresses(block_m, block_n):
    """PTX: the addresses of a slot's barriers, of the thread's scales in it, and the descriptors of its x and w."""
    return (
        "mad.lo.u32 full, slot, 8, fulls; mad.lo.u32 empty, slot, 8, empties;"
        f" mad.lo.u32 rows, slot, {4 * block_m}, all_rows;"
        f" mul.wide.u32 x, slot, {8 * block_m}; add.s64 x_slot, x, x_first;"
        f" mul.wide.u32 w, slot, {8 * block_n}; add.s64 w_slot, w, w_first;"
    )


@gluon.constexpr_function
def loop_asm(columns, parts, block_m, block_n, stages, row, edges):
    """PTX of the loop. Operands after the sums, `width` times each: those of multiply_at_own_pace, in order, and rows."""
    waves = block_m // 128
    sums, width = waves * columns // 2, columns // 2 // parts
    given = [f"${sums + i * width}" for i in range(9)]
    slots = stages * block_m * 128
    barriers = slots + scale_rows(block_m, stages) * row_bytes()
    registers = (
        ".reg .pred p, ready, more, wrapped, leader; .reg .b32 at, slot, phase, left, full, empty, rows, lane;"
        " .reg .b32 fulls, empties, all_rows; .reg .b64 x, w, x_slot, w_slot, x_first, w_first, lows, highs;"
        f" .reg .f32 d<{columns // 2}>, s<{2 * parts}>; .reg .f32 r0, r1, l0, l1, h0, h1, low, high, next_low,"
        f" next_high; .reg .pred e<{parts}>;"
    )
    begin = [
        *(f"mov.f32 ${i}, 0f00000000;" for i in range(sums)),
        f"mov.b64 x_first, {given[0]}; mov.b64 w_first, {given[1]}; mov.b64 lows, {given[2]}; mov.b64 highs, {given[3]};",
        # From lane 0, so that ptxas knows that they are the same in a warp: a worker's arguments come from memory.
        *(
            f"shfl.sync.idx.b32 {name}, {each}, 0, 31, -1;"
            for name, each in zip(("slot", "phase", "left"), given[4:7], strict=True)
        ),
        *(f"setp.gt.s32 e{j}, {given[7]}, {2 * j * width};" for j in range(parts if edges else 0)),
        f"mov.u32 at, global_smem; add.u32 fulls, at, {barriers}; add.u32 empties, fulls, {row_bytes()};",
        # Not from %tid.x: with that ptxas computes a worker's addresses and descriptors for each thread.
        f"mad.lo.u32 all_rows, {given[8]}, 4, at; add.u32 all_rows, all_rows, {slots + 4 * row};",
        "mov.u32 lane, %laneid; setp.eq.u32 leader, lane, 0;",
        "ld.global.f32 low, [lows];" + (" ld.global.f32 high, [highs];" if edges else ""),
        _slot_addresses(block_m, block_n),
        "mbarrier.try_wait.parity.shared::cta.b64 ready, [full], phase;",
    ]
    body = ["next_block:", "@ready bra.uni filled;", "wait_block:"]
    body += ["mbarrier.try_wait.parity.shared::cta.b64 ready, [full], phase;", "@!ready bra.uni wait_block;", "filled:"]
    body += ["setp.gt.s32 more, left, 1;"]
    for wave in range(waves):
        body += [_product(columns, wave)]
        if wave == 0:
            body += ["@more ld.global.f32 next_low, [lows + 4];"]
            body += ["@more ld.global.f32 next_high, [highs + 4];"] if edges else []
        body += [f"ld.shared.f32 r0, [rows + {256 * wave}];", f"ld.shared.f32 r1, [rows + {256 * wave + 32}];"]
        body += [_scale_products(parts, edges), "wgmma.wait_group.sync.aligned 0;"]
        if wave == waves - 1:
            body += ["@leader mbarrier.arrive.shared::cta.b64 _, [empty];"]
            body += [f"add.u32 slot, slot, 1; setp.eq.u32 wrapped, slot, {stages}; selp.b32 slot, 0, slot, wrapped;"]
            body += ["selp.b32 at, 1, 0, wrapped; xor.b32 phase, phase, at;", _slot_addresses(block_m, block_n)]
            body += ["@more mbarrier.try_wait.parity.shared::cta.b64 ready, [full], phase;"]
        body += [_additions(columns, parts, edges, wave * columns // 2)]
    body += ["add.s64 lows, lows, 4; add.s64 highs, highs, 4; mov.f32 low, next_low; mov.f32 high, next_high;"]
    body += ["sub.s32 left, left, 1;", "@more bra.uni next_block;"]
    return "{ " + " ".join([registers, *begin, *body]) + " }"


@gluon.constexpr_function
def _constraints(columns, parts, waves):
    width = columns // 2 // parts
    return ",".join(["=&f"] * (waves * columns // 2) + ["l"] * (4 * width) + ["r"] * (5 * width))


@gluon.constexpr_function
def _types(count):
    return (gl.float32,) * count


@gluon.jit
def multiply_at_own_pace(
    wg, x_at, w_at, slot, phase, blocks, low_ptr, high_ptr, edge, STAGES: gl.constexpr, EDGES: gl.constexpr
):
    """The sums of a tile's K blocks, from this slot on; returns (slot, phase, sums).

    x_at, w_at: wgmma_any_n.matrix_descriptors of this warpgroup. low_ptr, high_ptr: w's scales along K of the columns
    before `edge` and from there on; without EDGES all columns have the first. blocks: at least 1.
    """
    WAVES: gl.constexpr = wg.BLOCK_SIZE_M // 128
    text: gl.constexpr = loop_asm(wg.COLUMNS, wg.PARTS, wg.BLOCK_SIZE_M, wg.BLOCK_SIZE_N, STAGES, wg.ROW, EDGES)
    constraints: gl.constexpr = _constraints(wg.COLUMNS, wg.PARTS, WAVES)
    types: gl.constexpr = _types(WAVES * wg.PARTS)
    wide = gl.zeros([64, wg.WIDTH], gl.int64, wg.LAYOUT)
    narrow = gl.zeros([64, wg.WIDTH], gl.int32, wg.LAYOUT)
    lows, highs = low_ptr.to(gl.int64, bitcast=True), high_ptr.to(gl.int64, bitcast=True)
    operands = (wide + x_at, wide + w_at, wide + lows, wide + highs)
    rows = gl.arange(0, 64, gl.SliceLayout(1, wg.LAYOUT)).expand_dims(1)  # the first element's is its thread's first
    operands += (narrow + slot, narrow + phase, narrow + blocks, narrow + edge, narrow + rows)
    sums = gl.inline_asm_elementwise(text, constraints, operands, dtype=types, is_pure=False, pack=wg.WIDTH // 2)
    used = slot + blocks
    return used % STAGES, phase ^ (used // STAGES & 1), sums
