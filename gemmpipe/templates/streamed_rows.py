"""PTX of the streamed kernels' rows of x (streamed_kernel.py): read, converted, kept in shared memory.

A warp reads its K blocks of a few rows at once, 16 bytes a thread. x in fp8 is kept as fp16, which has all of its
values; x in 16 bits as it is, or, for a weight in fp8, quantised to fp8 block by block or row by row, and kept as fp16.
The scale of a whole row needs the greatest value of every warp's blocks: the warps exchange these in shared memory.
"""

import math
from dataclasses import dataclass

from triton.experimental import gluon

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@gluon.constexpr_function
def block_bytes():
    """Bytes of a K block of a row of w; a function, as a kernel's hash covers its code."""
    return 128


@gluon.constexpr_function
def block_elements(mode):
    """Elements of a K block: 128 in fp8, 64 in 16 bits."""
    return 64 if mode in ("bf16", "fp16") else 128


@gluon.constexpr_function
def scaled_blocks(mode):
    """True if each K block of x and of w has a scale."""
    return mode in ("fp8_blocks", "bf16_to_fp8", "fp16_to_fp8")


@gluon.constexpr_function
def scaled_rows(mode):
    """True if x in 16 bits is quantised with one scale for a whole row."""
    return mode in ("bf16_to_fp8_rows", "fp16_to_fp8_rows")


@gluon.constexpr_function
def _quantises(mode):
    """True if x in 16 bits is quantised to fp8."""
    return "_to_fp8" in mode


@gluon.constexpr_function
def scale_bytes(rows, blocks, mode):
    """Bytes of a warp's scales in shared memory; of whole rows: its greatest values, and then the scales."""
    return 8 * rows if scaled_rows(mode) else 4 * blocks * table_rows(rows, mode)


@gluon.constexpr_function
def table_rows(rows, mode):
    """Scales of a K block in shared memory: one for one row of x, else one per column of the matrix instruction."""
    return (1 if rows == 1 else 8) if scaled_blocks(mode) else 0


@gluon.constexpr_function
def x_row_bytes(blocks, mode):
    """Bytes of a row of x's blocks in shared memory in 16 bits, and a few more: two rows have no bank in common."""
    return blocks * 2 * block_elements(mode) + (64 if block_elements(mode) == 64 else 16)


@dataclass(frozen=True)
class Shape:
    """What the PTX depends on: rows of x, columns, warps, slots of a ring, K blocks of a warp, types and scales.

    mode: `fp8_blocks` (both operands in fp8 with block scales), `bf16_to_fp8`, `fp16_to_fp8` (x is quantised to that),
    `bf16_to_fp8_rows`, `fp16_to_fp8_rows` (with one scale a row), `fp8` (both in fp8, scales are applied to the sums),
    `bf16`, `fp16` (both in 16 bits).
    """

    rows: int
    columns: int
    warps: int
    stages: int
    blocks: int
    mode: str


@gluon.constexpr_function
def _x_block_bytes(mode):
    """Bytes of a K block of a row of x in memory."""
    return 256 if _quantises(mode) else block_bytes()


@gluon.constexpr_function
def _x_shift(mode):
    """log2 of the bytes of an element of x."""
    return 0 if mode in ("fp8_blocks", "fp8") else 1


@gluon.constexpr_function
def _lanes(mode):
    """Threads that read a K block of a row of x, 16 bytes each; 32 of them read a few blocks at once."""
    return _x_block_bytes(mode) // 16


