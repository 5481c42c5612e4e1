"""Hopper's matrix instructions (wgmma) with any multiple of 16 columns; Triton's own take powers of two alone.

7168 columns are 32 such tiles of 224, 1280 are 8 of 160, so that nearly every multiprocessor has one. Their sums are in
parts: tensors [64, WIDTH], WIDTH the greatest power of two that divides the number of columns, 64 at most. The
instruction is PTX and needs the addresses of its operands. Gluon does not expose them, so x and w are one allocation at
the beginning of the program's shared memory (`checked_barrier_init_warp` checks that).

Pingpong: for tiles so wide that the registers hold only one product in addition to the sums, two warpgroups multiply in
turns; one adds up its product while the other's runs. Without turns the two fall into step, and both add up at the same
time: 2048x1280x8192 in tiles of 160 columns took 38.4 us, 34.3 in turns (H200, docs/explanation/kernels.md). The turns
use the last two of a program's 16 named barriers, as Triton counts from 0. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import view_as_ring, view_as_row
from gemmpipe.templates.hopper.pipeline import allocate_w_ring, barrier_init_warp, init_slot_barriers
from gemmpipe.templates.hopper.tile_scheduler import accumulator_parts

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def wgmma_steps(columns, parts, element, fresh):
    """The four instructions of a K block of 128 bytes, 32 bytes each; `fresh`: the first replaces the sums.

    They use a predicate `add` and the 64-bit registers x and w.
    """
    # By element: types and modifiers (no operand negated or, with 16 bits, transposed). A local table, as the source
    # hash of a kernel covers the code of its functions.
    types, modifiers = {
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
        f" wgmma.mma_async.sync.aligned.m64n{columns}{types} {{{names}}}, x, w, add{modifiers};"
        for i in range(4)
    ]


@gluon.constexpr_function
def _wgmma_asm(columns, parts, element, fresh):
    steps = " ".join(wgmma_steps(columns, parts, element, fresh))
    fence = "wgmma.fence.sync.aligned;"
    return f"{{ .reg .pred add; .reg .b64 x, w; {fence} {steps} wgmma.commit_group.sync.aligned; }}"


@gluon.constexpr_function
def _asm_constraints(columns, parts, element, fresh):
    sums = columns // 2
    held = [] if fresh else [str(i) for i in range(sums)]
    return ",".join([("=r" if element == "int8" else "=f")] * sums + held + ["l"] * (2 * sums // parts))


@gluon.constexpr_function
def _asm_types(parts, element):
    return (gl.int32 if element == "int8" else gl.float32,) * parts


@gluon.jit
def wgmma_slot(sums, ring, wg, x_at, w_at, slot):
    """Start sums + x @ w^T of a K block (no sums: the product). Returns the parts in flight, for warpgroup_mma_wait.

    x_at, w_at: matrix_descriptors of the first slots.
    """
    ELEMENT: gl.constexpr = ring.x.dtype.name
    x, w = slot_descriptors(ring, wg, x_at, w_at, slot)
    text: gl.constexpr = _wgmma_asm(wg.COLUMNS, wg.PARTS, ELEMENT, len(sums) == 0)
    return run_wgmma(text, sums, wg, x, w, ELEMENT)


@gluon.jit
def slot_descriptors(ring, wg, x_at, w_at, slot):
    """Descriptors of a slot's rows, from those of the first slot."""
    W_ROWS: gl.constexpr = wg.BLOCK_SIZE_N
    return x_at + slot * ring.x.shape[1] * 8, w_at + slot * W_ROWS * 8


@gluon.jit
def run_wgmma(text: gl.constexpr, sums, wg, x_at, w_at, ELEMENT: gl.constexpr):
    """Run PTX made of wgmma_steps on these sums (none: fresh ones); returns the parts."""
    constraints: gl.constexpr = _asm_constraints(wg.COLUMNS, wg.PARTS, ELEMENT, len(sums) == 0)
    types: gl.constexpr = _asm_types(wg.PARTS, ELEMENT)
    everywhere = gl.zeros([64, wg.WIDTH], gl.int64, wg.LAYOUT)
    operands = sums
    operands += (everywhere + x_at, everywhere + w_at)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=types, is_pure=False, pack=wg.WIDTH // 2)


@gluon.jit
def zero_accumulators(wg, SUM: gl.constexpr):
    """The parts of an empty sum."""
    parts = ()
    for _ in gl.static_range(wg.PARTS):
        parts += (gl.zeros([64, wg.WIDTH], SUM, wg.LAYOUT),)
    return parts


