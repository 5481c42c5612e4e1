"""A tile's way out of Hopper's warp-specialised kernels: scaled, staged, copied; where K is split, added up before.

Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gemmpipe.templates.gluon_names import tma_store
from gemmpipe.templates.hopper_share import accumulator
from gemmpipe.templates.hopper_splits import kept_slice, slices_to_sum, store_part, sum_of_slice


class Output(NamedTuple):
    """Where tiles go, a tensor descriptor, and what `scaled` adds to them and multiplies them by, or None."""

    out: object
    bias_ptr: gl.tensor
    x_scale_ptr: gl.tensor
    w_scale_ptr: gl.tensor


@gluon.jit
def leave(sums, share, output, stage, work, piece, place, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """A warpgroup's sums of a piece of work on their way, by `stage`, once those of all splits are added up."""
    if SPLIT_K == "cluster" or (SPLIT_K == "last" and piece >= work.whole):
        if share.PARTS == 1:
            end_split(sums[0].to(gl.float32), share, output, stage, work, place, SPLIT_K, SCALES)
        else:
            end_split_of_parts(sums, share, output, stage, work, place, SPLIT_K, SCALES)
    else:
        for j in gl.static_range(share.PARTS):
            here = place.column + j * share.WIDTH
            part = scaled(sums[j].to(gl.float32), output, work, place.row, here, share.LAYOUT, SCALES)
            store_tile(part, output.out, stage, place.row, here)


@gluon.jit
def end_split(total, share, output, stage, work, place, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """Leave this split's part of the tile among those of the others; finish this split's share of their sum."""
    COLUMNS: gl.constexpr = share.COLUMNS
    WIDTH: gl.constexpr = output.out.block_type.shape[1]
    SLICE: gl.constexpr = accumulator(WIDTH, share.DEPTH)
    row, split, splits = place.row, place.split, work.splits
    number = (place.tile - work.whole) * 2 + share.GROUP
    parts = work.parts_ptr + number.to(gl.int64) * splits * 64 * COLUMNS
    kept = split if SPLIT_K == "cluster" else -1
    store_part(total, parts + split * 64 * COLUMNS, kept, work.M - row, WIDTH, COLUMNS, share.LAYOUT)
    own = kept_slice(total, kept, SPLIT_K, SLICE, WIDTH)
    first, step = slices_to_sum(work.counters_ptr + number, split, splits, COLUMNS // WIDTH, SPLIT_K)
    for i in range(first, COLUMNS // WIDTH, step):
        here = place.column + i * WIDTH
        part = sum_of_slice(own, parts + i * 64 * WIDTH, 64 * COLUMNS, splits, kept, work.M - row, WIDTH, SLICE)
        part = scaled(part, output, work, row, here, SLICE, SCALES)
        store_tile(part, output.out, stage, row, here)
        own, kept = gl.zeros([64, WIDTH], gl.float32, SLICE), -1


@gluon.jit
def end_split_of_parts(sums, share, output, stage, work, place, SPLIT_K: gl.constexpr, SCALES: gl.constexpr):
    """As end_split; the slices that are shared out are the parts of the tile, in a cluster in turn.

    There a split keeps the parts that it adds up in registers.
    """
    WIDTH: gl.constexpr = share.WIDTH
    PARTS: gl.constexpr = share.PARTS
    row, split, splits = place.row, place.split, work.splits
    number = (place.tile - work.whole) * 2 + share.GROUP
    parts = work.parts_ptr + number.to(gl.int64) * splits * 64 * share.COLUMNS
    owner = 0
    for j in gl.static_range(PARTS):
        rows = gl.where(owner == split, 0, work.M - row) if SPLIT_K == "cluster" else work.M - row
        to = parts + (split * PARTS + j) * 64 * WIDTH
        store_part(sums[j].to(gl.float32), to, -1, rows, WIDTH, WIDTH, share.LAYOUT)
        owner = next_owner(owner, splits)
    first, step = slices_to_sum(work.counters_ptr + number, split, splits, PARTS, SPLIT_K)
    if SPLIT_K == "cluster":
        owner = 0
        for j in gl.static_range(PARTS):
            if owner == split:
                finish_part(sums[j].to(gl.float32), split, j, share, output, stage, work, place, parts, SCALES)
            owner = next_owner(owner, splits)
    else:
        none = gl.zeros([64, WIDTH], gl.float32, share.LAYOUT)
        for j in range(first, PARTS, step):
            finish_part(none, -1, j, share, output, stage, work, place, parts, SCALES)


@gluon.jit
def next_owner(owner, splits):
    """The split of a cluster that adds up the next part."""
    return gl.where(owner + 1 == splits, 0, owner + 1)


@gluon.jit
def finish_part(own, kept, j, share, output, stage, work, place, parts_ptr, SCALES: gl.constexpr):
    """Add to `own` part j of all splits but `kept`, and send it on its way."""
    WIDTH: gl.constexpr = share.WIDTH
    row, here = place.row, place.column + j * WIDTH
    part_ptr = parts_ptr + j * 64 * WIDTH
    part = sum_of_slice(own, part_ptr, 64 * share.COLUMNS, work.splits, kept, work.M - row, WIDTH, share.LAYOUT)
    part = scaled(part, output, work, row, here, share.LAYOUT, SCALES)
    store_tile(part, output.out, stage, row, here)


@gluon.jit
def scaled(total, output, work, row, column, LAYOUT: gl.constexpr, SCALES: gl.constexpr):
    """total * x_scale * w_scale + bias of [64, columns] from this place on; SCALES: `none`, `tensor`, `row`."""
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
