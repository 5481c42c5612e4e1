"""The steps of _warp_specialised for tiles in parts (gemmpipe/templates/hopper_columns.py).

Such a tile may hold columns of two blocks of w's scales: every part takes its own block's. Up to 96 columns have two
products beside the sums, as tiles in one part; more have one, and the warpgroups multiply in turns.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from gemmpipe.templates.hopper import after
from gemmpipe.templates.hopper_columns import multiply_slot, zeros
from gemmpipe.templates.hopper_share import parts_of
from gemmpipe.templates.hopper_turns import multiply_in_turn


class Scales(NamedTuple):
    """w's scales along K of a tile's columns before `edge`, and of those from there on."""

    low_ptr: gl.tensor
    high_ptr: gl.tensor
    edge: gl.tensor


@gluon.constexpr_function
def takes_turns(columns):
    """Whether a warpgroup's tile of so many columns leaves no room for a second product."""
    return parts_of(columns) > 1 and columns > 96


@gluon.jit
def begin_block(ring, share, x_at, w_at, slot, phase):
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    x_at, w_at: descriptors of this warpgroup's rows in the first slots (hopper_columns.matrix_descriptors).
    """
    mbarrier.wait(ring.full.index(slot), phase)
    scales = ring.scales.index(slot).slice(share.ROW, 64).load(gl.SliceLayout(1, share.LAYOUT))
    return scales, multiply_slot((), ring, share, x_at, w_at, slot)


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
def end_block(sums, flying, scales, low, high, edge, ring, slot, IN_FLIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Wait for the older product in flight, give its slot back, add it (see `added`); returns the sums."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=flying)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    total = added(sums, product, scales, low, high, edge, PARTS)
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=total)


@gluon.jit
def batch_of_blocks(ring, share, x_at, w_at, slot, phase, sums, w_scales, k, COUNT: gl.constexpr):
    """Add COUNT K blocks from k on, each scaled while the next is multiplied; none is left in flight.

    Their own scales are asked for as each is begun: there is a product's time until they are needed. Returns (slot,
    phase, sums).
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    edge = w_scales.edge
    scales, flying = begin_block(ring, share, x_at, w_at, slot, phase)
    low, high = gl.load(w_scales.low_ptr + k), gl.load(w_scales.high_ptr + k)
    for i in gl.static_range(1, COUNT):
        next_slot, phase = after(slot, phase, SLOTS)
        next_scales, newer = begin_block(ring, share, x_at, w_at, next_slot, phase)
        next_low, next_high = gl.load(w_scales.low_ptr + k + i), gl.load(w_scales.high_ptr + k + i)
        sums = end_block(sums, flying, scales, low, high, edge, ring, slot, 1, share.PARTS)
        slot, flying, scales, low, high = next_slot, newer, next_scales, next_low, next_high
    sums = end_block(sums, flying, scales, low, high, edge, ring, slot, 0, share.PARTS)
    slot, phase = after(slot, phase, SLOTS)
    return slot, phase, sums


@gluon.jit
def parts_of_piece(ring, share, x_at, w_at, slot, phase, w_scales, begin, end, BATCH: gl.constexpr):
    """As _warp_specialised.sum_of_piece, of parts, in batches of BATCH; returns (slot, phase, parts)."""
    sums = zeros(share, gl.float32)
    for batch in range((end - begin) // BATCH):
        k = begin + batch * BATCH
        slot, phase, sums = batch_of_blocks(ring, share, x_at, w_at, slot, phase, sums, w_scales, k, BATCH)
    for k in range(end - (end - begin) % BATCH, end):
        slot, phase, sums = batch_of_blocks(ring, share, x_at, w_at, slot, phase, sums, w_scales, k, 1)
    return slot, phase, sums


@gluon.jit
def parts_in_turns(ring, share, x_at, w_at, slot, phase, w_scales, begin, end, last):
    """As parts_of_piece, in turns with the other warpgroup: nothing is in flight between K blocks."""
    low, high = gl.load(w_scales.low_ptr + begin), gl.load(w_scales.high_ptr + begin)
    sums = zeros(share, gl.float32)
    for k in range(begin, end):
        mbarrier.wait(ring.full.index(slot), phase)
        scales = ring.scales.index(slot).slice(share.ROW, 64).load(gl.SliceLayout(1, share.LAYOUT))
        following = gl.minimum(k + 1, last)
        next_low, next_high = gl.load(w_scales.low_ptr + following), gl.load(w_scales.high_ptr + following)
        product = multiply_in_turn(ring, share, x_at, w_at, slot)
        mbarrier.arrive(ring.empty.index(slot), count=1)
        sums = added(sums, product, scales, low, high, w_scales.edge, share.PARTS)
        slot, phase = after(slot, phase, ring.x.shape[0])
        low, high = next_low, next_high
    return slot, phase, sums
