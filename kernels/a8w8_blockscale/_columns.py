"""The steps of _warp_specialised for tiles in parts (gemmpipe/templates/hopper_columns.py).

Such a tile may hold columns of two blocks of w's scales: every part takes its own block's. Up to 96 columns have two
products beside the sums, as tiles in one part; more have one, and the warpgroups multiply in turns.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from gemmpipe.templates.hopper import after
from gemmpipe.templates.hopper_columns import multiply_parts, parts_of, zeros
from gemmpipe.templates.hopper_turns import multiply_in_turn


@gluon.constexpr_function
def takes_turns(columns):
    """Whether a warpgroup's tile of so many columns leaves no room for a second product."""
    return parts_of(columns) > 1 and columns > 96


@gluon.jit
def begin_block(
    x_at, w_at, scale_ring, full, slot, phase, TILE: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr,
    W_ROWS: gl.constexpr,
):  # fmt: skip
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    x_at, w_at: descriptors of this warpgroup's rows in the first slots (hopper_columns); ROW: its first of x's scales.
    """
    mbarrier.wait(full.index(slot), phase)
    scales = scale_ring.index(slot).slice(ROW, 64).load(gl.SliceLayout(1, TILE))
    X_ROWS: gl.constexpr = scale_ring.shape[1]
    return scales, multiply_parts((), x_at + slot * X_ROWS * 8, w_at + slot * W_ROWS * 8, TILE, COLUMNS, "fp8e4nv")


@gluon.jit
def added(sums, product, scales, low, high, edge, PARTS: gl.constexpr):
    """sums + product, scaled; low and high: w's scales of the columns before `edge` and from there on."""
    lows, highs = scales * low, scales * high
    total = ()
    for j in gl.static_range(PARTS):
        scale = gl.where(j * product[j].shape[1] < edge, lows, highs)
        total += (sums[j] + product[j] * scale[:, None],)
    return total


@gluon.jit
def end_block(sums, flying, scales, low, high, edge, empty, slot, IN_FLIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Wait for the older product in flight, give its slot back, add it (see `added`); returns the sums."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=flying)
    mbarrier.arrive(empty.index(slot), count=1)
    total = added(sums, product, scales, low, high, edge, PARTS)
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=total)


@gluon.jit
def batch_of_blocks(
    x_at, w_at, scale_ring, full, empty, slot, phase, sums, low_ptr, high_ptr, edge, k, COUNT: gl.constexpr,
    TILE: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr, W_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add COUNT K blocks from k on, each scaled while the next is multiplied; none is left in flight.

    Their own scales are asked for as each is begun: there is a product's time until they are needed. Returns (slot,
    phase, sums).
    """
    PARTS: gl.constexpr = COLUMNS // TILE.instr_shape[1]
    scales, flying = begin_block(x_at, w_at, scale_ring, full, slot, phase, TILE, COLUMNS, ROW, W_ROWS)
    low, high = gl.load(low_ptr + k), gl.load(high_ptr + k)
    for i in gl.static_range(1, COUNT):
        next_slot, phase = after(slot, phase, STAGES)
        next_scales, newer = begin_block(x_at, w_at, scale_ring, full, next_slot, phase, TILE, COLUMNS, ROW, W_ROWS)
        next_low, next_high = gl.load(low_ptr + k + i), gl.load(high_ptr + k + i)
        sums = end_block(sums, flying, scales, low, high, edge, empty, slot, 1, PARTS)
        slot, flying, scales, low, high = next_slot, newer, next_scales, next_low, next_high
    sums = end_block(sums, flying, scales, low, high, edge, empty, slot, 0, PARTS)
    slot, phase = after(slot, phase, STAGES)
    return slot, phase, sums


@gluon.jit
def parts_of_piece(
    x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, edge, begin, end,
    TILE: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr, W_ROWS: gl.constexpr,
    STAGES: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """As _warp_specialised.sum_of_piece, of parts, in batches of BATCH; returns (slot, phase, parts)."""
    sums = zeros(COLUMNS // WIDTH, WIDTH, TILE, gl.float32)
    for batch in range((end - begin) // BATCH):
        slot, phase, sums = batch_of_blocks(
            x_at, w_at, scale_ring, full, empty, slot, phase, sums, low_ptr, high_ptr, edge, begin + batch * BATCH,
            BATCH, TILE, COLUMNS, ROW, W_ROWS, STAGES,
        )  # fmt: skip
    for k in range(end - (end - begin) % BATCH, end):
        slot, phase, sums = batch_of_blocks(
            x_at, w_at, scale_ring, full, empty, slot, phase, sums, low_ptr, high_ptr, edge, k,
            1, TILE, COLUMNS, ROW, W_ROWS, STAGES,
        )  # fmt: skip
    return slot, phase, sums


@gluon.jit
def parts_in_turns(
    x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, edge, begin, end, last,
    TILE: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr, W_ROWS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """As parts_of_piece, in turns with the other warpgroup: nothing is in flight between K blocks."""
    PARTS: gl.constexpr = COLUMNS // WIDTH
    X_ROWS: gl.constexpr = scale_ring.shape[1]
    low, high = gl.load(low_ptr + begin), gl.load(high_ptr + begin)
    sums = zeros(PARTS, WIDTH, TILE, gl.float32)
    for k in range(begin, end):
        mbarrier.wait(full.index(slot), phase)
        scales = scale_ring.index(slot).slice(ROW, 64).load(gl.SliceLayout(1, TILE))
        following = gl.minimum(k + 1, last)
        next_low, next_high = gl.load(low_ptr + following), gl.load(high_ptr + following)
        x, w = x_at + slot * X_ROWS * 8, w_at + slot * W_ROWS * 8
        product = multiply_in_turn(x, w, TILE, COLUMNS, "fp8e4nv", GROUP)
        mbarrier.arrive(empty.index(slot), count=1)
        sums = added(sums, product, scales, low, high, edge, PARTS)
        slot, phase = after(slot, phase, STAGES)
        low, high = next_low, next_high
    return slot, phase, sums
