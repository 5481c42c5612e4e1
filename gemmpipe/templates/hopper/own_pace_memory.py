"""The shared memory of the kernels at own pace: slots, x's scales and barriers, with addresses known when compiled.

The instructions of own_pace.py need addresses, which Gluon does not expose. So all these are one allocation, the
largest, which Triton places at the beginning of a program's shared memory, as in wgmma_any_n.py; `init_warp` traps if
it does not. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import view_as, view_as_ring, view_as_row
from gemmpipe.templates.hopper.pipeline import fence_barrier_init
from gemmpipe.templates.hopper.scale_panels import scale_panels

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def line_bytes():
    """Bytes of the lines in which scales and barriers are placed; a function, as a kernel's hash covers its code."""
    return 512


@gluon.constexpr_function
def scale_lines(block_m, stages):
    """Lines that x's scales take: those of the panels, or of the slots' columns if they are more."""
    return -(-max(4 * scale_panels(), stages) * block_m * 4 // line_bytes())


@gluon.constexpr_function
def math_warps(block_m):
    """Warps that release a slot: those of two warpgroups, or of the only one of a tile of 64 rows."""
    return 4 if block_m == 64 else 8


@gluon.constexpr_function
def control_bytes(block_m, stages):
    """Bytes between the slots of x and of w: x's scales, a line for either group of barriers, and one for a check.

    A multiple of 1024, to which slots are aligned.
    """
    return ((scale_lines(block_m, stages) + 3) * line_bytes() + 1023) // 1024 * 1024


@gluon.jit
def allocate(x, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, IN_PANELS: gl.constexpr):
    """(x's slots, w's slots, x's scales, full, empty, handover, panel_bars, a line for init_warp): of one allocation.

    It is the largest, which Triton places first. w's view is all of it, in buffers of eight rows, with its slots last;
    that of the scales ends with them: panels [rows, 4] with IN_PANELS, else a column [rows] for each slot. handover and
    panel_bars: all barriers of a line, of which the last ones are store_warp.py's or panel_warp's.
    """
    X_BYTES: gl.constexpr = STAGES * BLOCK_SIZE_M * 128
    BYTES: gl.constexpr = X_BYTES + control_bytes(BLOCK_SIZE_M, STAGES) + STAGES * BLOCK_SIZE_N * 128
    LENGTH: gl.constexpr = line_bytes() // 4
    LINES: gl.constexpr = X_BYTES // line_bytes() + scale_lines(BLOCK_SIZE_M, STAGES)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    everything = gl.allocate_shared_memory(x.dtype, [BYTES // 1024, 8, 128], x.layout)
    x_ring = view_as_ring(everything, STAGES, BLOCK_SIZE_M)
    if IN_PANELS:
        scales = view_as(everything, gl.float32, [8 * STAGES + scale_panels(), BLOCK_SIZE_M, 4], ROWS)
    else:
        scales = view_as(everything, gl.float32, [32 * STAGES + STAGES, BLOCK_SIZE_M], FLAT)
    lines = view_as(everything, gl.float32, [LINES + 3, LENGTH], FLAT)
    full = view_as(lines.index(LINES), gl.int64, [STAGES, 1], BARRIERS)
    empty = view_as(lines.index(LINES + 1), gl.int64, [STAGES, 1], BARRIERS)
    handover = view_as(lines.index(LINES), gl.int64, [LENGTH // 2, 1], BARRIERS)
    panel_bars = view_as(lines.index(LINES + 1), gl.int64, [LENGTH // 2, 1], BARRIERS)
    return x_ring, everything, scales, full, empty, handover, panel_bars, view_as_row(lines.index(LINES + 2), 32)


@gluon.constexpr_function
def full_barriers(block_m, stages):
    """The place of the first barrier by which slots are full."""
    return stages * block_m * 128 + scale_lines(block_m, stages) * line_bytes()


@gluon.constexpr_function
def _init_asm(block_m, stages, fillers, full):
    """PTX: one thread initialises the barriers; Triton synchronises a warp after each one, which takes 100 clocks.

    In one branch: where each has a predicate, ptxas makes a branch and a fence of each, 900 clocks for all. Tiles of 64
    rows have no store warps and no panels. full: with those by which slots are full.
    """
    first, warps = full_barriers(block_m, stages), math_warps(block_m)
    inits = []
    for i in range(stages):
        inits += [f"mbarrier.init.shared::cta.b64 [at + {first + 8 * i}], {fillers};"] if full else []
        inits += [f"mbarrier.init.shared::cta.b64 [at + {first + line_bytes() + 8 * i}], {warps};"]
    handover, panel_bars = (first, [1] * 4), (first + line_bytes(), [1] * scale_panels() + [warps] * scale_panels())
    for line, counts in (handover, panel_bars) if block_m > 64 else ():
        places = range(line + line_bytes() - len(counts) * 8, line + line_bytes(), 8)
        pairs = zip(places, counts, strict=True)
        inits += [f"mbarrier.init.shared::cta.b64 [at + {place}], {count};" for place, count in pairs]
    begin = ".reg .pred p; .reg .b32 at; mov.u32 at, %laneid; setp.eq.u32 p, at, 0; mov.u32 at, global_smem;"
    return f"{{ {begin} @!p bra others; {' '.join(inits)} others: mov.u32 $0, 0; }}"


@gluon.constexpr_function
def _check_asm(block_m, stages):
    """PTX: trap unless the line of init_warp is where the instructions expect it."""
    place = stages * block_m * 128 + (scale_lines(block_m, stages) + 2) * line_bytes()
    return (
        "{ .reg .pred p; .reg .b32 a; bar.warp.sync -1; mov.u32 a, global_smem;"
        f" ld.shared.b32 a, [a + {place}]; setp.ne.s32 p, a, $1; @p trap; mov.u32 $0, a; }}"
    )


@gluon.constexpr_function
def _init_full_asm(block_m, stages, fillers):
    """PTX: one thread initialises the barriers by which slots are full, for the copies that this warp starts next."""
    first = full_barriers(block_m, stages)
    inits = [f"mbarrier.init.shared::cta.b64 [at + {first + 8 * i}], {fillers};" for i in range(stages)]
    begin = ".reg .pred p; .reg .b32 at; mov.u32 at, %laneid; setp.eq.u32 p, at, 0; mov.u32 at, global_smem;"
    end = "fence.mbarrier_init.release.cluster; bar.warp.sync -1; mov.u32 $0, 0;"
    return f"{{ {begin} @!p bra others; {' '.join(inits)} others: {end} }}"


@gluon.jit
def init_full_barriers(ring, BLOCK_SIZE_M: gl.constexpr, STAGES: gl.constexpr, FILLERS: gl.constexpr):
    """Initialises the barriers of slots that FILLERS roles fill: by the loader, for its first copies."""
    init: gl.constexpr = _init_full_asm(BLOCK_SIZE_M, STAGES, FILLERS)
    gl.inline_asm_elementwise(init, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    mbarrier.arrive(ring.ready, count=1)


@gluon.jit
def init_warp(
    ring, check, BLOCK_SIZE_M: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr,
    FULL: gl.constexpr = True,
):  # fmt: skip
    """Initialises the barriers of slots that FILLERS roles fill and all math warps release.

    check: the line that `allocate` returns; where it is not at the expected address, neither is anything else: a trap.
    FULL: with those by which slots are full, unless the loader does it (init_full_barriers).
    """
    TOKEN: gl.constexpr = 0x47454D4D
    init: gl.constexpr = _init_asm(BLOCK_SIZE_M, STAGES, FILLERS, FULL)
    trap: gl.constexpr = _check_asm(BLOCK_SIZE_M, STAGES)
    gl.inline_asm_elementwise(init, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    fence_barrier_init()
    mbarrier.arrive(ring.ready, count=1)
    check.store(gl.full([32], TOKEN, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    gl.inline_asm_elementwise(trap, "=r,r", [TOKEN], dtype=gl.int32, is_pure=False, pack=1)
    cluster_arrive(SPLIT_K)


@gluon.constexpr_function
def first_row_of_w(block_m, stages):
    """The row of the allocation with which w's slots begin."""
    return stages * block_m + control_bytes(block_m, stages) // 128
