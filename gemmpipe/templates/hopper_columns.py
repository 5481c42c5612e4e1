"""Hopper's matrix instructions of any multiple of 16 columns, where Triton's own take powers of two alone.

7168 columns are 32 such tiles of 224, 1280 are 8 of 160, so that nearly every multiprocessor has one. Their sums are
held in parts: tensors [64, WIDTH], WIDTH the greatest power of two in the number of columns, 64 at most. The
instruction is written in PTX, which is told the addresses of its operands; Gluon does not say them, so x and w lie in
one allocation, which begins where the program's shared memory does (`prepare_rings` sees to it). Written in Gluon,
which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.gluon_names import as_ring, as_row
from gemmpipe.templates.hopper import prepare, ring_of_w
from gemmpipe.templates.hopper_share import parts_of


@gluon.constexpr_function
def steps_of_block(columns, parts, element, fresh):
    """The four of a K block of 128 bytes, which they read 32 bytes at a time; `fresh`: the first replaces the sums.

    They name a predicate `add` and the 64-bit registers x and w.
    """
    # By element: the types, and what is said besides: neither operand negated or, of 16 bits, transposed. In here, as a
    # kernel is known by the source of its functions.
    types, said = {
        "bf16": ("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
        "fp16": ("k16.f32.f16.f16", ", 1, 1, 0, 0"),
        "fp8e4nv": ("k32.f32.e4m3.e4m3", ", 1, 1"),
        "int8": ("k32.s32.s8.s8", ""),
    }[element]
    sums = columns // 2  # registers of a thread
    x = sums if fresh else 2 * sums  # the first operand after the sums, as often as a part has registers
    names = ", ".join(f"${i}" for i in range(sums))
    return [
        f"setp.ne.b32 add, {0 if fresh and i == 0 else 1}, 0;"
        f" add.s64 x, ${x}, {2 * i}; add.s64 w, ${x + sums // parts}, {2 * i};"
        f" wgmma.mma_async.sync.aligned.m64n{columns}{types} {{{names}}}, x, w, add{said};"
        for i in range(4)
    ]


@gluon.constexpr_function
def _instructions(columns, parts, element, fresh):
    steps = " ".join(steps_of_block(columns, parts, element, fresh))
    fence = "wgmma.fence.sync.aligned;"
    return f"{{ .reg .pred add; .reg .b64 x, w; {fence} {steps} wgmma.commit_group.sync.aligned; }}"


@gluon.constexpr_function
def _constraints(columns, parts, element, fresh):
    sums = columns // 2
    held = [] if fresh else [str(i) for i in range(sums)]
    return ",".join([("=r" if element == "int8" else "=f")] * sums + held + ["l"] * (2 * sums // parts))


@gluon.constexpr_function
def _types(parts, element):
    return (gl.int32 if element == "int8" else gl.float32,) * parts


@gluon.jit
def multiply_slot(sums, ring, share, x_at, w_at, slot):
    """Start sums + x @ w^T of a K block; of no sums, the product. Returns the parts in flight, for warpgroup_mma_wait.

    x_at, w_at: as matrix_descriptors gives them, of the first slots.
    """
    ELEMENT: gl.constexpr = ring.x.dtype.name
    x, w = slot_descriptors(ring, share, x_at, w_at, slot)
    text: gl.constexpr = _instructions(share.COLUMNS, share.PARTS, ELEMENT, len(sums) == 0)
    return run(text, sums, share, x, w, ELEMENT)


@gluon.jit
def slot_descriptors(ring, share, x_at, w_at, slot):
    """Descriptors of a slot's rows, from those of the first slot's."""
    W_ROWS: gl.constexpr = share.BLOCK_SIZE_N
    return x_at + slot * ring.x.shape[1] * 8, w_at + slot * W_ROWS * 8


@gluon.jit
def run(text: gl.constexpr, sums, share, x_at, w_at, ELEMENT: gl.constexpr):
    """Instructions in PTX, made of steps_of_block, on these sums (none: fresh ones); returns the parts."""
    constraints: gl.constexpr = _constraints(share.COLUMNS, share.PARTS, ELEMENT, len(sums) == 0)
    types: gl.constexpr = _types(share.PARTS, ELEMENT)
    everywhere = gl.zeros([64, share.WIDTH], gl.int64, share.LAYOUT)
    operands = sums
    operands += (everywhere + x_at, everywhere + w_at)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=types, is_pure=False, pack=share.WIDTH // 2)


@gluon.jit
def zeros(share, SUM: gl.constexpr):
    """Parts of nothing."""
    parts = ()
    for _ in gl.static_range(share.PARTS):
        parts += (gl.zeros([64, share.WIDTH], SUM, share.LAYOUT),)
    return parts


@gluon.jit
def rings(
    x, w, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """(x's slots, w's); of a tile in parts, w's come last among places as wide as a part, the first of which are x's.

    One allocation then, so that it is the largest and Triton places it first.
    """
    if parts_of(COLUMNS) == 1:
        x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], x.layout)
        w_ring = ring_of_w(w, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    else:
        WIDTH: gl.constexpr = COLUMNS // parts_of(COLUMNS)
        ROWS: gl.constexpr = STAGES * (BLOCK_SIZE_M + BLOCK_SIZE_N)
        w_ring = gl.allocate_shared_memory(x.dtype, [ROWS // WIDTH, WIDTH, BLOCK_SIZE_K], x.layout)
        x_ring = as_ring(w_ring, STAGES, BLOCK_SIZE_M)
    return x_ring, w_ring


@gluon.jit
def matrix_descriptors(ring, share):
    """Of a tile in parts, the descriptors of a warpgroup's rows of x and of w in the first slots; else nobody asks."""
    if share.PARTS == 1:
        x_at, w_at = 0, 0
    else:
        x_at, w_at = descriptor(share.ROW), descriptor(ring.x.shape[0] * ring.x.shape[1] + share.COLUMN)
    return x_at, w_at


@gluon.jit
def descriptor(row):
    """What an instruction is told of the rings from this row on ("matrix descriptor", PTX ISA, wgmma).

    Sixteenths of the address, which grow by 8 a row; 1024 bytes from one 8 rows to the next; rows of 128 bytes swizzled
    as a whole.
    """
    base = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    layout: gl.constexpr = 1 << 62 | 1024 // 16 << 32 | 1 << 16
    return (((base & 0x3FFFF) + row * 128) >> 4).to(gl.int64) | layout


@gluon.jit
def _check_place(places):
    """Stop the kernel where the rings do not begin where `descriptor` says; by the only warp of a role."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    TOKEN: gl.constexpr = 0x47454D4D
    token = gl.full([32], TOKEN, gl.int32, LANES)
    as_row(places.index(0), 32).store(token)
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 a; bar.warp.sync -1; mov.u32 a, global_smem; ld.shared.b32 a, [a];"
        " setp.ne.s32 p, a, $1; @p trap; mov.u32 $0, a; }"
    )
    gl.inline_asm_elementwise(asm, "=r,r", [TOKEN], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prepare_rings(ring, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr = 1):
    """As hopper.prepare, once the rings are seen to be where they should."""
    _check_place(ring.w)
    prepare(ring, SPLIT_K, FILLERS)
