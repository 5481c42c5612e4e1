"""The steps of dense_hopper for tiles in parts (hopper_columns). Written in Gluon, which has no interpreter."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from gemmpipe.templates.hopper import after
from gemmpipe.templates.hopper_columns import multiply_slot


@gluon.jit
def sum_parts(ring, share, x_at, w_at, slot, phase, sums, blocks: gl.constexpr):
    """As dense_hopper.sum_blocks; returns (slot, phase, parts).

    x_at, w_at: descriptors of this warpgroup's rows in the first slots (hopper_columns.matrix_descriptors).
    """
    last = slot
    for i in gl.static_range(blocks):
        mbarrier.wait(ring.full.index(slot), phase)
        sums = multiply_slot(sums, ring, share, x_at, w_at, slot)
        if i > 0:
            sums = warpgroup_mma_wait(1, deps=sums)
            mbarrier.arrive(ring.empty.index(last), count=1)
        last = slot
        slot, phase = after(slot, phase, ring.x.shape[0])
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(ring.empty.index(last), count=1)
    return slot, phase, sums


@gluon.jit
def parts_of_piece(ring, share, x_at, w_at, slot, phase, sums, blocks):
    """As dense_hopper.sum_of_piece; x_at and w_at as sum_parts has them."""
    for _ in range(blocks // 4):
        slot, phase, sums = sum_parts(ring, share, x_at, w_at, slot, phase, sums, 4)
    for _ in range(blocks % 4):
        slot, phase, sums = sum_parts(ring, share, x_at, w_at, slot, phase, sums, 1)
    return slot, phase, sums