@gluon.constexpr_function
def reads(blocks, mode):
    """Reads of 16 bytes of a thread for a row of x."""
    return -(-blocks // (32 // _lanes(mode)))


@gluon.constexpr_function
def rows_at_once(s):
    """Rows of x that are read before the first of them is converted: to 64 registers at most, one row at least."""
    return max(1, min(s.rows, 16 // reads(s.blocks, s.mode)))


@gluon.constexpr_function
def prepare_reads(s, given):
    """PTX: this thread's place in the blocks of x that are read at once: 16 bytes `piece` of `block`."""
    return (
        f"shr.u32 block, lane, {_lanes(s.mode).bit_length() - 1}; and.b32 piece, lane, {_lanes(s.mode) - 1};"
        f" mad.lo.u32 at, block, {s.warps}, warp; mul.wide.u32 x_from, at, {_x_block_bytes(s.mode)};"
        f" mul.wide.u32 wide, piece, 16; add.s64 x_from, x_from, wide; add.s64 x_from, x_from, {given['x']};"
    )


@gluon.constexpr_function
def _is_block(s, read):
    """PTX: p = whether the warp has the block that this thread reads."""
    return f"add.u32 at, block, {read * 32 // _lanes(s.mode)}; setp.lt.s32 p, at, count;"


@gluon.constexpr_function
def load_rows(s, given, first):
    """PTX: read rows_at_once rows of x from `first` on; beyond x its last row again."""
    count, text = reads(s.blocks, s.mode), []
    for row in range(min(rows_at_once(s), s.rows - first)):
        text += ["mov.b64 from, x_from;"]
        if first + row:
            text += [f"sub.s32 at, {given['M']}, 1; min.s32 at, at, {first + row};"]
            text += [f"mul.wide.s32 wide, at, {given['x_stride']}; shl.b64 wide, wide, {_x_shift(s.mode)};"]
            text += ["add.s64 from, from, wide;"]
        for read in range(count):
            names = ", ".join(f"loaded{(row * count + read) * 4 + i}" for i in range(4))
            text += [f"mov.b32 {name}, 0;" for name in names.split(", ") if scaled_rows(s.mode)]  # no greatest value
            text += [_is_block(s, read), f"@p ld.global.v4.b32 {{{names}}}, [from + {read * 512 * s.warps}];"]
    return " ".join(text)


@gluon.constexpr_function
def load_scales(s, given):
    """PTX: the scales of the warp's K blocks, past the end those of the last one.

    With x in fp8 lane i loads those of block i; else each thread loads w's of the blocks that it reads.
    """
    if s.mode == "fp8_blocks":
        return _load_both_scales(s, given)
    text = [f"sub.s32 i, {given['blocks']}, 1;"]
    for read in range(reads(s.blocks, s.mode) if scaled_blocks(s.mode) else 0):
        text += [f"add.u32 at, block, {read * 32 // _lanes(s.mode)}; mad.lo.u32 at, at, {s.warps}, warp;"]
        text += [f"min.s32 at, at, i; mul.wide.s32 wide, at, 4; add.s64 from, {given['w_scale']}, wide;"]
        text += [f"ld.global.f32 w_scale{read}, [from];"]
    return " ".join(text)


@gluon.constexpr_function
def _load_both_scales(s, given):
    """PTX: lane i loads the scales of block i."""
    text = [f"sub.s32 i, {given['blocks']}, 1; mad.lo.u32 at, lane, {s.warps}, warp; min.s32 at, at, i;"]
    text += [f"mul.wide.s32 wide, at, 4; add.s64 from, {given['w_scale']}, wide; ld.global.f32 w_scale0, [from];"]
    text += [f"mul.wide.s32 wide, at, {given['scale_block']}; shl.b64 wide, wide, 2;"]
    text += [f"add.s64 from, {given['x_scale']}, wide; ld.global.f32 x_scales0, [from]; sub.s32 i, {given['M']}, 1;"]
    for row in range(1, s.rows):
        text += [f"min.s32 j, i, {row}; mul.wide.s32 wide, j, {given['scale_row']}; shl.b64 wide, wide, 2;"]
        text += [f"add.s64 wide, wide, from; ld.global.f32 x_scales{row}, [wide];"]
    return " ".join(text)


@gluon.constexpr_function
def _kind(s):
    """PTX: the type of two values of x in a register."""
    return "bf16x2" if s.mode.startswith("bf16") else "f16x2"


@gluon.constexpr_function
def _largest(s, registers):
    """PTX: scale = the largest magnitude of a K block, of which each of 16 threads holds eight values."""
    kind = _kind(s)
    text = [f"and.b32 half{i}, {name}, 0x7fff7fff;" for i, name in enumerate(registers)]
    text += [f"max.{kind} half0, half0, half1; max.{kind} half2, half2, half3; max.{kind} half0, half0, half2;"]
    text += [_values(s, ["half0"]), "max.f32 scale, value0, value1;"]
    text += [f"shfl.sync.bfly.b32 read, scale, {8 >> i}, 31, -1; max.f32 scale, scale, read;" for i in range(4)]
    return " ".join(text)


@gluon.constexpr_function
def _values(s, registers):
    """PTX: value0, ... = the values of registers of two each, in fp32."""
    if s.mode.startswith("fp16"):
        return " ".join(
            f"mov.b32 {{low, high}}, {name}; cvt.f32.f16 value{2 * i}, low; cvt.f32.f16 value{2 * i + 1}, high;"
            for i, name in enumerate(registers)
        )
    return " ".join(
        f"shl.b32 at, {name}, 16; mov.b32 value{2 * i}, at;"
        f" and.b32 at, {name}, 0xffff0000; mov.b32 value{2 * i + 1}, at;"
        for i, name in enumerate(registers)
    )


@gluon.constexpr_function
def _quantise(s, registers, top):
    """PTX: half0 to half3 = eight values of a K block of x, rounded to fp8, in fp16; scale = that of the block.

    The scale is the largest magnitude over `top`, at least 2^-126, of which the reciprocal is finite; of a whole row it
    is known already.
    """
    if scaled_rows(s.mode):
        return _rounded(s, registers, "inverse")
    return f"{_largest(s, registers)} {_scale(top, 'read')} {_rounded(s, registers, 'read')}"


@gluon.constexpr_function
def _scale(top, inverse):
    """PTX: scale = that of the greatest value `scale`; its reciprocal."""
    return (
        f"div.full.f32 scale, scale, {_hex(top)}; max.f32 scale, scale, {_hex(2.0**-126)};"
        f" div.full.f32 {inverse}, {_hex(1.0)}, scale;"
    )


@gluon.constexpr_function
def _rounded(s, registers, inverse):
    """PTX: half0 to half3 = eight values times `inverse`, rounded to fp8, in fp16."""
    text = [_values(s, registers), *(f"mul.f32 value{i}, value{i}, {inverse};" for i in range(8))]
    for i in range(4):
        text += [f"cvt.rn.satfinite.e4m3x2.f32 low, value{2 * i + 1}, value{2 * i}; cvt.rn.f16x2.e4m3x2 half{i}, low;"]
    return " ".join(text)


@gluon.constexpr_function
def _exchange_largest(s, first, rows):
    """PTX: the warp's greatest value of each of `rows` rows from `first` on to shared memory; wait for all warps."""
    count, kind, text = reads(s.blocks, s.mode), _kind(s), ["setp.eq.u32 q, lane, 0;"]
    for row in range(rows):
        for i in range(4 * count):
            text += [f"and.b32 half0, loaded{row * count * 4 + i}, 0x7fff7fff;"]
            text += [f"max.{kind} half7, half7, half0;" if i else "mov.b32 half7, half0;"]
        text += [_values(s, ["half7"]), "max.f32 scale, value0, value1;"]
        for i in range(5):
            text += [f"shfl.sync.bfly.b32 read, scale, {16 >> i}, 31, -1; max.f32 scale, scale, read;"]
        text += [f"@q st.shared.f32 [scales + {4 * (first + row)}], scale;"]
    return " ".join([*text, "bar.sync 0;"])


@gluon.constexpr_function
def _row_scale(s, row, top):
    """PTX: scale = that of a row, of the greatest values of all warps, kept in shared memory; inverse = its reciprocal.

    A lane reads the value of one warp, lanes beyond the number of warps one of them again.
    """
    text = [f"and.b32 at, lane, {s.warps - 1}; mad.lo.u32 at, at, {scale_bytes(s.rows, s.blocks, s.mode)}, largest;"]
    text += [f"ld.shared.f32 scale, [at + {4 * row}];"]
    for i in range(s.warps.bit_length() - 1):
        text += [f"shfl.sync.bfly.b32 read, scale, {1 << i}, 31, -1; max.f32 scale, scale, read;"]
    text += [
        _scale(top, "inverse"),
        f"setp.eq.u32 q, lane, 0; @q st.shared.f32 [scales + {4 * (s.rows + row)}], scale;",
    ]
    return " ".join(text)


@gluon.constexpr_function
def _hex(value):
    """A positive constant of PTX: its bits in fp32."""
    fraction, exponent = math.frexp(value)
    return f"0f{(exponent + 126 << 23) + int((2 * fraction - 1) * 2**23):08X}"


@gluon.constexpr_function
def _converted(s, registers, top):
    """(PTX: 16 bytes that were read of a row of x as they are kept, the registers that they are then in)."""
    if block_elements(s.mode) == 64:
        return "", registers
    if _quantises(s.mode):
        return _quantise(s, registers, top), ["half0", "half1", "half2", "half3"]
    text = [
        f"mov.b32 {{low, high}}, {name};"
        f" cvt.rn.f16x2.e4m3x2 half{2 * i}, low; cvt.rn.f16x2.e4m3x2 half{2 * i + 1}, high;"
        for i, name in enumerate(registers)
    ]
    return " ".join(text), [f"half{i}" for i in range(8)]


@gluon.constexpr_function
def _keep_read(s, row, read, registers, top):
    """PTX: keep 16 bytes that were read of a row of x in shared memory; if quantised, the block's scale times w's."""
    first = read * 32 // _lanes(s.mode)
    place = row * x_row_bytes(s.blocks, s.mode) + first * 2 * block_elements(s.mode)
    converted, kept = _converted(s, registers, top)
    text = [converted, _is_block(s, read)]
    for i in range(0, len(kept), 4):
        text += [f"@p st.shared.v4.b32 [x_at + {place + 4 * i}], {{{', '.join(kept[i : i + 4])}}};"]
    if _quantises(s.mode) and scaled_blocks(s.mode):
        at = 4 * (first * table_rows(s.rows, s.mode) + row)
        text += [f"mul.f32 scale, scale, w_scale{read}; setp.eq.and.u32 q, piece, 0, p;"]
        text += [f"@q st.shared.f32 [scale_at + {at}], scale;"]
    return " ".join(text)


@gluon.constexpr_function
def keep_rows(s, given, top):
    """PTX: keep all rows of x in shared memory, and the products of block scales: a table by K block and row."""
    count, each, size = reads(s.blocks, s.mode), rows_at_once(s), 2 * block_elements(s.mode)
    text = [f"mad.lo.u32 x_at, block, {size}, rows; mad.lo.u32 x_at, piece, {size // _lanes(s.mode)}, x_at;"]
    of = "lane" if s.mode == "fp8_blocks" else "block"
    text += [f"mad.lo.u32 scale_at, {of}, {4 * table_rows(s.rows, s.mode)}, scales;"]
    for first in range(0, s.rows, each):
        if first:
            text += [f"setp.le.s32 p, {given['M']}, {first}; @p bra.uni kept;", load_rows(s, given, first)]
        if scaled_rows(s.mode):
            text += [_exchange_largest(s, first, min(each, s.rows - first))]
        for row in range(min(each, s.rows - first)):
            text += [_row_scale(s, first + row, top) if scaled_rows(s.mode) else ""]
            for read in range(count):
                registers = [f"loaded{(row * count + read) * 4 + i}" for i in range(4)]
                text += [_keep_read(s, first + row, read, registers, top)]
    text += ["kept:"]
    if s.mode == "fp8_blocks":
        text += [f"setp.lt.s32 within, lane, {s.blocks};"]
        for row in range(s.rows):
            text += [f"mul.f32 scale, x_scales{row}, w_scale0; @within st.shared.f32 [scale_at + {4 * row}], scale;"]
    return " ".join(text)
