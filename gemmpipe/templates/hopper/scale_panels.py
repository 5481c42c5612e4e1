"""Row-major scales of x in panels: one warp copies the scales of a tile's rows and four K blocks at a time.

A row's scales of four K blocks are 16 bytes, if K has a multiple of four of them. Math warpgroups that read them from
memory two K blocks ahead waited for them, presumably because a load comes back behind the copies of x and w that were
started before it. Panels are copied four K blocks ahead, whatever the number of slots; not by TMA, with which most
narrow tiles are slower, by up to 7 % (docs/results/kernel_experiments.md).

The protocol, for each panel, in turn:

1. The panel warp waits for `empty`, on which all eight math warps arrive during the product of the panel's last K
   block, when they have started to read its scales; shared memory serves a warp's read before its arrival. The first
   use of each panel does not wait.
2. All its threads start copies of 16 bytes and an arrival on `full` that follows them; such an arrival adds one to what
   the phase still waits for. Then they synchronise, and one of them arrives itself, the one arrival that `full` counts.
3. A math warp tests `full` while the product before the panel's first K block runs, at the first one before it begins
   the tile (own_pace.py).

All roles go through the same work tiles, and a tile has whole panels. Rows beyond M have the scales of the last row;
what is computed with them is not stored. Written in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import copy_to_shared, cta_barrier
from gemmpipe.templates.hopper.pipeline import advance, gdc_wait
from gemmpipe.templates.hopper.tile_scheduler import tile_coord, work_tile_count


@gluon.constexpr_function
def scale_panels():
    """Panels of a program: a power of two. Four are slower on average (docs/results/kernel_experiments.md)."""
    return 2


@gluon.jit
def panel_warp(scales, row_stride, ring, panel_bars, work, BLOCK_SIZE_N: gl.constexpr, SPLIT_K: gl.constexpr):
    """The panel warp. scales: a pointer to the scale of row 0, K block 0; row_stride: in fours.

    panel_bars: barriers, of which the last ones are `full` and then `empty` of the panels.
    """
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    PANELS: gl.constexpr = scale_panels()
    FIRST: gl.constexpr = ring.scales.shape[0] - PANELS
    BARRIERS: gl.constexpr = panel_bars.shape[0]
    panel = 0
    phase = 1
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        coord = tile_coord(work, work_id, BLOCK_SIZE_M, BLOCK_SIZE_N, 0, 0, SPLIT_K == "halves", True)
        mbarrier.wait(ring.ready, 0)
        row = gdc_wait(coord.row)  # the previous kernel may have written the scales
        for k in range(coord.begin, coord.end, 4):
            mbarrier.wait(panel_bars.index(BARRIERS - PANELS + panel), phase)
            full = panel_bars.index(BARRIERS - 2 * PANELS + panel)
            copy_panel(scales, row_stride, ring.scales.index(FIRST + panel), row, k, work.M, full)
            cta_barrier()  # after the other threads' additional arrivals
            mbarrier.arrive(full, count=1)
            panel, phase = advance(panel, phase, PANELS)
    cluster_arrive(SPLIT_K)


@gluon.jit
def copy_panel(scales, row_stride, panel, row, k, M, bar):
    """Start the copy of scales [rows, 4] of x's rows from `row` on, K blocks from k on, by the threads of a warp.

    Until then `bar` has one pending arrival more for each thread. k: a multiple of four. Rows beyond M have the scales
    of the last.
    """
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    # Computed for each panel, not once a tile, and within it in 32 bits: the warp has 24 registers.
    last: gl.constexpr = "sub.s32 $0, $1, $2;"
    inside = gl.inline_asm_elementwise(last, "=r,r,r", [M - 1, row], dtype=gl.int32, is_pure=False, pack=1)
    first = scales + (row.to(gl.int64) * row_stride * 4 + k // 4 * 4)
    rows = gl.minimum(gl.arange(0, panel.shape[0], gl.SliceLayout(1, FOUR)), inside)
    places = (rows * (row_stride * 4)).expand_dims(1)
    copy_to_shared(panel, first + (places + gl.arange(0, 4, gl.SliceLayout(0, FOUR)).expand_dims(0)))
    async_copy.mbarrier_arrive(bar)
