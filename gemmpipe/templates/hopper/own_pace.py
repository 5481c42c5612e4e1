"""The loop over K of a block-scaled tile, each warpgroup at its own pace, as PTX.

While one warpgroup adds up a product, the other's runs, if adding up and all that leads to the next product takes less
time than a product. In Gluon it takes longer: Triton synchronises the warps of a warpgroup before each wait for a
barrier and before each arrival (docs/explanation/kernels.md). Here every warp waits and arrives by itself, a slot is
tested before the additions that lead to it, w's scales are loaded a K block ahead, and the loop has a copy for each
place that an edge between two blocks of w's scales can have in a tile.

A warpgroup has one product at a time, or where registers hold two (`two_fit`) starts the next one before it adds up the
one before: in narrow tiles a product is too short to hide all that the other warpgroup does.

x's scales come with the slots, a column of each slot's K block, or in panels of four K blocks (scale_panels.py).

The instructions need the addresses of slots, x's scales and barriers (own_pace_memory.py). Written in Gluon, which has
no interpreter.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.hopper.own_pace_memory import line_bytes, scale_lines
from gemmpipe.templates.hopper.scale_panels import scale_panels
from gemmpipe.templates.hopper.waves import wave_count

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@dataclass(frozen=True)
class _Tile:
    """What the loops of a tile are made for. in_panels: x's scales are in panels; two: two products are in flight."""

    block_m: int
    columns: int
    stages: int
    in_panels: bool
    two: bool


