"""A warp that stores tiles, so that no math warpgroup waits until TMA accepts its copies.

TMA takes copies in order, and an instruction that starts one waits while the loader's are before it: the warpgroup that
started them stood still for 400 to 1,600 clocks per tile (H200, docs/results/kernel_experiments.md). Here a warpgroup
stages its share of a tile, tells the store warp, and goes on to the next tile.

The protocol, for each work tile and warpgroup:

1. The warpgroup waits for `free`, stages all parts, makes them visible to TMA, and arrives on `staged`.
2. The store warp waits for `staged`, copies the parts to memory, waits until TMA has read them, and arrives on `free`.

It takes the warpgroups in order: one that is ahead has staged its share, and is not held up before the next one. All
three go through the same work tiles. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gemmpipe.templates.hopper.gluon_compat import cta_barrier, tma_store
from gemmpipe.templates.hopper.own_pace import first_handover
from gemmpipe.templates.hopper.pipeline import gdc_wait
from gemmpipe.templates.hopper.waves import tile_or_half, wave_work_count, whole_tile_place

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.jit
def staged(handover, GROUP: gl.constexpr):
    """The barrier of a warpgroup's staged share, of own_pace.allocate's."""
    FIRST: gl.constexpr = first_handover()
    return handover.index(FIRST + GROUP)


@gluon.jit
def free(handover, GROUP: gl.constexpr):
    """The barrier of a warpgroup's free buffers."""
    FIRST: gl.constexpr = first_handover()
    return handover.index(FIRST + 2 + GROUP)


@gluon.jit
def stage_share(sums, wg, stage, handover, phase):
    """Stage a warpgroup's sums, all parts, for the store warp. phase: of `free`, 1 for the first tile."""
    PARTS: gl.constexpr = stage.shape[0] // 2
    mbarrier.wait(free(handover, wg.GROUP), phase)
    for i in gl.static_range(PARTS):
        stage.index(wg.GROUP * PARTS + i).store(sums[i].to(stage.dtype))
    fence_async_shared()
    mbarrier.arrive(staged(handover, wg.GROUP), count=1)


@gluon.jit
def store_warp(first, second, out, stage, handover, work):
    """The warp: for each work tile, the share of the `first` warpgroup, then that of the `second`."""
    gdc_wait()
    phase = 0
    for work_id in range(gl.program_id(0), wave_work_count(work), work.programs):
        if work.whole is None:
            tile, half = work_id, None
        else:
            tile, half = tile_or_half(work, work_id)
        row, column = whole_tile_place(work, tile, first.BLOCK_SIZE_M, first.BLOCK_SIZE_N)
        _store_share(first, out, stage, handover, row, column, half, phase)
        _store_share(second, out, stage, handover, row, column, half, phase)
        phase ^= 1


@gluon.jit
def _store_share(wg, out, stage, handover, row, column, half, phase):
    PARTS: gl.constexpr = stage.shape[0] // 2
    mbarrier.wait(staged(handover, wg.GROUP), phase)
    if half is None:
        _store_parts(wg, out, stage, row + wg.ROW, column, 0, PARTS)
    else:
        at = row + wg.ROW + 64 * half.second
        _store_parts(wg, out, stage, at, column, 0, wg.PARTS)
        if half.waves > 1:
            _store_parts(wg, out, stage, at, column, wg.PARTS, PARTS)
    tma.store_wait(0)
    cta_barrier()  # of the warp: the copies are those of one thread
    mbarrier.arrive(free(handover, wg.GROUP), count=1)


@gluon.jit
def _store_parts(wg, out, stage, row, column, BEGIN: gl.constexpr, END: gl.constexpr):
    PARTS: gl.constexpr = stage.shape[0] // 2
    for i in gl.static_range(BEGIN, END):
        place = [row + i // wg.PARTS * 64, column + i % wg.PARTS * wg.WIDTH]
        tma_store(out, place, stage.index(wg.GROUP * PARTS + i))
