"""Products of up to 8 rows of x, in which each warp streams its share of w by itself, as PTX.

The K blocks (128 bytes of a row) of a program's columns of w are assigned to its warps in turn. A warp copies its
blocks through a ring of its own (cp.async), and waits for its own copies alone: the warps of a program meet once, when
their sums are added up. While its first block is on the way, a warp reads its blocks of x and keeps them in shared
memory (streamed_rows.py): in 16 bits, fp8 as fp16, so that the loop converts nothing but w in fp8. Products are those
of m16n8k16 in 16 bits with fp32 sums: rows of w on the wide side.

The order of K within a block is free as long as both operands have the same: a thread holds 16 consecutive bytes of a
row, twice, as they lie in memory. PTX, since Triton synchronises all warps of a program before each step of its
pipelines (docs/explanation/kernels.md). Addresses in shared memory count from its beginning, where Triton places the
only allocation. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.streamed_rows import (
    Shape,
    block_bytes,
    block_elements,
    keep_rows,
    load_rows,
    load_scales,
    prepare_reads,
    reads,
    rows_at_once,
    scale_bytes,
    scaled_blocks,
    scaled_rows,
    table_rows,
    x_row_bytes,
)

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def shared_places(rows, columns, warps, stages, blocks, mode):
    """Where x, the scales and the sums begin in shared memory, and where they end; the rings are first.

    rows: of x; columns: of the program; blocks: K blocks of a warp; mode: see Shape.
    """
    x = warps * stages * columns * block_bytes()
    scales = x + warps * rows * x_row_bytes(blocks, mode)
    sums = scales + warps * scale_bytes(rows, blocks, mode)
    return x, scales, sums, sums + warps * columns * rows * 4


@gluon.constexpr_function
def shared_lines(rows, columns, warps, stages, blocks, mode):
    """Lines of 1024 bytes that shared_places takes."""
    return -(-shared_places(rows, columns, warps, stages, blocks, mode)[3] // 1024)


@gluon.constexpr_function
def sums_per_thread(rows, columns, warps):
    """Elements of the output that a thread adds up and stores."""
    return -(-columns * rows // (32 * warps))


@gluon.constexpr_function
def _groups(s):
    """(groups of 16 columns, halves of 8 columns in a group)."""
    return max(1, s.columns // 16), min(2, s.columns // 8)


@gluon.constexpr_function
def _declare(s):
    """PTX: the registers."""
    groups, _ = _groups(s)
    count = reads(s.blocks, s.mode)
    return (
        ".reg .pred p, q, within;"
        " .reg .b32 thread, lane, warp, count, base, ring, rows, scales, row, part, at, to, i, j, block, piece;"
        " .reg .b32 slot, left, to_copy, to_slot, copy_to, w_even, w_odd, x_at, scale_at, w_at;"
        " .reg .b64 from, copy_from, copy_row, x_from, wide; .reg .b16 low, high;"
        f" .reg .b32 loaded<{rows_at_once(s) * count * 4}>, w<{16 * groups}>, x<16>, half<8>;"
        f" .reg .f32 zero, scale, value<8>, x_scales<{s.rows}>, w_scale<{count}>, s0, s1, read, total;"
        f" .reg .f32 sum<{4 * groups}>, d<{8 * groups}>;"
        + (" .reg .b32 largest; .reg .f32 inverse;" if scaled_rows(s.mode) else "")
    )


@gluon.constexpr_function
def _begin(s, given):
    """PTX: this warp's K blocks, and its places in shared memory."""
    x, scales, _, _ = shared_places(s.rows, s.columns, s.warps, s.stages, s.blocks, s.mode)
    ring = s.stages * s.columns * block_bytes()
    return (
        f"mov.b32 thread, {given['thread']}; and.b32 lane, thread, 31; mov.f32 zero, 0f00000000;"
        # From lane 0, so that ptxas knows that they are the same in a warp.
        " shr.u32 warp, thread, 5; shfl.sync.idx.b32 warp, warp, 0, 31, -1;"
        f" sub.s32 count, {given['blocks']}, warp; add.s32 count, count, {s.warps - 1};"
        f" shr.s32 count, count, {s.warps.bit_length() - 1}; shfl.sync.idx.b32 count, count, 0, 31, -1;"
        f" mov.u32 base, global_smem; mad.lo.u32 ring, warp, {ring}, base;"
        f" mad.lo.u32 rows, warp, {s.rows * x_row_bytes(s.blocks, s.mode)}, base; add.u32 rows, rows, {x};"
        f" mad.lo.u32 scales, warp, {scale_bytes(s.rows, s.blocks, s.mode)}, base;"
        f" add.u32 scales, scales, {scales};" + (f" add.u32 largest, base, {scales};" if scaled_rows(s.mode) else "")
    )


