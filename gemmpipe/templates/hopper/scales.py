"""Two warps that load x's scales into the ring, for memory orders that TMA does not support.

TMA copies a tile's scales if they are M-major and every column begins at a multiple of 16 bytes
(pipeline.producer_warp, own_pace_loader.loader_warp). Row-major, a tile's scales of one K block are in as many lines as
it has rows; these warps read four K blocks at a time into registers, ahead of the slots that they are for. With
OWN_PACE and tiles of 128 rows or more whole fours come in panels instead (scale_panels.py), and these warps load what
neither TMA nor panels can. Written in Gluon, which has no interpreter.

The protocol, for each use of a slot (one K block of one work tile):

1. All math warpgroups arrive on `empty` when they have read the slot (count 2, or 1 for one; in own_pace.py all
   math warps, 8 or 4). The loader warp and the two warps here each wait for that phase on their own; waiting changes
   nothing.
2. The loader arrives on `full` by announcing its bytes, and TMA counts bytes of x and w. The two warps write the
   slot's scales, synchronise with each other, and one of their threads arrives on `full`. Its count is 2: one arrival
   of each in every phase, in any order.
3. The warpgroups wait for `full`. The arrival releases what was written before it and before the synchronisation, so
   that they see all rows.

No role can be a whole phase ahead of another: a phase of `full` needs both arrivals, and each of the two waits for the
warpgroups to have emptied the slot before it arrives again. All roles go through the same work tiles and K blocks
(tile_scheduler.tile_coord), so that every phase of every slot gets its arrivals. Scales of rows beyond M are 0 and not
read.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import cta_barrier
from gemmpipe.templates.hopper.pipeline import advance, gdc_wait
from gemmpipe.templates.hopper.tile_scheduler import tile_coord, work_tile_count


@gluon.jit
def scale_producer_warps(
    scales, row_stride, block_stride, ring, work, BLOCK_SIZE_N: gl.constexpr, FOURS: gl.constexpr,
    SPLIT_K: gl.constexpr, BRANCHING: gl.constexpr = False,
):  # fmt: skip
    """The two warps: for each work tile and K block, the scales of the tile's rows into the next empty slot.

    scales: a pointer to the scale of row 0, K block 0. FOURS: a row's scales are contiguous, four of them 16-byte
    aligned, and row_stride counts fours; else both strides count elements. BRANCHING: as in tile_coord.
    """
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [2, 1], [1, 0])
    slot = 0
    phase = 1
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        coord = tile_coord(work, work_id, BLOCK_SIZE_M, BLOCK_SIZE_N, 0, 0, SPLIT_K == "halves", BRANCHING)
        mbarrier.wait(ring.ready, 0)
        row = gdc_wait(coord.row)  # the previous kernel may have written the scales
        if FOURS:
            rows = gl.arange(0, BLOCK_SIZE_M, gl.SliceLayout(1, FOUR))
            ptrs = scales + row.to(gl.int64) * row_stride * 4 + rows * (row_stride * 4)
        else:
            rows = gl.arange(0, BLOCK_SIZE_M, ROWS)
            ptrs = scales + row.to(gl.int64) * row_stride + rows * row_stride
        inside = rows < work.M - row
        first, last = coord.begin // 4, (coord.end - 1) // 4
        four = load_four_blocks(ptrs, inside, block_stride, first * 4, FOURS, coord.begin, coord.end)
        for batch in range(first, last + 1):
            following = batch * 4 + 4
            ahead = load_four_blocks(ptrs, inside, block_stride, following, FOURS, coord.begin, coord.end)
            for i in gl.static_range(4):
                k = batch * 4 + i
                if (k >= coord.begin) & (k < coord.end):
                    mbarrier.wait(ring.empty.index(slot), phase)
                    ring.scales.index(ring.scales.shape[0] - ring.x.shape[0] + slot).store(four[i])
                    cta_barrier()
                    mbarrier.arrive(ring.full.index(slot), count=1)
                    slot, phase = advance(slot, phase, ring.x.shape[0])
            four = ahead
    cluster_arrive(SPLIT_K)


@gluon.jit
def load_four_blocks(ptrs, inside, block_stride, k, FOURS: gl.constexpr, begin, end):
    """The rows' scales of K blocks k to k + 3, one tensor each; 0 for rows not `inside` and from K block `end` on.

    ptrs: each row's scale of K block 0. FOURS: k is a multiple of 4, and the four are one load of 16 bytes.
    """
    if FOURS:
        lanes = gl.arange(0, 4, gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [2, 1], [1, 0])))
        at = ptrs.expand_dims(1) + (k + lanes).expand_dims(0)
        held = inside & (k < end)
        loaded = gl.load(at, mask=held.expand_dims(1), other=0.0)
        even, odd = loaded.reshape([loaded.shape[0], 2, 2]).split()
        zeroth, second = even.split()
        oneth, third = odd.split()
        four = (zeroth, oneth, second, third)
    else:
        four = ()
        for i in gl.static_range(4):
            held = inside & (k + i >= begin) & (k + i < end)
            at = ptrs + (k + i).to(gl.int64) * block_stride
            four += (gl.load(at, mask=held, other=0.0),)
    return four