@gluon.constexpr_function
def _product(columns, wave, into="d"):
    """PTX: start the product of a wave's rows and a K block in registers (d, or e), with none of the sums in it."""
    names = ", ".join(f"{into}{i}" for i in range(columns // 2))
    steps = [
        f"setp.ne.b32 p, {int(i > 0)}, 0; add.s64 x, x_slot, {512 * wave + 2 * i}; add.s64 w, w_slot, {2 * i};"
        f" wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{names}}}, x, w, p, 1, 1;"
        for i in range(4)
    ]
    return " ".join(["wgmma.fence.sync.aligned;", *steps, "wgmma.commit_group.sync.aligned;"])


@gluon.constexpr_function
def low_columns(columns, scale_block):
    """The numbers of columns that a tile can have before an edge between blocks of w's scales, each once."""
    return sorted({min(columns, scale_block - i * columns % scale_block) for i in range(scale_block)}, reverse=True)


@gluon.constexpr_function
def unrolled(columns):
    """K blocks of an iteration: two; four in narrow tiles, whose products are short (docs/explanation/kernels.md)."""
    return 4 if columns <= 96 else 2


@gluon.constexpr_function
def two_fit(columns):
    """Whether tiles of 64 or 128 rows may have two products in flight: registers hold both and the sums."""
    return columns <= 128


@gluon.constexpr_function
def iterations_of_a_panel(columns, two):
    """Two where an iteration has two K blocks; the loop with two products in flight has four of a panel."""
    return 1 if two and two_fit(columns) else 4 // unrolled(columns)


@gluon.constexpr_function
def _scale_products(edges, of=""):
    """PTX: l0, l1 (h0, h1), the products of w's scale before (after) the edge and x's of a thread's two rows."""
    pairs = [("l", "low"), ("h", "high")] if edges else [("l", "low")]
    return " ".join(f"mul.f32 {name}{row}, r{of}{row}, {scale}{of};" for name, scale in pairs for row in range(2))


@gluon.constexpr_function
def _additions(columns, low, first, of="d"):
    """PTX: add a product (d, or e), scaled, to the sums, which are the operands from `first` on.

    Of every four registers two are a row's, and two the row's eight further on; together they are eight columns.
    """
    scales = [f"{'l' if i // 4 * 8 < low else 'h'}{i // 2 % 2}" for i in range(columns // 2)]
    return " ".join(f"fma.rn.f32 ${first + i}, {of}{i}, {scale}, ${first + i};" for i, scale in enumerate(scales))


@gluon.constexpr_function
def _slot_addresses(tile):
    """PTX: the addresses of a slot's barriers, of the thread's scales in it, and the descriptors of its x and w."""
    return (
        "mad.lo.u32 full, slot, 8, fulls; mad.lo.u32 empty, slot, 8, empties;"
        f" {'' if tile.in_panels else f'mad.lo.u32 scales, slot, {4 * tile.block_m}, first_scales;'}"
        f" mul.wide.u32 x, slot, {8 * tile.block_m}; add.s64 x_slot, x, x_first;"
        f" mul.wide.u32 w, slot, {8 * tile.columns}; add.s64 w_slot, w, w_first;"
    )


@gluon.constexpr_function
def _panel_addresses(tile):
    """PTX: the thread's scales of an iteration, and the barrier and phase of their panel.

    `iteration` counts them: its lowest bits are the half of a panel, if it has two of them, the panel, and its phase.
    """
    halves, bits = iterations_of_a_panel(tile.columns, tile.two) - 1, scale_panels().bit_length() - 1
    return (
        f"bfe.u32 at, iteration, {halves}, {bits}; bfe.u32 panel_phase, iteration, {halves + bits}, 1;"
        f" mad.lo.u32 scales, at, {16 * tile.block_m}, first_scales; mad.lo.u32 panel_full, at, 8, panel_fulls;"
        f" {'and.b32 at, iteration, 1; mad.lo.u32 scales, at, 8, scales;' if halves else ''}"
    )


@gluon.constexpr_function
def _next_scales(tile):
    """PTX: release a panel after its last K block, and go on to the scales of the next iteration."""
    last = "setp.eq.u32 p, 0, 0;" if unrolled(tile.columns) == 4 else "and.b32 at, iteration, 1; setp.eq.u32 p, at, 1;"
    return (
        f"{last} and.pred p, p, leader; @p mbarrier.arrive.shared::cta.b64 _, [panel_full + {8 * scale_panels()}];"
        f" add.u32 iteration, iteration, 1; {_panel_addresses(tile)}"
    )


@gluon.constexpr_function
def _next_slot(tile):
    """PTX: go on to the next slot; `freed` is the barrier of the one before."""
    return (
        f"mov.b32 freed, empty; add.u32 slot, slot, 1; setp.eq.u32 wrapped, slot, {tile.stages};"
        " selp.b32 slot, 0, slot, wrapped; selp.b32 at, 1, 0, wrapped; xor.b32 phase, phase, at;"
        f" {_slot_addresses(tile)}"
    )


@gluon.constexpr_function
def _wait():
    """PTX: ready = whether the current slot is full; the test itself waits for a time that the hardware limits."""
    return "mbarrier.try_wait.parity.shared::cta.b64 ready, [full], phase;"


@gluon.constexpr_function
def _wait_for_panel():
    """PTX: panel_ready = whether the current panel of x's scales is full, as _wait."""
    return "mbarrier.try_wait.parity.shared::cta.b64 panel_ready, [panel_full], panel_phase;"


@gluon.constexpr_function
def _test():
    """PTX: as _wait, at once: what follows is done while the slot is not full."""
    return "mbarrier.test_wait.parity.shared::cta.b64 ready, [full], phase;"


@gluon.constexpr_function
def _test_panel():
    """PTX: as _wait_for_panel, at once."""
    return "mbarrier.test_wait.parity.shared::cta.b64 panel_ready, [panel_full], panel_phase;"


@gluon.constexpr_function
def _block(tile, waves, low, i):
    """PTX of K block i of an iteration: (the instructions if its slot is full by now, those that wait for it)."""
    edges, name, begins = low < tile.columns, f"{waves}_{low}_{i}", tile.in_panels and i == 0
    row, place = (16, 4 * i) if tile.in_panels else (4, 0)
    body = [f"@!ready bra.uni wait_{name};", f"@!panel_ready bra.uni wait_{name};" if begins else "", f"full_{name}:"]
    body += ["setp.gt.s32 more, left, 1; selp.b64 step, 4, 0, more;"]
    body += ["add.s64 lows, lows, step; add.s64 highs, highs, step;"]
    for wave in range(waves):
        first, last = 64 * row * wave + place, wave == waves - 1
        body += [f"ld.shared.f32 r0, [scales + {first}]; ld.shared.f32 r1, [scales + {first + 8 * row}];"]
        body += [_product(tile.columns, wave)]
        if wave == 0:
            body += ["ld.global.f32 next_low, [lows];", "ld.global.f32 next_high, [highs];" if edges else ""]
        body += [_scale_products(edges)]
        if tile.in_panels and last and i == unrolled(tile.columns) - 1:
            # While the product runs: between two products of narrow tiles there is no time for it.
            body += [_next_scales(tile), f"@more {_test_panel()}"]
        body += ["wgmma.wait_group.sync.aligned 0;"]
        if last:
            body += [_next_slot(tile), "@leader mbarrier.arrive.shared::cta.b64 _, [freed];", f"@more {_test()}"]
        body += [_additions(tile.columns, low, wave * tile.columns // 2)]
    body += ["mov.f32 low, next_low;", "mov.f32 high, next_high;" if edges else "", "sub.s32 left, left, 1;"]
    wait = f"wait_{name}: {_wait()} @!ready bra.uni wait_{name};"
    wait += f" {_wait_for_panel()} @!panel_ready bra.uni wait_{name};" if begins else ""
    return " ".join(body), f"{wait} bra.uni full_{name};"


@gluon.constexpr_function
def _two_start(tile, low, i):
    """PTX: start the product of K block i of an iteration, and go on to the next slot; (it, the wait for its slot)."""
    name, begins, into = f"1_{low}_{i}", tile.in_panels and i % 4 == 0, "de"[i % 2]
    row, place = (16, 4 * (i % 4)) if tile.in_panels else (4, 0)
    body = [f"@!ready bra.uni wait_{name};", f"@!panel_ready bra.uni wait_{name};" if begins else "", f"full_{name}:"]
    body += [f"ld.shared.f32 r{into}0, [scales + {place}]; ld.shared.f32 r{into}1, [scales + {place + 8 * row}];"]
    body += [_product(tile.columns, 0, into), f"mov.b32 empty{into}, empty;", _next_slot(tile)]
    if tile.in_panels and i % 4 == 3:
        body += ["mov.b32 used, panel_full; add.u32 iteration, iteration, 1;", _panel_addresses(tile)]
    wait = f"wait_{name}: {_wait()} @!ready bra.uni wait_{name};"
    wait += f" {_wait_for_panel()} @!panel_ready bra.uni wait_{name};" if begins else ""
    return " ".join(body), f"{wait} bra.uni full_{name};"


@gluon.constexpr_function
def _two_finish(tile, low, i, last):
    """PTX: add the product of K block i of an iteration; last: none is in flight behind it."""
    edges, of = low < tile.columns, "de"[i % 2]
    body = [f"wgmma.wait_group.sync.aligned {0 if last else 1};", _scale_products(edges, of)]
    body += [f"@leader mbarrier.arrive.shared::cta.b64 _, [empty{of}];"]
    if tile.in_panels and i % 4 == 3:
        body += [f"@leader mbarrier.arrive.shared::cta.b64 _, [used + {8 * scale_panels()}];"]
    if not last:
        body += [f"@more {_test()}", f"@more {_test_panel()}" if tile.in_panels and i % 4 == 2 else ""]
    body += [_additions(tile.columns, low, 0, of)]
    if not last:
        body += [f"ld.global.f32 low{of}, [lows];", f"ld.global.f32 high{of}, [highs];" if edges else ""]
    return " ".join(body)


@gluon.constexpr_function
def _two_loop(tile, low):
    """As _loop, with the next product in flight while one is added up: alternately in the registers d and e."""
    count, edges = 4 if tile.in_panels else 2, low < tile.columns
    first, wait = _two_start(tile, low, 0)
    body, waits = ["setp.gt.s32 more, left, 1; selp.b64 step, 4, 0, more;"], [wait]
    body += ["add.s64 lows, lows, step; add.s64 highs, highs, step;"]
    body += ["ld.global.f32 lowe, [lows];", "ld.global.f32 highe, [highs];" if edges else ""]
    body += [first, f"@more {_test()}", f"next_1_{low}:"]
    for i in range(count):
        start, wait = _two_start(tile, low, i + 1)
        waits += [wait]
        body += [f"setp.gt.s32 more, left, 1; @!more bra.uni last_{low}_{i % 2};", start]
        body += ["setp.gt.s32 more, left, 2; selp.b64 step, 4, 0, more;"]
        body += ["add.s64 lows, lows, step; add.s64 highs, highs, step;"]
        body += [_two_finish(tile, low, i, False), "sub.s32 left, left, 1;"]
    body += [f"bra.uni next_1_{low};"]
    for i in range(2):
        body += [f"last_{low}_{i}: {_two_finish(tile, low, 2 + i, True)} bra.uni done;"]
    return " ".join(body), " ".join(waits)


@gluon.constexpr_function
def _loop(tile, waves, low):
    """PTX of the loop for so many waves and tiles with `low` columns before the edge, and that of its waits."""
    if tile.two:
        return _two_loop(tile, low)
    body, waits, count = [f"next_{waves}_{low}:"], [], unrolled(tile.columns)
    for i in range(count):
        block, wait = _block(tile, waves, low, i)
        body += [block, "@!more bra.uni done;" if i < count - 1 else ""]
        waits += [wait]
    return " ".join([*body, f"@more bra.uni next_{waves}_{low};"]), " ".join(waits)


@gluon.constexpr_function
def _fetch_w_scales(tile, edges):
    """PTX: fetch the tile's scales of w into the first-level cache: each lane a sector, of eight K blocks.

    The loop loads a scale one K block ahead, two with two products in flight: late for the first of a sector. The first
    256 K blocks; where a split of K begins within a sector, its last one may be left out. Not in tiles of 128 rows with
    two products in flight and edges: in 128x96 it was measured to be slower.
    """
    if tile.two and edges and tile.block_m > 64:
        return ""
    rows = ("lows", "highs") if edges else ("lows",)
    return " ".join(
        [
            "mov.u32 at, %laneid; shl.b32 at, at, 5; shl.b32 used, left, 2; setp.lt.u32 p, at, used;",
            "cvt.u64.u32 step, at;",
            *(f"add.s64 x, {each}, step; @p prefetch.global.L1 [x];" for each in rows),
        ]
    )


@gluon.constexpr_function
def _begin(tile, sums, given, row, edges):
    """PTX before the loops: empty sums, and what the operands determine."""
    slots = tile.stages * tile.block_m * 128
    barriers = slots + scale_lines(tile.block_m, tile.stages) * line_bytes()
    each = 16 if tile.in_panels else 4  # bytes of a row's scales
    of = "d" if tile.two else ""
    whole = list(zip(("slot", "phase", "left", "edge"), given[4:8], strict=True))
    whole += [("iteration", given[9])] if tile.in_panels else []
    wide = zip(("x_first", "w_first", "lows", "highs"), given[:4], strict=True)
    return " ".join(
        [
            *(f"mov.f32 ${i}, 0f00000000;" for i in range(sums)),
            *(f"mov.b64 {name}, {operand};" for name, operand in wide),
            # From lane 0, so that ptxas knows that they are the same in a warp.
            *(f"shfl.sync.idx.b32 {name}, {operand}, 0, 31, -1;" for name, operand in whole),
            f"mov.u32 at, global_smem; add.u32 fulls, at, {barriers}; add.u32 empties, fulls, {line_bytes()};",
            f"add.u32 panel_fulls, empties, {line_bytes() - 16 * scale_panels()};",
            # Not from %tid.x: with that ptxas computes a worker's addresses and descriptors for each thread.
            f"mad.lo.u32 first_scales, {given[8]}, {each}, at;"
            f" add.u32 first_scales, first_scales, {slots + each * row};",
            "mov.u32 at, %laneid; setp.eq.u32 leader, at, 0;",
            # Plus 0, as rows are less than 128, which ptxas does not know: so each thread has an address and a load of
            # its own. One load for the warp would be waited for before the product that it is to overlap.
            f"shr.u32 at, {given[8]}, 8; cvt.u64.u32 step, at; add.s64 lows, lows, step; add.s64 highs, highs, step;",
            f"ld.global.f32 low{of}, [lows];",
            f"ld.global.f32 high{of}, [highs];" if edges else "",
            _fetch_w_scales(tile, edges),
            _slot_addresses(tile),
            f"{_panel_addresses(tile)} {_wait_for_panel()}" if tile.in_panels else "",
            _wait(),
        ]
    )


@gluon.constexpr_function
def _loops(tile, waves, scale_block):
    """PTX of the loops for so many waves, one of which a tile's edge between w's scales selects, and of their waits."""
    lows, text, waits = low_columns(tile.columns, scale_block), [], []
    for low in lows:
        skip = low != lows[-1]
        text += [f"setp.lt.s32 p, edge, {low}; @p bra.uni fewer_{waves}_{low};" if skip else ""]
        loop, wait = _loop(tile, waves, low)
        text += [loop, "bra.uni done;", f"fewer_{waves}_{low}:" if skip else ""]
        waits += [wait]
    return text, waits


@gluon.constexpr_function
def loop_asm(columns, parts, block_m, stages, row, scale_block, in_panels, halves, two):
    """PTX of the loops. Operands after the sums, as often as a part has registers: those of multiply_at_own_pace."""
    tile, count = _Tile(block_m, columns, stages, in_panels, two and two_fit(columns)), wave_count(block_m)
    sums, width, lows = count * columns // 2, columns // 2 // parts, low_columns(columns, scale_block)
    given = [f"${sums + i * width}" for i in range(11)]
    registers = [
        ".reg .pred p, ready, panel_ready, more, wrapped, leader;"
        " .reg .b32 at, slot, phase, left, edge, full, empty, freed, scales, fulls, empties, first_scales;"
        " .reg .b32 iteration, panel_full, panel_phase, panel_fulls;"
        " .reg .b64 x, w, x_slot, w_slot, x_first, w_first, lows, highs, step;"
        f" .reg .f32 d<{columns // 2}>; .reg .f32 r0, r1, l0, l1, h0, h1, low, high, next_low, next_high;"
        f" .reg .f32 e<{columns // 2}>; .reg .f32 rd0, rd1, re0, re1, lowd, highd, lowe, highe;"
        " .reg .b32 emptyd, emptye, used;"
    ]
    text = [*registers, _begin(tile, sums, given, row, lows[-1] < columns)]
    if halves:
        text += [f"shfl.sync.idx.b32 at, {given[10 if in_panels else 9]}, 0, 31, -1;"]
        text += ["setp.eq.s32 p, at, 1; @p bra.uni one_wave;"]
    loops, waits = _loops(tile, count, scale_block)
    text += loops
    if halves:
        loops, more = _loops(tile, 1, scale_block)
        text, waits = [*text, "one_wave:", *loops], [*waits, *more]
    return f"{{ {' '.join([*text, *waits])} done: }}"


@gluon.constexpr_function
def _constraints(parts, width, in_panels, halves):
    each = width // 2  # registers of a part
    kinds = ["l"] * 4 + ["r"] * (5 + in_panels + halves)
    return ",".join(["=&f"] * (parts * each) + [kind for kind in kinds for _ in range(each)])


@gluon.constexpr_function
def _types(count):
    return (gl.float32,) * count


@gluon.jit
def multiply_at_own_pace(
    wg, x_at, w_at, slot, phase, blocks, low_ptr, high_ptr, edge, panel, half, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, TWO_IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """The sums of a tile's K blocks, from this slot on; returns (slot, phase, sums).

    x_at, w_at: descriptors of this warpgroup's rows of x, and of all columns of w, in the first slots. low_ptr,
    high_ptr: w's scales along K of the columns before `edge` and from there on. panel: panels of x's scales before this
    tile, whose K blocks are a multiple of four, or None: the slots have them. half: a waves.Half, of which
    a half tile has one wave, or None. blocks: at least 1.
    """
    PARTS: gl.constexpr = wave_count(wg.BLOCK_SIZE_M) * wg.PARTS
    IN_PANELS: gl.constexpr = panel is not None
    HALVES: gl.constexpr = half is not None
    text: gl.constexpr = loop_asm(
        wg.COLUMNS, wg.PARTS, wg.BLOCK_SIZE_M, STAGES, wg.ROW, SCALE_BLOCK, IN_PANELS, HALVES, TWO_IN_FLIGHT,
    )  # fmt: skip
    constraints: gl.constexpr = _constraints(PARTS, wg.WIDTH, IN_PANELS, HALVES)
    types: gl.constexpr = _types(PARTS)
    wide = gl.zeros([64, wg.WIDTH], gl.int64, wg.LAYOUT)
    narrow = gl.zeros([64, wg.WIDTH], gl.int32, wg.LAYOUT)
    lows, highs = low_ptr.to(gl.int64, bitcast=True), high_ptr.to(gl.int64, bitcast=True)
    rows = gl.arange(0, 64, gl.SliceLayout(1, wg.LAYOUT)).expand_dims(1)  # of a thread's first element: its first row
    if HALVES:  # a half of the tile begins with the rows of its wave
        x_at += 512 * half.second  # 64 rows of 128 bytes, in units of 16 bytes
        rows += 64 * half.second
    operands = (wide + x_at, wide + w_at, wide + lows, wide + highs)
    operands += (narrow + slot, narrow + phase, narrow + blocks, narrow + edge, narrow + rows)
    if IN_PANELS:
        operands += (narrow + panel * iterations_of_a_panel(wg.COLUMNS, TWO_IN_FLIGHT),)
    if HALVES:
        operands += (narrow + half.waves,)
    sums = gl.inline_asm_elementwise(text, constraints, operands, dtype=types, is_pure=False, pack=wg.WIDTH // 2)
    used = slot + blocks
    return used % STAGES, phase ^ (used // STAGES & 1), sums