@gluon.constexpr_function
def _prepare_copies(s, given):
    """PTX: a thread's places of copies of 16 bytes: of four rows of w at a time, eight threads copy a block of each.

    Of two rows one has its halves of 64 bytes exchanged, so that both are read from different banks.
    """
    return (
        "and.b32 j, lane, 7; shr.u32 i, lane, 3; and.b32 at, i, 1; shl.b32 at, at, 2; xor.b32 at, at, j;"
        f" mad.lo.u32 copy_to, i, {block_bytes()}, ring; mad.lo.u32 copy_to, at, 16, copy_to;"
        f" mul.wide.s32 copy_from, i, {given['w_stride']}; add.s64 copy_from, copy_from, {given['w']};"
        f" mul.wide.u32 wide, warp, {block_bytes()}; add.s64 copy_from, copy_from, wide;"
        f" mul.wide.u32 wide, j, 16; add.s64 copy_from, copy_from, wide; mul.wide.s32 copy_row, 4, {given['w_stride']};"
        " mov.b32 to_slot, 0; mov.b32 to_copy, count;"
    )


@gluon.constexpr_function
def _copy_block(s, name):
    """PTX: start to copy the next K block, if there is one, to the next slot; one group of copies in any case."""
    text = ["setp.le.s32 p, to_copy, 0;", f"@p bra.uni {name};"]
    text += [f"mad.lo.u32 to, to_slot, {s.columns * block_bytes()}, copy_to; mov.b64 from, copy_from;"]
    for row in range(0, s.columns, 4):
        text += [f"cp.async.cg.shared.global [to + {row * block_bytes()}], [from], 16;"]
        text += ["add.s64 from, from, copy_row;" if row + 4 < s.columns else ""]
    text += [f"add.s64 copy_from, copy_from, {s.warps * block_bytes()}; sub.s32 to_copy, to_copy, 1;"]
    text += [f"add.u32 to_slot, to_slot, 1; setp.eq.u32 q, to_slot, {s.stages}; selp.b32 to_slot, 0, to_slot, q;"]
    return " ".join([*text, f"{name}: cp.async.commit_group;"])


@gluon.constexpr_function
def _prepare_loop(s, given):
    """PTX: a thread's places of the operands: row (of w, of x) lane / 4, 16 elements from lane % 4 * 16 on."""
    groups, _ = _groups(s)
    text = [f"mov.f32 sum{i}, zero;" for i in range(4 * groups)] + [f"mov.f32 d{i}, zero;" for i in range(8 * groups)]
    text += ["shr.u32 row, lane, 2; and.b32 part, lane, 3;"]
    text += [f"mad.lo.u32 w_at, row, {block_bytes()}, ring; mad.lo.u32 w_at, part, 16, w_at;"]
    text += ["and.b32 at, row, 1; shl.b32 at, at, 6; add.u32 w_even, w_at, at;"]
    text += [
        f"xor.b32 at, at, 64; add.u32 w_odd, w_at, at; mad.lo.u32 x_at, part, {block_elements(s.mode) // 4}, rows;"
    ]
    if s.rows > 1:
        text += [f"sub.s32 at, {given['M']}, 1; min.s32 at, at, row;"]
        text += [f"mad.lo.u32 x_at, at, {x_row_bytes(s.blocks, s.mode)}, x_at;"]
    text += ["mov.b32 scale_at, scales;" if s.rows == 1 else "mad.lo.u32 scale_at, part, 8, scales;"]
    return " ".join([*text, "mov.b32 slot, 0; mov.b32 left, count;"])