@gluon.jit
def allocate_rings(
    x, w, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """(x's slots, w's slots). For a tile in parts one allocation of buffers as wide as a part, x's first, w's last.

    As one allocation it is the largest, which Triton places first.
    """
    if accumulator_parts(COLUMNS) == 1:
        x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], x.layout)
        w_ring = allocate_w_ring(w, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    else:
        WIDTH: gl.constexpr = COLUMNS // accumulator_parts(COLUMNS)
        ROWS: gl.constexpr = STAGES * (BLOCK_SIZE_M + BLOCK_SIZE_N)
        w_ring = gl.allocate_shared_memory(x.dtype, [ROWS // WIDTH, WIDTH, BLOCK_SIZE_K], x.layout)
        x_ring = view_as_ring(w_ring, STAGES, BLOCK_SIZE_M)
    return x_ring, w_ring


@gluon.jit
def matrix_descriptors(ring, wg):
    """For a tile in parts, the descriptors of a warpgroup's rows of x and w in the first slots; else unused zeros."""
    if wg.PARTS == 1:
        x_at, w_at = 0, 0
    else:
        x_at, w_at = matrix_descriptor(wg.ROW), matrix_descriptor(ring.x.shape[0] * ring.x.shape[1] + wg.COLUMN)
    return x_at, w_at


@gluon.jit
def matrix_descriptor(row):
    """The matrix descriptor (PTX ISA, wgmma) of the rings from this row on.

    Sixteenths of the address, which grow by 8 per row; 1024 bytes from one 8 rows to the next; swizzle of 128 bytes.
    """
    base = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    layout: gl.constexpr = 1 << 62 | 1024 // 16 << 32 | 1 << 16
    return (((base & 0x3FFFF) + row * 128) >> 4).to(gl.int64) | layout


@gluon.jit
def _check_ring_address(places):
    """Trap unless the rings begin at the address that `matrix_descriptor` assumes; called by a role of one warp."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    TOKEN: gl.constexpr = 0x47454D4D
    token = gl.full([32], TOKEN, gl.int32, LANES)
    view_as_row(places.index(0), 32).store(token)
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 a; bar.warp.sync -1; mov.u32 a, global_smem; ld.shared.b32 a, [a];"
        " setp.ne.s32 p, a, $1; @p trap; mov.u32 $0, a; }"
    )
    gl.inline_asm_elementwise(asm, "=r,r", [TOKEN], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def checked_barrier_init_warp(ring, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr = 1):
    """pipeline.barrier_init_warp, after a check of the rings' address."""
    _check_ring_address(ring.w)
    barrier_init_warp(ring, SPLIT_K, FILLERS)


@gluon.jit
def init_share_warp(
    ring, COLUMNS: gl.constexpr, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr, WARPGROUPS: gl.constexpr,
    SHARE: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """pipeline.barrier_init_warp for every SHARES-th slot from SHARE on; the loader waits for all of these warps.

    The last of them, with the fewest slots, first checks the rings' address, for tiles in parts: later the loader's
    copies may be under way to where the check writes.
    """
    if SHARE == SHARES - 1 and accumulator_parts(COLUMNS) > 1:
        _check_ring_address(ring.w)
    init_slot_barriers(ring, FILLERS, WARPGROUPS, SHARE, SHARES)
    cluster_arrive(SPLIT_K)


@gluon.constexpr_function
def _bar_sync(group):
    return f"bar.sync {14 + group}, 256;"


@gluon.constexpr_function
def _bar_arrive(group):
    return f"bar.arrive {14 + group}, 256;"


@gluon.constexpr_function
def _pingpong_asm(columns, parts, element, group):
    """The turn passes after three of the four instructions: the fourth hides the other warpgroup's start."""
    first, second, third, last = wgmma_steps(columns, parts, element, True)
    commit = "wgmma.commit_group.sync.aligned;"
    begin = f"{_bar_sync(group)} wgmma.fence.sync.aligned; {first} {second} {third} {commit} {last} {commit}"
    end = f"wgmma.wait_group.sync.aligned 1; {_bar_arrive(1 - group)} wgmma.wait_group.sync.aligned 0;"
    return f"{{ .reg .pred add; .reg .b64 x, w; {begin} {end} }}"


@gluon.jit
def wgmma_pingpong(ring, wg, x_at, w_at, slot):
    """x @ w^T of a K block when it is this warpgroup's turn; returns the parts of the finished product.

    Arguments as in wgmma_slot. Both warpgroups call it equally often.
    """
    ELEMENT: gl.constexpr = ring.x.dtype.name
    x, w = slot_descriptors(ring, wg, x_at, w_at, slot)
    text: gl.constexpr = _pingpong_asm(wg.COLUMNS, wg.PARTS, ELEMENT, wg.GROUP)
    return run_wgmma(text, (), wg, x, w, ELEMENT)


@gluon.jit
def pingpong_begin(GROUP: gl.constexpr):
    """Give the first turn to warpgroup 0."""
    if GROUP == 1:
        _run_asm(_bar_arrive(0))


@gluon.jit
def pingpong_end(GROUP: gl.constexpr):
    """Take the turn that warpgroup 1 passed last; no product uses it."""
    if GROUP == 0:
        _run_asm(_bar_sync(0))


@gluon.jit
def _run_asm(text: gl.constexpr):
    asm: gl.constexpr = text + " mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
