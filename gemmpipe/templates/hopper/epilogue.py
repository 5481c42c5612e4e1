"""The epilogue of Hopper's warp-specialised kernels: a tile is scaled, staged and stored; with split-K added up first.

Split-K: parts are in global memory (L2). The last split to arrive adds up all parts, or, if the splits of a tile are
launched as a cluster, each of them its share: no atomics, and all multiprocessors read. Reading each other's shared
memory was slower (docs/explanation/kernels.md). Written in Gluon, which has no interpreter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gemmpipe.templates.hopper.gluon_compat import cta_barrier, tma_store
from gemmpipe.templates.hopper.tile_scheduler import accumulator_layout

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@gluon.jit
def store_part(acc, part_ptr, kept, rows_left, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Store this split's part [64, COLUMNS] of a tile for sum_slice, without slice `kept`."""
    offsets, inside = _part_offsets(rows_left, COLUMNS, TILE)
    others = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)) // WIDTH != kept
    gl.store(part_ptr + offsets, acc, mask=inside & others[None, :])


@gluon.jit
def kept_slice(acc, kept, SPLIT_K: gl.constexpr, SLICE: gl.constexpr, WIDTH: gl.constexpr):
    """Slice `kept` of this split's own part, in a cluster from its registers; zeros if none is kept."""
    if SPLIT_K == "cluster":
        part = acc
        for _ in gl.static_range(_halvings(acc.shape[1], WIDTH)):
            low, high = part.reshape([64, 2, part.shape[1] // 2]).permute((0, 2, 1)).split()
            part = gl.where((kept & (low.shape[1] // WIDTH)) == 0, low, high)
        part = gl.convert_layout(part, SLICE)
    else:
        part = gl.zeros([64, WIDTH], gl.float32, SLICE)
    return part


@gluon.constexpr_function
def warpgroups(wg):
    """The number of warpgroups that share a tile."""
    return wg.BLOCK_SIZE_M * wg.BLOCK_SIZE_N // (64 * wg.COLUMNS)


@gluon.constexpr_function
def _halvings(columns, width):
    return (columns // width).bit_length() - 1


@gluon.jit
def slices_to_sum(counter_ptr, split, splits, slices, SPLIT_K: gl.constexpr):
    """(first, step) of the slices that this split adds up, once all parts that it reads are stored.

    SPLIT_K: `last`: all slices for the last split to arrive, none for others; `cluster`: every splits-th.
    """
    if SPLIT_K == "cluster":
        _cluster_sync()
        first, step = split, splits
    else:
        first, step = gl.where(_is_last_split(counter_ptr, splits), 0, slices), 1
    return first, step


@gluon.jit
def _is_last_split(counter_ptr, splits):
    """True if all other splits have stored their part, which may then be read; the counter is back to 0."""
    cta_barrier()
    last = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == splits - 1
    if last:
        gl.store(counter_ptr, 0)
    return last


@gluon.jit
def _cluster_sync():
    """Wait until all threads of the cluster have arrived here or in cluster_arrive; their writes may then be read.

    As PTX: Triton compiles the programs without a cluster and does not know that they are launched as one.
    """
    asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cluster_arrive(SPLIT_K: gl.constexpr):
    """The arrival of a warp without part in the reduction: _cluster_sync waits for its threads too, once.

    Warps without any role arrive too: Triton allocates warps in fours, so the loader has three neighbours.
    """
    if SPLIT_K == "cluster":
        asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_slice(own, slice_ptr, part, splits, kept, rows_left, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """own + the same columns [64, COLUMNS] of all parts but `kept`, `part` elements apart, in the order of the splits.

    One slice of a wide tile at a time, so that there are registers for several parts in flight.
    """
    offsets, inside = _part_offsets(rows_left, COLUMNS, TILE)
    total = own
    # Loads of a batch are in flight together, as many as there are registers for.
    BATCH: gl.constexpr = 128 // COLUMNS
    for i in range(0, splits, BATCH):
        for j in gl.static_range(BATCH):
            held = inside & (i + j < splits) & (i + j != kept)
            total += gl.load(slice_ptr + (i + j) * part + offsets, mask=held, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _part_offsets(rows_left, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """(offsets of the elements of [64, COLUMNS] in a part, mask of those in rows of x: padding takes no traffic).

    In the order of the threads that hold them, so that a warp's pairs are contiguous: by rows and columns a store
    touched eight lines instead of two (64x1280x8192 in splits on an H200: 8.0 us, 9.1 by rows and columns).
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, TILE))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))[None, :]
    offsets = (columns // 8 * 2 + rows % 16 // 8) * 256 + rows // 16 * 64 + rows % 8 * 8 + columns % 8
    return offsets, (rows < rows_left) & (columns >= 0)


class EpilogueOperands(NamedTuple):
    """The output (a tensor descriptor), and the bias and scales of `apply_epilogue`, or None."""

    out: object
    bias_ptr: gl.tensor
    x_scale_ptr: gl.tensor
    w_scale_ptr: gl.tensor


@gluon.jit
def store_accumulators(sums, wg, output, stage, work, work_id, coord, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """Store a warpgroup's sums of a work tile, for split-K once those of all splits are added up.

    `stage` has equally many buffers for every warpgroup.
    """
    BUFFERS: gl.constexpr = stage.shape[0] // warpgroups(wg)
    first = stage.index(wg.GROUP * BUFFERS)
    if SPLIT_K == "cluster" or (SPLIT_K == "last" and work_id >= work.whole):
        if wg.PARTS == 1:
            reduce_split_k(sums[0].to(gl.float32), wg, output, first, work, coord, SPLIT_K, SCALES)
        else:
            reduce_split_k_parts(sums, wg, output, first, work, coord, SPLIT_K, SCALES)
    elif BUFFERS == 1:
        for j in gl.static_range(wg.PARTS):
            here = coord.column + j * wg.WIDTH
            part = apply_epilogue(sums[j].to(gl.float32), output, work, coord.row, here, wg.LAYOUT, SCALES)
            store_tile(part, output.out, first, coord.row, here)
    else:
        for begin in gl.static_range(0, wg.PARTS, BUFFERS):
            store_parts(sums, wg, output, stage, work, coord, begin, BUFFERS, SCALES)


@gluon.jit
def store_parts(sums, wg, output, stage, work, coord, BEGIN: gl.constexpr, BUFFERS: gl.constexpr, SCALES: gl.constexpr):
    """Stage a warpgroup's parts from BEGIN on, as many as it has buffers, then copy them all to memory."""
    COUNT: gl.constexpr = wg.PARTS - BEGIN if wg.PARTS - BEGIN < BUFFERS else BUFFERS
    tma.store_wait(0)  # the last copies out of these buffers have read them
    for i in gl.static_range(COUNT):
        here = coord.column + (BEGIN + i) * wg.WIDTH
        part = apply_epilogue(sums[BEGIN + i].to(gl.float32), output, work, coord.row, here, wg.LAYOUT, SCALES)
        stage.index(wg.GROUP * BUFFERS + i).store(part.to(stage.dtype))
    fence_async_shared()
    for i in gl.static_range(COUNT):
        here = coord.column + (BEGIN + i) * wg.WIDTH
        tma_store(output.out, [coord.row, here], stage.index(wg.GROUP * BUFFERS + i))


@gluon.jit
def reduce_split_k(total, wg, output, stage, work, coord, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """Store this split's part of the tile; add up, finish and store this split's share of the sum."""
    COLUMNS: gl.constexpr = wg.COLUMNS
    WIDTH: gl.constexpr = output.out.block_type.shape[1]
    SLICE: gl.constexpr = accumulator_layout(WIDTH, wg.DEPTH)
    row, split, splits = coord.row, coord.split, work.splits
    number = (coord.tile - work.whole) * warpgroups(wg) + wg.GROUP
    parts = work.parts_ptr + number.to(gl.int64) * splits * 64 * COLUMNS
    kept = split if SPLIT_K == "cluster" else -1
    store_part(total, parts + split * 64 * COLUMNS, kept, work.M - row, WIDTH, COLUMNS, wg.LAYOUT)
    own = kept_slice(total, kept, SPLIT_K, SLICE, WIDTH)
    first, step = slices_to_sum(work.counters_ptr + number, split, splits, COLUMNS // WIDTH, SPLIT_K)
    for i in range(first, COLUMNS // WIDTH, step):
        here = coord.column + i * WIDTH
        part = sum_slice(own, parts + i * 64 * WIDTH, 64 * COLUMNS, splits, kept, work.M - row, WIDTH, SLICE)
        part = apply_epilogue(part, output, work, row, here, SLICE, SCALES)
        store_tile(part, output.out, stage, row, here)
        own, kept = gl.zeros([64, WIDTH], gl.float32, SLICE), -1


@gluon.jit
def reduce_split_k_parts(sums, wg, output, stage, work, coord, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """reduce_split_k for a tile in parts: its slices are the parts, in a cluster assigned to the splits in turn.

    In a cluster a split keeps the parts that it adds up in registers.
    """
    WIDTH: gl.constexpr = wg.WIDTH
    PARTS: gl.constexpr = wg.PARTS
    row, split, splits = coord.row, coord.split, work.splits
    number = (coord.tile - work.whole) * warpgroups(wg) + wg.GROUP
    parts = work.parts_ptr + number.to(gl.int64) * splits * 64 * wg.COLUMNS
    owner = 0
    for j in gl.static_range(PARTS):
        rows = gl.where(owner == split, 0, work.M - row) if SPLIT_K == "cluster" else work.M - row
        to = parts + (split * PARTS + j) * 64 * WIDTH
        store_part(sums[j].to(gl.float32), to, -1, rows, WIDTH, WIDTH, wg.LAYOUT)
        owner = next_owner(owner, splits)
    first, step = slices_to_sum(work.counters_ptr + number, split, splits, PARTS, SPLIT_K)
    if SPLIT_K == "cluster":
        owner = 0
        for j in gl.static_range(PARTS):
            if owner == split:
                reduce_part(sums[j].to(gl.float32), split, j, wg, output, stage, work, coord, parts, SCALES)
            owner = next_owner(owner, splits)
    else:
        none = gl.zeros([64, WIDTH], gl.float32, wg.LAYOUT)
        for j in range(first, PARTS, step):
            reduce_part(none, -1, j, wg, output, stage, work, coord, parts, SCALES)


@gluon.jit
def next_owner(owner, splits):
    """The split of a cluster that adds up the next part."""
    return gl.where(owner + 1 == splits, 0, owner + 1)


@gluon.jit
def reduce_part(own, kept, j, wg, output, stage, work, coord, parts_ptr, SCALES: gl.constexpr):
    """Add to `own` part j of all splits but `kept`, finish it and store it."""
    WIDTH: gl.constexpr = wg.WIDTH
    row, here = coord.row, coord.column + j * WIDTH
    part_ptr = parts_ptr + j * 64 * WIDTH
    part = sum_slice(own, part_ptr, 64 * wg.COLUMNS, work.splits, kept, work.M - row, WIDTH, wg.LAYOUT)
    part = apply_epilogue(part, output, work, row, here, wg.LAYOUT, SCALES)
    store_tile(part, output.out, stage, row, here)


@gluon.jit
def apply_epilogue(total, output, work, row, column, LAYOUT: gl.constexpr, SCALES: gl.constexpr):
    """total * x_scale * w_scale + bias of [64, columns] from (row, column) on; SCALES: `none`, `tensor`, `row`."""
    rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), work.M - 1)
    columns = gl.minimum(column + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT)), work.N - 1)
    if SCALES == "row":
        total = total * gl.load(output.x_scale_ptr + rows)[:, None] * gl.load(output.w_scale_ptr + columns)[None, :]
    if SCALES == "tensor":
        total = total * (gl.load(output.x_scale_ptr) * gl.load(output.w_scale_ptr))
    if output.bias_ptr is not None:
        total += gl.load(output.bias_ptr + columns).to(gl.float32)[None, :]
    return total


@gluon.jit
def store_tile(acc, out, stage, row, column):
    """Store [64, columns]: converted, through shared memory, by TMA; wide tiles by halves through one stage buffer."""
    STAGED: gl.constexpr = stage.shape[1]
    if acc.shape[1] == STAGED:
        _stage_and_store(acc, out, stage, row, column)
    else:
        low, high = acc.reshape([64, 2, STAGED]).permute((0, 2, 1)).split()
        _stage_and_store(low, out, stage, row, column)
        _stage_and_store(high, out, stage, row, column + STAGED)


@gluon.jit
def _stage_and_store(acc, out, stage, row, column):
    tma.store_wait(0)  # the last copy out of `stage` has read it
    stage.store(acc.to(stage.dtype))
    fence_async_shared()
    tma_store(out, [row, column], stage)
