"""TMA pipeline of Hopper's warp-specialised kernels: a loader warp fills a ring of slots, math warpgroups empty them.

Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import tma_load, view_as_box
from gemmpipe.templates.hopper.tile_scheduler import tile_coord, work_tile_count


class Ring(NamedTuple):
    """A program's shared memory: slots that the loader fills and all math warpgroups empty, and their barriers.

    x [slots, BLOCK_SIZE_M, BLOCK_SIZE_K]; w [slots, BLOCK_SIZE_N, BLOCK_SIZE_K], or several buffers per slot of the
    same total size (see allocate_w_ring, wgmma_any_n.allocate_rings); scales of x's rows [slots, BLOCK_SIZE_M], or
    panels [panels, BLOCK_SIZE_M, 4] (scale_panels.py), with further places before them or not, or None. A warpgroup's
    tiles are stored through stage [warpgroups, 64, columns], or None. full, empty, ready: allocate_barriers.
    """

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    stage: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """(the next slot of the ring, the phase of its barriers)."""
    slot += 1
    wrapped = slot == STAGES
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, INIT_WARPS: gl.constexpr = 1):
    """(full, empty, ready): a pair of barriers per slot, and one for their initialisation by so many warps."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=INIT_WARPS)
    return full, empty, ready


@gluon.jit
def fence_barrier_init():
    """Order the initialisation of barriers before later uses, and no other writes: PTX `fence.mbarrier_init`."""
    asm: gl.constexpr = "fence.mbarrier_init.release.cluster; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def init_slot_barriers(
    ring, FILLERS: gl.constexpr = 1, WARPGROUPS: gl.constexpr = 2, SHARE: gl.constexpr = 0, SHARES: gl.constexpr = 1
):
    """Initialise the barriers of the slots, which FILLERS roles fill and all math warpgroups release together.

    By one warp, every SHARES-th slot from SHARE on: Triton synchronises the initialising warps after each pair, which
    takes four warps 60 ns.
    """
    SLOTS: gl.constexpr = ring.full.shape[0]
    for i in gl.static_range(SHARE, SLOTS, SHARES):
        mbarrier.init(ring.full.index(i), count=FILLERS)
        mbarrier.init(ring.empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    mbarrier.arrive(ring.ready, count=1)


@gluon.jit
def barrier_init_warp(ring, SPLIT_K: gl.constexpr, FILLERS: gl.constexpr = 1):
    """Initialises the barriers while the loader warp computes its first tile."""
    init_slot_barriers(ring, FILLERS)
    cluster_arrive(SPLIT_K)


@gluon.jit
def gdc_wait(number=0):
    """Programmatic dependent launch: wait for the previous kernel's end; its output may be read, its input written.

    Returns `number`, which is computed while waiting, as is all that leads to it.
    """
    # By a predicate (no number is the least int32): ptxas moves a wait without operands ahead of earlier instructions.
    asm: gl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $1, -2147483648; @p griddepcontrol.wait; mov.u32 $0, $1; }"
    return gl.inline_asm_elementwise(asm, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    """Programmatic dependent launch: the next kernel may start on free multiprocessors; it waits for this one's end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def preshuffled_layout(columns, depth):
    """16 x 16 tiles of bytes (family/layouts.py) as a matrix instruction reads them without a swizzle.

    Tiles of the same 16 bytes along K are contiguous, so that every 8 columns of 16 bytes follow one another.
    """
    inner = [[0, 1 << i] for i in range(4)] + [[1 << i, 0] for i in range(columns.bit_length() - 1)]
    return gl.SharedLinearLayout(inner + [[0, 1 << i] for i in range(4, depth.bit_length() - 1)], alignment=128)


@gluon.jit
def allocate_w_ring(
    w, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Slots for [BLOCK_SIZE_N, BLOCK_SIZE_K] of w.

    Of a weight in tiles every COLUMNS columns have a buffer of their own, as its shared-memory layout cannot be sliced.
    """
    if len(w.block_type.shape) == 2:
        ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    else:
        TILES: gl.constexpr = preshuffled_layout(COLUMNS, BLOCK_SIZE_K)
        ring = gl.allocate_shared_memory(w.dtype, [STAGES * (BLOCK_SIZE_N // COLUMNS), COLUMNS, BLOCK_SIZE_K], TILES)
    return ring


@gluon.jit
def w_operand(ring, wg, slot):
    """[K, COLUMNS] of a slot, a warpgroup's share (see allocate_w_ring)."""
    SLOTS: gl.constexpr = ring.x.shape[0]
    if ring.w.shape[0] == SLOTS:
        part = ring.w.index(slot).slice(wg.COLUMN, wg.COLUMNS)
    else:
        part = ring.w.index(slot * (ring.w.shape[0] // SLOTS) + wg.COLUMN // wg.COLUMNS)
    return part.permute((1, 0))


@gluon.jit
def load_w(w, ring, slot, column, k, bar, BLOCK_SIZE_N: gl.constexpr):
    """Start the copy of a tile of w into a slot; 16 x 16 tiles as runs of 256 bytes, in preshuffled_layout's order.

    If a slot is several buffers (wgmma_any_n.py), one copy fills them all: the launch sets the real box (Build.boxes).
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    PLACES: gl.constexpr = ring.w.shape[0]
    COLUMNS: gl.constexpr = ring.w.shape[1]
    if len(w.block_type.shape) == 2:
        if PLACES == SLOTS:
            place = ring.w.index(slot)
        else:
            PARTS: gl.constexpr = BLOCK_SIZE_N // COLUMNS
            place = ring.w.index(PLACES - SLOTS * PARTS + slot * PARTS)
        tma_load(w, [column, k], bar, place)
    else:
        for i in gl.static_range(PLACES // SLOTS):
            place = view_as_box(
                ring.w.index(slot * (PLACES // SLOTS) + i), w, ring.w.shape[2] // 16, COLUMNS // 16, 256
            )
            tma_load(w, [k // 16, (column + i * COLUMNS) // 16, 0], bar, place)


@gluon.jit
def expect_slot(bar, x, M, REST_BYTES: gl.constexpr, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_K: gl.constexpr):
    """Announce the bytes after which a slot is full: REST_BYTES, and the copies of x that load_x starts."""
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = ROWS * BLOCK_SIZE_K * x.dtype.primitive_bitwidth // 8
    if ROWS == BLOCK_SIZE_M:
        mbarrier.expect(bar, REST_BYTES + BYTES)
    else:
        for i in gl.static_range(BLOCK_SIZE_M // ROWS):
            last = (i * ROWS < M) & ((i + 1) * ROWS >= M)
            mbarrier.expect(bar, REST_BYTES + (i + 1) * BYTES, pred=last)


@gluon.jit
def load_x(x, place, row, k, M, bar):
    """Start the copy of a tile of x; one with more rows than x in parts, without those that are outside.

    Rows that are not copied keep the slot's former contents and are never stored. Zero-filled by TMA, those rows cost
    up to a third of the time: all programs read the same few lines at once.
    """
    ROWS: gl.constexpr = x.block_type.shape[0]
    if place.shape[0] == ROWS:
        tma_load(x, [row, k], bar, place)
    else:
        for i in gl.static_range(place.shape[0] // ROWS):
            tma_load(x, [i * ROWS, k], bar, place.slice(i * ROWS, ROWS), pred=i * ROWS < M)


@gluon.jit
def producer_warp(
    x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N: gl.constexpr, SPLIT_K: gl.constexpr
):  # fmt: skip
    """The loader warp: copies x, w and x's scales (or None) of each work tile and K block into the next empty slot."""
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    SCALE_BYTES: gl.constexpr = 0 if ring.scales is None else BLOCK_SIZE_M * 4
    FIRST: gl.constexpr = 0 if ring.scales is None else ring.scales.shape[0] - ring.x.shape[0]
    slot = 0
    phase = 1
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        # Not carried over from the previous tile: Triton 3.6 drops `begin` and `end` from what is carried, and splits
        # of other lengths hang. The waits that only the first iteration needs are in the loop for the same reason.
        place = tile_coord(work, work_id, BLOCK_SIZE_M, BLOCK_SIZE_N, 0, 0, SPLIT_K == "halves")
        mbarrier.wait(ring.ready, 0)
        row = gdc_wait(place.row)
        gdc_launch_dependents()  # not earlier: later kernels would start and occupy this one's multiprocessors
        for k in range(place.begin, place.end):
            mbarrier.wait(ring.empty.index(slot), phase)
            bar = ring.full.index(slot)
            expect_slot(bar, x, work.M, W_BYTES + SCALE_BYTES, BLOCK_SIZE_M, BLOCK_SIZE_K)
            # w first: it comes from memory, x mostly from L2.
            load_w(w, ring, slot, place.column, k * BLOCK_SIZE_K, bar, BLOCK_SIZE_N)
            load_x(x, ring.x.index(slot), row, k * BLOCK_SIZE_K, work.M, bar)
            if ring.scales is not None:
                tma_load(scales, [k * scale_stride + row], bar, ring.scales.index(FIRST + slot))
            slot, phase = advance(slot, phase, ring.x.shape[0])
    cluster_arrive(SPLIT_K)
