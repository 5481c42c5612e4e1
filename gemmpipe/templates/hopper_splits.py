"""The end of a tile whose K is split on Hopper: parts in global memory (L2), added up by one split or by a cluster.

The last split to arrive adds up all parts, or, where the splits of a tile are launched as a cluster, each of them its
share: no atomics, and all multiprocessors read. Out of each other's shared memory they did so slower (docs/kernels.md).
Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.templates.gluon_names import cta_barrier


@gluon.jit
def store_part(acc, part_ptr, kept, rows_left, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Leave this split's part [64, COLUMNS] of a tile where sum_of_slice will look for it, but for slice `kept`."""
    offsets, inside = _places(rows_left, COLUMNS, TILE)
    others = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)) // WIDTH != kept
    gl.store(part_ptr + offsets, acc, mask=inside & others[None, :])


@gluon.jit
def kept_slice(acc, kept, SPLIT_K: gl.constexpr, SLICE: gl.constexpr, WIDTH: gl.constexpr):
    """Slice `kept` of this split's own part, in a cluster from its registers; zeros where none is kept."""
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
def _halvings(columns, width):
    return (columns // width).bit_length() - 1


@gluon.jit
def slices_to_sum(counter_ptr, split, splits, slices, SPLIT_K: gl.constexpr):
    """(first, step) of the slices that this split adds up, once all parts that it reads are stored.

    SPLIT_K: `last`: all slices where it is the last split to arrive, else none; `cluster`: every splits-th.
    """
    if SPLIT_K == "cluster":
        _meet()
        first, step = split, splits
    else:
        first, step = gl.where(_arrives_last(counter_ptr, splits), 0, slices), 1
    return first, step


@gluon.jit
def _arrives_last(counter_ptr, splits):
    """Whether all other splits have left their part, which may be read then; the counter is back to 0."""
    cta_barrier()
    last = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == splits - 1
    if last:
        gl.store(counter_ptr, 0)
    return last


@gluon.jit
def _meet():
    """All threads of the cluster have come here or along; what they wrote before may be read.

    By hand: of programs that are compiled one by one Triton does not know that they are a cluster.
    """
    asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def come_along(SPLIT_K: gl.constexpr):
    """A warp that has no part: its threads too are waited for where a cluster meets, once.

    Those without any task as well: Triton keeps warps in fours, so the loader has three neighbours, with a role or not.
    """
    if SPLIT_K == "cluster":
        asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_of_slice(own, slice_ptr, part, splits, kept, rows_left, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """own + the same columns [64, COLUMNS] of all parts, `part` elements apart, in the order of the splits but `kept`.

    A slice of a wide tile at a time, so that there are registers for several parts on their way.
    """
    offsets, inside = _places(rows_left, COLUMNS, TILE)
    total = own
    # Loads of a batch are in flight together, as many as there are registers for.
    BATCH: gl.constexpr = 128 // COLUMNS
    for i in range(0, splits, BATCH):
        for j in gl.static_range(BATCH):
            held = inside & (i + j < splits) & (i + j != kept)
            total += gl.load(slice_ptr + (i + j) * part + offsets, mask=held, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _places(rows_left, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """(where the elements of [64, COLUMNS] lie in a part, which of them are rows of x: padding takes no traffic).

    In the order of the threads that hold them, so that a warp's pairs lie side by side: by rows and columns a store
    touched eight lines instead of two (64x1280x8192 in splits on an H200: 8.0 us, 9.1 by rows and columns).
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, TILE))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))[None, :]
    offsets = (columns // 8 * 2 + rows % 16 // 8) * 256 + rows // 16 * 64 + rows % 8 * 8 + columns % 8
    return offsets, (rows < rows_left) & (columns >= 0)