@gluon.constexpr_function
def _load_operands(s):
    """PTX: the operands of a K block from shared memory, and the scales of this thread's columns of the product."""
    groups, halves = _groups(s)
    text = [f"mul.lo.u32 at, slot, {s.columns * block_bytes()}; add.u32 i, w_even, at; add.u32 j, w_odd, at;"]
    for of in range(groups * halves):
        for chunk in range(2):
            names = ", ".join(f"w{(of // halves * 2 + of % halves) * 8 + chunk * 4 + i}" for i in range(4))
            text += [f"ld.shared.v4.b32 {{{names}}}, [{'ij'[chunk]} + {of * 8 * block_bytes()}];"]
    quarters = 2 if block_elements(s.mode) == 64 else 4
    for i in range(quarters):
        names = ", ".join(f"x{i * 4 + j}" for j in range(4))
        place = 64 * i if quarters == 2 else i // 2 * 128 + i % 2 * 16
        text += [f"ld.shared.v4.b32 {{{names}}}, [x_at + {place}];"]
    if scaled_blocks(s.mode):
        text += ["ld.shared.f32 s0, [scale_at];" if s.rows == 1 else "ld.shared.v2.f32 {s0, s1}, [scale_at];"]
    return " ".join(text)


@gluon.constexpr_function
def _operands(s, group, chunk, step):
    """(PTX, operands w and x of a matrix instruction) of 16 elements along K of half `chunk` of a block."""
    _, halves = _groups(s)
    if block_elements(s.mode) == 64:
        w = [f"w{(group * 2 + side) * 8 + chunk * 4 + 2 * step + i}" for i in range(2) for side in range(halves)]
        text, x = "", chunk * 4 + 2 * step
    else:
        text = " ".join(
            f"mov.b32 {{low, high}}, w{(group * 2 + side) * 8 + chunk * 4 + step};"
            f" cvt.rn.f16x2.e4m3x2 half{side}, low; cvt.rn.f16x2.e4m3x2 half{2 + side}, high;"
            for side in range(halves)
        )
        w = [f"half{2 * i + side}" for i in range(2) for side in range(halves)]
        x = chunk * 8 + 2 * step
    return text, ", ".join(w if halves == 2 else [w[0], "0", w[1], "0"]), f"x{x}, x{x + 1}"


@gluon.constexpr_function
def _multiply(s):
    """PTX: the products of a K block, of its halves apart, so that one need not wait for the other.

    With block scales those of a block alone, else added to those before.
    """
    groups, _ = _groups(s)
    kind, text = "bf16" if s.mode == "bf16" else "f16", []
    for step in range(2 if block_elements(s.mode) == 64 else 4):
        for chunk in range(2):
            for group in range(groups):
                d = ", ".join(f"d{group * 8 + chunk * 4 + i}" for i in range(4))
                old = d if step or not scaled_blocks(s.mode) else ", ".join(["zero"] * 4)
                converted, w, x = _operands(s, group, chunk, step)
                text += [converted]
                text += [
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {{{w}}}, {{{x}}}, {{{old}}};"
                ]
    return " ".join(text)


@gluon.constexpr_function
def _kept_sums(s):
    """(group, register) of this thread's sums that are stored: of a single row of x every other one is padding."""
    groups, halves = _groups(s)
    return [(group, i) for group in range(groups) for i in range(2 * halves) if s.rows > 1 or i % 2 == 0]


@gluon.constexpr_function
def _add_products(s):
    """PTX: sum += the products of both halves, times the scale of a K block."""
    return " ".join(
        f"add.f32 d{8 * group + i}, d{8 * group + i}, d{8 * group + 4 + i};"
        + (
            f" fma.rn.f32 sum{4 * group + i}, d{8 * group + i}, s{i % 2}, sum{4 * group + i};"
            if scaled_blocks(s.mode)
            else f" add.f32 sum{4 * group + i}, sum{4 * group + i}, d{8 * group + i};"
        )
        for group, i in _kept_sums(s)
    )


@gluon.constexpr_function
def _loop(s):
    """PTX: all K blocks of the warp, each slot filled again when its block is multiplied."""
    per_block = scaled_blocks(s.mode)
    step = f"add.u32 scale_at, scale_at, {4 * table_rows(s.rows, s.mode)};" if per_block else ""
    return (
        "setp.le.s32 p, count, 0; @p bra.uni multiplied;"
        f" next: cp.async.wait_group {s.stages - 1}; bar.warp.sync -1; {_load_operands(s)} {_multiply(s)}"
        f" {_add_products(s) if per_block else ''} bar.warp.sync -1; {_copy_block(s, 'copied')}"
        f" add.u32 slot, slot, 1; setp.eq.u32 q, slot, {s.stages}; selp.b32 slot, 0, slot, q;"
        f" add.u32 x_at, x_at, {2 * block_elements(s.mode)}; {step}"
        " sub.s32 left, left, 1; setp.gt.s32 p, left, 0; @p bra.uni next;"
        f" multiplied: {'' if per_block else _add_products(s)}"
    )


