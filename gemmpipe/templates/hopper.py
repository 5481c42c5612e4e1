"""Device functions that Hopper's warp-specialised kernels share: the ring, and a tile's way out.

Written in Gluon, which has no interpreter. A loader warp fills a ring of slots by TMA, two warpgroups empty it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gemmpipe.templates.gluon_names import as_box, tma_load, tma_store
from gemmpipe.templates.hopper_order import pieces_of, place_of
from gemmpipe.templates.hopper_splits import come_along


@gluon.jit
def after(slot, phase, STAGES: gl.constexpr):
    """The slot of the ring that follows, and the phase of its barriers."""
    slot += 1
    wrapped = slot == STAGES
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """(full, empty, ready): a pair of barriers a slot, and one that says that they are made (see begin_slots)."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    return full, empty, ready


@gluon.jit
def begin_slots(full, empty, ready, STAGES: gl.constexpr):
    """Make the barriers of the slots, which the two warpgroups give back together.

    By one warp: Triton synchronises those who make barriers after each pair, which takes four warps 60 ns.
    """
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def prepare(full, empty, ready, STAGES: gl.constexpr, SPLIT_K: gl.constexpr):
    """A warp beside the loader's: makes the barriers while that one works out where to begin."""
    begin_slots(full, empty, ready, STAGES)
    come_along(SPLIT_K)


