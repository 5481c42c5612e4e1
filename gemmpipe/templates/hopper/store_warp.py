"""Warps that store tiles, so that no math warpgroup waits until TMA accepts its copies.

A warpgroup that starts the copies of its output spends 400 to 1,600 clocks per tile on it, presumably until TMA has
accepted the loader's earlier copies (H200, docs/results/kernel_experiments.md). Here a warpgroup stages its share of a
tile, hands it over to a store warp, and goes on to the next tile. It copies its last share itself, as no tile follows.

The protocol, for each work tile but a program's last, and each warpgroup:

1. The warpgroup waits for `free`, stages all parts, makes them visible to TMA, and arrives on `staged`.
2. The store warp waits for `staged`, copies the parts to memory, waits until TMA has read them, and arrives on `free`.

One store warp for both warpgroups takes their shares in turn: a warpgroup that is ahead waits for the other when it is
about to stage its next share. All go through the same work tiles. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gemmpipe.templates.hopper.gluon_compat import cta_barrier, tma_store
from gemmpipe.templates.hopper.pipeline import gdc_wait
from gemmpipe.templates.hopper.waves import tile_or_half, wave_count, wave_work_count, whole_tile_place

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.jit
def _staged(handover, wg):
    # The last four: own_pace_memory.py has them in a line with others.
    return handover.index(handover.shape[0] - 4 + wg.GROUP)


@gluon.jit
def _free(handover, wg):
    return handover.index(handover.shape[0] - 2 + wg.GROUP)


@gluon.constexpr_function
def stages_all(wg, stage):
    """Whether all parts of a warpgroup's share have buffers, so that a store warp can copy them."""
    return stage.shape[0] // 2 == wave_count(wg.BLOCK_SIZE_M) * wg.PARTS


@gluon.jit
def stage_share(sums, wg, out, stage, handover, phase, row, column, half, work, work_id):
    """Stage a warpgroup's share, which begins at (row, column), and hand it over; a program's last is copied at once.

    phase: of `free`, 1 for the first tile. half: a waves.Half, whose single wave has the first sums, or None.
    """
    PARTS: gl.constexpr = stage.shape[0] // 2
    mbarrier.wait(_free(handover, wg), phase)
    for i in gl.static_range(PARTS):
        stage.index(wg.GROUP * PARTS + i).store(sums[i].to(stage.dtype))
    fence_async_shared()
    if work_id + work.programs >= wave_work_count(work):
        copy_share(wg, out, stage, row, column, half)
    else:
        mbarrier.arrive(_staged(handover, wg), count=1)


@gluon.jit
def copy_share(wg, out, stage, row, column, half):
    """Start the copies of a staged share."""
    PARTS: gl.constexpr = stage.shape[0] // 2
    if half is None:
        _copy_parts(wg, out, stage, row, column, 0, PARTS)
    else:
        _copy_parts(wg, out, stage, row, column, 0, wg.PARTS)
        if half.waves > 1:
            _copy_parts(wg, out, stage, row, column, wg.PARTS, PARTS)


@gluon.jit
def _copy_parts(wg, out, stage, row, column, BEGIN: gl.constexpr, END: gl.constexpr):
    PARTS: gl.constexpr = stage.shape[0] // 2
    for i in gl.static_range(BEGIN, END):
        place = [row + i // wg.PARTS * 64, column + i % wg.PARTS * wg.WIDTH]
        tma_store(out, place, stage.index(wg.GROUP * PARTS + i))


@gluon.jit
def store_warp(first, second, out, stage, handover, work):
    """A store warp: the shares of warpgroup `first`, then `second` (or None), of each tile but the last; WholeTiles."""
    gdc_wait()
    phase = 0
    for work_id in range(gl.program_id(0), wave_work_count(work) - work.programs, work.programs):
        if work.whole is None:
            tile, half = work_id, None
        else:
            tile, half = tile_or_half(work, work_id)
        row, column = whole_tile_place(work, tile, first.BLOCK_SIZE_M, first.BLOCK_SIZE_N)
        if half is not None:
            row += 64 * half.second
        _store_share(first, out, stage, handover, row, column, half, phase)
        if second is not None:
            _store_share(second, out, stage, handover, row, column, half, phase)
        phase ^= 1


@gluon.jit
def _store_share(wg, out, stage, handover, row, column, half, phase):
    mbarrier.wait(_staged(handover, wg), phase)
    copy_share(wg, out, stage, row + wg.ROW, column + wg.COLUMN, half)
    tma.store_wait(0)
    cta_barrier()  # the copies are those of one thread
    mbarrier.arrive(_free(handover, wg), count=1)
