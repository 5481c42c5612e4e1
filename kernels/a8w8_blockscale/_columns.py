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
def four_scales(w_scales, k, last):
    """The weight's scales of K blocks k to k + 3; past the last one its own, which nothing is multiplied by."""
    return (
        gl.load(w_scales + gl.minimum(k, last)),
        gl.load(w_scales + gl.minimum(k + 1, last)),
        gl.load(w_scales + gl.minimum(k + 2, last)),
        gl.load(w_scales + gl.minimum(k + 3, last)),
    )


@gluon.jit
def parts_of_piece(
    x_at, w_at, scale_ring, full, empty, slot, phase, low_ptr, high_ptr, edge, begin, end, last,
    TILE: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr, W_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As _warp_specialised.sum_of_piece, of parts; returns (slot, phase, parts)."""
    PARTS: gl.constexpr = COLUMNS // WIDTH
    l0, l1, l2, l3 = four_scales(low_ptr, begin, last)
    h0, h1, h2, h3 = four_scales(high_ptr, begin, last)
    sums = zeros(PARTS, WIDTH, TILE, gl.float32)
    for batch in range((end - begin) // 4):
        slot0 = slot
        s0, f0 = begin_block(x_at, w_at, scale_ring, full, slot0, phase, TILE, COLUMNS, ROW, W_ROWS)
        m0, m1, m2, m3 = four_scales(low_ptr, begin + batch * 4 + 4, last)
        n0, n1, n2, n3 = four_scales(high_ptr, begin + batch * 4 + 4, last)
        slot1, phase = after(slot0, phase, STAGES)
        s1, f1 = begin_block(x_at, w_at, scale_ring, full, slot1, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f0, s0, l0, h0, edge, empty, slot0, 1, PARTS)
        slot0, phase = after(slot1, phase, STAGES)
        s0, f0 = begin_block(x_at, w_at, scale_ring, full, slot0, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f1, s1, l1, h1, edge, empty, slot1, 1, PARTS)
        slot1, phase = after(slot0, phase, STAGES)
        s1, f1 = begin_block(x_at, w_at, scale_ring, full, slot1, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f0, s0, l2, h2, edge, empty, slot0, 1, PARTS)
        sums = end_block(sums, f1, s1, l3, h3, edge, empty, slot1, 0, PARTS)
        slot, phase = after(slot1, phase, STAGES)
        l0, l1, l2, l3, h0, h1, h2, h3 = m0, m1, m2, m3, n0, n1, n2, n3
    for i in range((end - begin) % 4):
        low = gl.where(i == 0, l0, gl.where(i == 1, l1, l2))  # they came with the last batch
        high = gl.where(i == 0, h0, gl.where(i == 1, h1, h2))
        s0, f0 = begin_block(x_at, w_at, scale_ring, full, slot, phase, TILE, COLUMNS, ROW, W_ROWS)
        sums = end_block(sums, f0, s0, low, high, edge, empty, slot, 0, PARTS)
        slot, phase = after(slot, phase, STAGES)
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
