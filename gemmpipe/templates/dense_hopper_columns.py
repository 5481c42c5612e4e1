"""The steps of dense_hopper for tiles in parts (hopper_columns). Written in Gluon, which has no interpreter."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from gemmpipe.templates.hopper import after, scaled, store_tile
from gemmpipe.templates.hopper_columns import multiply_parts
from gemmpipe.templates.hopper_splits import share_of_sum, store_part, sum_of_slice


@gluon.jit
def sum_parts(
    sums, x_at, w_at, full, empty, slot, phase, blocks: gl.constexpr, TILE: gl.constexpr, COLUMNS: gl.constexpr,
    ELEMENT: gl.constexpr, X_ROWS: gl.constexpr, W_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As dense_hopper.sum_blocks; returns (slot, phase, parts).

    x_at, w_at: descriptors of this warpgroup's rows in the first slots, which are X_ROWS and W_ROWS apart.
    """
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(full.index(slot), phase)
        sums = multiply_parts(sums, x_at + slot * X_ROWS * 8, w_at + slot * W_ROWS * 8, TILE, COLUMNS, ELEMENT)
        if i > 0:
            sums = warpgroup_mma_wait(1, deps=sums)
            mbarrier.arrive(empty.index(last), count=1)
        last = slot
        slot, phase = after(slot, phase, STAGES)
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(empty.index(last), count=1)
    return slot, phase, sums


@gluon.jit
def parts_of_piece(
    sums, x_at, w_at, full, empty, slot, phase, blocks, TILE: gl.constexpr, COLUMNS: gl.constexpr,
    ELEMENT: gl.constexpr, X_ROWS: gl.constexpr, W_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As dense_hopper.sum_of_piece; x_at to W_ROWS as sum_parts has them."""
    for _ in range(blocks // 4):
        slot, phase, sums = sum_parts(
            sums, x_at, w_at, full, empty, slot, phase, 4, TILE, COLUMNS, ELEMENT, X_ROWS, W_ROWS, STAGES
        )
    for _ in range(blocks % 4):
        slot, phase, sums = sum_parts(
            sums, x_at, w_at, full, empty, slot, phase, 1, TILE, COLUMNS, ELEMENT, X_ROWS, W_ROWS, STAGES
        )
    return slot, phase, sums


@gluon.jit
def end_split_of_parts(
    sums, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, counter_ptr, split, splits, row, column, M, N,
    COLUMNS: gl.constexpr, TILE: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """As dense_hopper.end_split; the slices that are shared out are the parts of the tile, in a cluster in turn.

    There a split keeps the parts that it adds up in registers; scales may be None where SCALES is `none`.
    """
    WIDTH: gl.constexpr = out.block_type.shape[1]
    PARTS: gl.constexpr = COLUMNS // WIDTH
    owner = 0
    for j in gl.static_range(PARTS):
        rows = gl.where(owner == split, 0, M - row) if SPLIT_K == "cluster" else M - row
        to = parts_ptr + (split * PARTS + j) * 64 * WIDTH
        store_part(sums[j].to(gl.float32), to, -1, rows, WIDTH, WIDTH, TILE)
        owner = next_owner(owner, splits)
    first, step = share_of_sum(counter_ptr, split, splits, PARTS, SPLIT_K)
    if SPLIT_K == "cluster":
        owner = 0
        for j in gl.static_range(PARTS):
            if owner == split:
                finish_part(
                    sums[j].to(gl.float32), split, j, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, splits,
                    row, column, M, N, COLUMNS, TILE, SCALES, BIAS,
                )  # fmt: skip
            owner = next_owner(owner, splits)
    else:
        none = gl.zeros([64, WIDTH], gl.float32, TILE)
        for j in range(first, PARTS, step):
            finish_part(
                none, -1, j, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, splits,
                row, column, M, N, COLUMNS, TILE, SCALES, BIAS,
            )  # fmt: skip


@gluon.jit
def next_owner(owner, splits):
    """The split of a cluster that adds up the next part."""
    return gl.where(owner + 1 == splits, 0, owner + 1)


@gluon.jit
def finish_part(
    own, kept, j, out, stage, bias_ptr, x_scale_ptr, w_scale_ptr, parts_ptr, splits, row, column, M, N,
    COLUMNS: gl.constexpr, TILE: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Add to `own` part j of all splits but `kept`, and send it on its way."""
    WIDTH: gl.constexpr = own.shape[1]
    here = column + j * WIDTH
    part = sum_of_slice(own, parts_ptr + j * 64 * WIDTH, 64 * COLUMNS, splits, kept, M - row, WIDTH, TILE)
    part = scaled(part, bias_ptr, x_scale_ptr, w_scale_ptr, row, here, M, N, WIDTH, TILE, SCALES, BIAS)
    store_tile(part, out, stage, row, here)