@gluon.constexpr_function
def _add_warps(s):
    """PTX: store the warps' sums as [rows, columns] each, and add them up: elements thread, thread + threads, ..."""
    count, threads = s.columns * s.rows, 32 * s.warps
    text = [f"add.u32 base, base, {shared_places(s.rows, s.columns, s.warps, s.stages, s.blocks, s.mode)[2]};"]
    text += [f"mad.lo.u32 at, warp, {4 * count}, base; mad.lo.u32 at, row, 4, at;"]
    text += [f"mad.lo.u32 at, part, {8 * s.columns}, at; setp.lt.u32 p, part, {max(1, s.rows // 2)};"]
    for group, i in _kept_sums(s):
        place = 4 * (i % 2 * s.columns + group * 16 + i // 2 * 8)
        text += [f"@p st.shared.f32 [at + {place}], sum{4 * group + i};"]
    text += ["bar.sync 0; mad.lo.u32 at, thread, 4, base;"]
    for i in range(sums_per_thread(s.rows, s.columns, s.warps)):
        text += [f"mov.f32 total, zero; setp.lt.s32 p, thread, {count - i * threads};"]
        for warp in range(s.warps):
            text += [f"mov.f32 read, zero; @p ld.shared.f32 read, [at + {4 * (warp * count + i * threads)}];"]
            text += ["add.f32 total, total, read;"]
        text += [_scale_sum(s, i * threads) if scaled_rows(s.mode) else "", f"mov.f32 ${i}, total;"]
    return " ".join(text)


@gluon.constexpr_function
def _scale_sum(s, first):
    """PTX: total *= the scale of its row of x; element thread + first of the output."""
    return (
        f"add.u32 at, thread, {first}; shr.u32 at, at, {s.columns.bit_length() - 1}; mad.lo.u32 at, at, 4, scales;"
        f" mov.f32 scale, zero; @p ld.shared.f32 scale, [at + {4 * s.rows}]; mul.f32 total, total, scale;"
        f" mad.lo.u32 at, thread, 4, base;"
    )


@gluon.constexpr_function
def streamed_asm(rows, columns, warps, stages, blocks, mode, top):
    """The PTX. Operands after the sums: those of stream, w's stride in bytes.

    top: the greatest fp8 value, to which x in 16 bits is quantised.
    """
    s = Shape(rows=rows, columns=columns, warps=warps, stages=stages, blocks=blocks, mode=mode)
    names = ["thread", "w", "x", "x_scale", "w_scale", "w_stride", "x_stride", "scale_row", "scale_block"]
    names += ["M", "blocks"]
    given = {name: f"${sums_per_thread(rows, columns, warps) + i}" for i, name in enumerate(names)}
    return " ".join(
        [
            "{",
            _declare(s),
            _begin(s, given),
            _prepare_copies(s, given),
            _copy_block(s, "copied_0"),
            prepare_reads(s, given),
            load_rows(s, given, 0),
            load_scales(s, given),
            *(_copy_block(s, f"copied_{slot}") for slot in range(1, stages)),
            keep_rows(s, given, top),
            _prepare_loop(s, given),
            _loop(s),
            _add_warps(s),
            "}",
        ]
    )


@gluon.constexpr_function
def _constraints(sums):
    return ",".join(["=&f"] * sums + ["r"] + ["l"] * 4 + ["r"] * 6)


@gluon.constexpr_function
def _types(count):
    return (gl.float32,) * count


@gluon.constexpr_function
def _threads(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _epilogue_scales(
    x_scale_ptr, w_scale_ptr, bias_ptr, row, column, M, N, SCALES: gl.constexpr
):  # fmt: skip
    """(scale, bias) of an element of the output, 1 or 0 if absent.

    SCALES: `tensor`, `row`, `channel` (of w alone), others have none here.

    Loaded before the products: after them, nothing would hide the latency.
    """
    scale, bias = 1.0, 0.0
    if SCALES == "row":
        scale = gl.load(x_scale_ptr + gl.minimum(row, M - 1)) * gl.load(w_scale_ptr + column)
    if SCALES == "channel":
        scale = gl.load(w_scale_ptr + column)
    if SCALES == "tensor":
        scale = gl.load(x_scale_ptr) * gl.load(w_scale_ptr)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + column).to(gl.float32)
    return scale, bias


@gluon.jit
def stream(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, M, N, K, x_stride, w_stride, scale_row, scale_block,
    w_scale_stride, out_stride, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr, SCALES: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """A program: out[M, its BLOCK_SIZE_N columns] = (x * x_scale) @ (w * w_scale)^T + bias; M <= BLOCK_SIZE_M.

    Strides are between rows in elements; scale_row and scale_block of x's block scales. MODE: see Shape. SCALES:
    `none`, `tensor`, `row`, `channel` (w's, where x is quantised row by row) or `block`. BLOCKS: K blocks of a warp,
    rounded up.
    """
    SUMS: gl.constexpr = sums_per_thread(BLOCK_SIZE_M, BLOCK_SIZE_N, WARPS)
    LINES: gl.constexpr = shared_lines(BLOCK_SIZE_M, BLOCK_SIZE_N, WARPS, STAGES, BLOCKS, MODE)
    W_BYTES: gl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    THREADS: gl.constexpr = _threads(WARPS)
    text: gl.constexpr = streamed_asm(BLOCK_SIZE_M, BLOCK_SIZE_N, WARPS, STAGES, BLOCKS, MODE, TOP)
    constraints: gl.constexpr = _constraints(SUMS)
    types: gl.constexpr = _types(SUMS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.int32, [LINES, 256], FLAT)
    first = gl.program_id(0) * BLOCK_SIZE_N
    thread = gl.arange(0, 32 * WARPS, THREADS)
    narrow, wide = gl.zeros([32 * WARPS], gl.int32, THREADS), gl.zeros([32 * WARPS], gl.int64, THREADS)
    finish = ()
    for i in gl.static_range(SUMS):
        row, column = (thread + i * 32 * WARPS) // BLOCK_SIZE_N, first + (thread + i * 32 * WARPS) % BLOCK_SIZE_N
        finish += (_epilogue_scales(x_scale_ptr, w_scale_ptr, bias_ptr, row, column, M, N, SCALES),)
    w = (w_ptr + first.to(gl.int64) * w_stride).to(gl.int64, bitcast=True)
    operands = (thread, wide + w, wide + x_ptr.to(gl.int64, bitcast=True))
    if SCALES == "block":
        w_scale = (w_scale_ptr + first // 128 * w_scale_stride).to(gl.int64, bitcast=True)
        operands += (wide + x_scale_ptr.to(gl.int64, bitcast=True), wide + w_scale)
    else:
        operands += (wide, wide)
    operands += (narrow + w_stride * W_BYTES, narrow + x_stride, narrow + scale_row, narrow + scale_block)
    operands += (narrow + M, narrow + K * W_BYTES // block_bytes())
    sums = gl.inline_asm_elementwise(text, constraints, operands, dtype=types, is_pure=False, pack=1)
    for i in gl.static_range(SUMS):
        row, column = (thread + i * 32 * WARPS) // BLOCK_SIZE_N, first + (thread + i * 32 * WARPS) % BLOCK_SIZE_N
        total = (sums[i] * finish[i][0] + finish[i][1]).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + row.to(gl.int64) * out_stride + column, total, mask=row < M)
    _hold(shared, out_ptr, M, THREADS)


@gluon.jit
def _hold(shared, out_ptr, M, THREADS: gl.constexpr):
    """Keeps the allocation, which only the PTX uses: a load and a store that never happens."""
    at = gl.arange(0, 256, THREADS)
    gl.store(out_ptr + at, shared.index(0).load(THREADS).to(out_ptr.dtype.element_ty), mask=at < -M)


@gluon.jit
def streamed(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
    M, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, out_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, MODE: gl.constexpr, SCALES: gl.constexpr, M_MAJOR: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T + bias, operands of one type; x_scale_stride: M_MAJOR: between K blocks."""
    scale_row = 1 if M_MAJOR else x_scale_stride
    scale_block = x_scale_stride if M_MAJOR else 1
    stream(
        x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, M, N, K, x_stride, w_stride, scale_row, scale_block,
        w_scale_stride, out_stride, BLOCK_SIZE_M, BLOCK_SIZE_N, WARPS, STAGES, BLOCKS, MODE, SCALES, 0.0,
    )  # fmt: skip