@gluon.jit
def wait_for_previous(number=0):
    """Programmatic dependent launch: the kernel before has ended; what it wrote may be read, what it read written.

    Returns `number`, which is computed while waiting, as is all that leads to it.
    """
    # By a predicate (no number is the least one): ptxas moves a wait without operands ahead of what stands before it.
    asm: gl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $1, -2147483648; @p griddepcontrol.wait; mov.u32 $0, $1; }"
    return gl.inline_asm_elementwise(asm, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
    """Programmatic dependent launch: the kernel after may take the room that there is; it waits for this one's end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def accumulator(columns, depth):
    """Where a warpgroup's matrix instruction of so many columns, `depth` elements deep, leaves its sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def tiled_layout(columns, depth):
    """16 x 16 tiles of bytes (layouts.py) as a matrix instruction reads them without a swizzle: those of the same 16
    along K side by side, so that every 8 columns of 16 bytes follow one another."""
    inner = [[0, 1 << i] for i in range(4)] + [[1 << i, 0] for i in range(columns.bit_length() - 1)]
    return gl.SharedLinearLayout(inner + [[0, 1 << i] for i in range(4, depth.bit_length() - 1)], alignment=128)


@gluon.jit
def ring_of_w(w, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Slots for [BLOCK_SIZE_N, BLOCK_SIZE_K] of w; of a weight in tiles every COLUMNS are a place of their own, as its
    layout in shared memory cannot be sliced."""
    if len(w.block_type.shape) == 2:
        ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], w.layout)
    else:
        TILES: gl.constexpr = tiled_layout(COLUMNS, BLOCK_SIZE_K)
        ring = gl.allocate_shared_memory(w.dtype, [STAGES * (BLOCK_SIZE_N // COLUMNS), COLUMNS, BLOCK_SIZE_K], TILES)
    return ring


@gluon.jit
def part_of_w(w_ring, slot, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """[K, COLUMNS] of a slot, from COLUMN on (see ring_of_w)."""
    if w_ring.shape[0] == STAGES:
        part = w_ring.index(slot).slice(COLUMN, COLUMNS)
    else:
        part = w_ring.index(slot * (w_ring.shape[0] // STAGES) + COLUMN // COLUMNS)
    return part.permute((1, 0))


@gluon.jit
def load_w(
    w, w_ring, slot, column, k, bar, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr
):
    """Start the copy of a tile of w into a slot; tiles come as runs of 256 bytes, in the order of tiled_layout.

    Where slots are several places (hopper_columns) the copy engine fills them all, whatever the box's type says.
    """
    if len(w.block_type.shape) == 2:
        if w_ring.shape[0] == STAGES:
            place = w_ring.index(slot)
        else:
            PARTS: gl.constexpr = BLOCK_SIZE_N // w_ring.shape[1]
            place = w_ring.index(w_ring.shape[0] - STAGES * PARTS + slot * PARTS)
        tma_load(w, [column, k], bar, place)
    else:
        PLACES: gl.constexpr = w_ring.shape[0] // STAGES
        COLUMNS: gl.constexpr = w_ring.shape[1]
        for i in gl.static_range(PLACES):
            place = as_box(w_ring.index(slot * PLACES + i), w, BLOCK_SIZE_K // 16, COLUMNS // 16, 256)
            tma_load(w, [k // 16, (column + i * COLUMNS) // 16, 0], bar, place)


@gluon.jit
def expect_slot(bar, x, M, REST_BYTES: gl.constexpr, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_K: gl.constexpr):
    """A slot is full after REST_BYTES and those copies of x that load_x starts; a copy engine counts bytes."""
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
    """Start the copy of a tile of x; one with more rows than x by parts, without those that lie outside.

    What is not copied is whatever the slot held before, in rows that are never stored. Filled with zeros by the copy
    engine those rows cost up to a third of the time: all programs ask for the same few lines at once.
    """
    ROWS: gl.constexpr = x.block_type.shape[0]
    if place.shape[0] == ROWS:
        tma_load(x, [row, k], bar, place)
    else:
        for i in gl.static_range(place.shape[0] // ROWS):
            tma_load(x, [i * ROWS, k], bar, place.slice(i * ROWS, ROWS), pred=i * ROWS < M)


@gluon.jit
def load_ring(
    x, w, scales, x_ring, w_ring, scale_ring, full, empty, ready,
    M, scale_stride, tiles_m, tiles_n, blocks, programs, group_m, whole, splits,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SCALED: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The loader warp: for each piece and K block, x and w (SCALED: and x's scales) into the next empty slot.

    SPLIT_K: where the splits of a tile are a `cluster`, this warp comes along to where they meet.
    """
    slot = 0
    phase = 1
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    for piece in range(gl.program_id(0), pieces_of(tiles_m * tiles_n, whole, splits), programs):
        # Not carried over from the piece before: Triton 3.6 drops `begin` and `end` from what is carried, and splits of
        # other lengths wait for ever. What waits the first time alone stands in the loop instead.
        _, _, begin, end, row, tile_n = place_of(
            piece, M, tiles_m, tiles_n, blocks, group_m, whole, splits, BLOCK_SIZE_M
        )
        mbarrier.wait(ready, 0)
        row = wait_for_previous(row)
        let_next_start()  # not earlier: kernels further on would start, and take the room of this one's programs
        for k in range(begin, end):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            expect_slot(bar, x, M, W_BYTES + (BLOCK_SIZE_M * 4 if SCALED else 0), BLOCK_SIZE_M, BLOCK_SIZE_K)
            # w first: it comes from memory, x mostly from L2.
            load_w(w, w_ring, slot, tile_n * BLOCK_SIZE_N, k * BLOCK_SIZE_K, bar, BLOCK_SIZE_N, BLOCK_SIZE_K, STAGES)
            load_x(x, x_ring.index(slot), row, k * BLOCK_SIZE_K, M, bar)
            if SCALED:
                tma_load(scales, [k * scale_stride + row], bar, scale_ring.index(slot))
            slot, phase = after(slot, phase, STAGES)
    come_along(SPLIT_K)


@gluon.jit
def scaled(
    total, bias_ptr, x_scale_ptr, w_scale_ptr, row, column, M, N,
    COLUMNS: gl.constexpr, TILE: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """total * x_scale * w_scale + bias of [64, COLUMNS] from this row and column on."""
    rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, TILE)), M - 1)
    columns = gl.minimum(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)), N - 1)
    if SCALES == "row":
        total = total * gl.load(x_scale_ptr + rows)[:, None] * gl.load(w_scale_ptr + columns)[None, :]
    if SCALES == "tensor":
        total = total * (gl.load(x_scale_ptr) * gl.load(w_scale_ptr))
    if BIAS:
        total += gl.load(bias_ptr + columns).to(gl.float32)[None, :]
    return total


@gluon.jit
def store_tile(acc, out, stage, row, column):
    """[64, columns] on its way: converted, through shared memory, by TMA; wide ones by halves through one place."""
    STAGED: gl.constexpr = stage.shape[1]
    if acc.shape[1] == STAGED:
        _put(acc, out, stage, row, column)
    else:
        low, high = acc.reshape([64, 2, STAGED]).permute((0, 2, 1)).split()
        _put(low, out, stage, row, column)
        _put(high, out, stage, row, column + STAGED)


@gluon.jit
def _put(acc, out, stage, row, column):
    tma.store_wait(0)  # the last copy out of `stage` has read it
    stage.store(acc.to(stage.dtype))
    fence_async_shared()
    tma_store(out, [row, column], stage)
