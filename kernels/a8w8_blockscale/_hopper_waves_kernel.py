"""The block-scaled product on Hopper with each warpgroup at its own pace, in tiles of 128 and 256 rows.

As _hopper_kernel.py; a warpgroup has one or two waves of 64 rows (gemmpipe/templates/hopper/waves.py), and multiplies
by the loop of gemmpipe/templates/hopper/own_pace.py. Row-major scales of x, where four are contiguous, come in panels
(gemmpipe/templates/hopper/scale_panels.py). Programs are persistent. Written in Gluon, which has no interpreter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gemmpipe.kernels.a8w8_blockscale._hopper_kernel import WeightScales
from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.own_pace import multiply_at_own_pace
from gemmpipe.templates.hopper.own_pace_loader import loader_warp
from gemmpipe.templates.hopper.own_pace_memory import allocate, first_row_of_w, init_warp
from gemmpipe.templates.hopper.pipeline import Ring, gdc_wait
from gemmpipe.templates.hopper.scale_panels import panel_warp
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.store_warp import stage_share, stages_all, store_warp
from gemmpipe.templates.hopper.tile_scheduler import TileSchedule
from gemmpipe.templates.hopper.waves import (
    WholeTiles,
    store_waves,
    tile_or_half,
    wave_count,
    wave_partition,
    wave_work_count,
    whole_tile_place,
)
from gemmpipe.templates.hopper.wgmma_any_n import matrix_descriptor

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


class Places(NamedTuple):
    """A program's shared memory: the ring, with x's scales and without, and what `allocate` returns besides."""

    ring: Ring
    bare: Ring
    handover: gl.shared_memory_descriptor
    panel_bars: gl.shared_memory_descriptor
    check: gl.shared_memory_descriptor


@gluon.jit
def scales_of_columns(w_scale_ptr, w_scale_stride, column, work, SCALE_BLOCK: gl.constexpr):
    """The WeightScales of a tile's columns from `column` on."""
    block = gl.minimum(column, work.N - 1) // SCALE_BLOCK
    low_ptr = w_scale_ptr + block * w_scale_stride
    high_ptr = w_scale_ptr + gl.minimum(block + 1, (work.N - 1) // SCALE_BLOCK) * w_scale_stride
    return WeightScales(low_ptr, high_ptr, (block + 1) * SCALE_BLOCK - column)


@gluon.jit
def math_warpgroup(
    wg, out, w_scale_ptr, w_scale_stride, ring, handover, work, SCALE_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    IN_PANELS: gl.constexpr, TWO_IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: all columns of its waves. IN_PANELS: x's scales are in panels."""
    slot = 0
    phase = 0
    panel = 0
    turn = 1
    x_at = matrix_descriptor(wg.ROW)
    w_at = matrix_descriptor(first_row_of_w(wg.BLOCK_SIZE_M, STAGES))
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    for work_id in range(gl.program_id(0), wave_work_count(work), work.programs):
        if work.whole is None:
            tile, half = work_id, None
        else:
            tile, half = tile_or_half(work, work_id)
        row, column = whole_tile_place(work, tile, wg.BLOCK_SIZE_M, wg.BLOCK_SIZE_N)
        of = scales_of_columns(w_scale_ptr, w_scale_stride, column, work, SCALE_BLOCK)
        slot, phase, sums = multiply_at_own_pace(
            wg, x_at, w_at, slot, phase, work.blocks, of.low_ptr, of.high_ptr, of.edge, panel if IN_PANELS else None,
            half, STAGES, SCALE_BLOCK, TWO_IN_FLIGHT,
        )  # fmt: skip
        if IN_PANELS:
            panel += work.blocks // 4
        first = row + wg.ROW
        if half is not None:
            first += 64 * half.second
        if stages_all(wg, ring.stage):
            stage_share(sums, wg, out, ring.stage, handover, turn, first, column, half, work, work_id)
            turn ^= 1
        else:
            store_waves(sums, wg, out, ring.stage, first, column, half, wave_count(wg.BLOCK_SIZE_M))
    tma.store_wait(0)


@gluon.jit
def init_and_store_warp(
    first, second, out, handover, work, ring, check, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    FILLERS: gl.constexpr,
):  # fmt: skip
    """Initialises the barriers, then stores the shares of warpgroup `first`, and of `second` unless it is None."""
    init_warp(ring, check, first.BLOCK_SIZE_M, STAGES, SPLIT_K, FILLERS)
    if stages_all(first, ring.stage):
        store_warp(first, second, out, ring.stage, handover, work)


@gluon.jit
def second_store_warp(second, out, handover, work, ring, SPLIT_K: gl.constexpr):
    """The store warp for the shares of warpgroup `second`."""
    if stages_all(second, ring.stage):
        mbarrier.wait(ring.ready, 0)
        store_warp(second, None, out, ring.stage, handover, work)
    cluster_arrive(SPLIT_K)


@gluon.jit
def run_with_scale_warps(
    x, w, out, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, places, work, own,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, TWO_IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """All warps: two of them load x's scales, one stores for both warpgroups."""
    gl.warp_specialize([
        (math_warpgroup,
         (wave_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, w_scale_ptr, w_scale_stride, places.ring,
          places.handover, own, SCALE_BLOCK, STAGES, False, TWO_IN_FLIGHT)),
        (math_warpgroup,
         (wave_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, w_scale_ptr, w_scale_stride, places.ring,
          places.handover, own, SCALE_BLOCK, STAGES, False, TWO_IN_FLIGHT)),
        (loader_warp, (x, w, None, 0, places.bare, work, BLOCK_SIZE_N, STAGES, SPLIT_K)),
        (init_and_store_warp,
         (wave_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), wave_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out,
          places.handover, own, places.ring, places.check, STAGES, SPLIT_K, 2)),
        (scale_producer_warps,
         (scales, scale_row_stride, scale_stride, places.ring, work, BLOCK_SIZE_N, False, SPLIT_K, True)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


@gluon.jit
def run_with_store_warps(
    x, w, out, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, places, work, own,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr, IN_PANELS: gl.constexpr,
    TWO_IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """All warps: one for each warpgroup stores, and one copies x's scales if they are in panels."""
    gl.warp_specialize([
        (math_warpgroup,
         (wave_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, w_scale_ptr, w_scale_stride, places.ring,
          places.handover, own, SCALE_BLOCK, STAGES, IN_PANELS, TWO_IN_FLIGHT)),
        (math_warpgroup,
         (wave_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, w_scale_ptr, w_scale_stride, places.ring,
          places.handover, own, SCALE_BLOCK, STAGES, IN_PANELS, TWO_IN_FLIGHT)),
        (loader_warp, (x, w, None, 0, places.bare, work, BLOCK_SIZE_N, STAGES, SPLIT_K)) if IN_PANELS else
        (loader_warp, (x, w, scales, scale_stride, places.ring, work, BLOCK_SIZE_N, STAGES, SPLIT_K)),
        (init_and_store_warp,
         (wave_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), None, out, places.handover, own, places.ring,
          places.check, STAGES, SPLIT_K, 1)),
        (second_store_warp,
         (wave_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), out, places.handover, own, places.ring, SPLIT_K)),
        (panel_warp, (scales, scale_row_stride, places.ring, places.panel_bars, work, BLOCK_SIZE_N, SPLIT_K))
        if IN_PANELS else (cluster_arrive, (SPLIT_K,)),
    ], [4, 1, 1, 1, 1],
       [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


@gluon.jit
def blockscale_waves(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr, READING: gl.constexpr, TWO_IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised.

    READING: `panels` instead of `fours`. BUFFERS: a warpgroup's for the output. SPLIT_K: `none`, or `halves`: each tile
    after `whole` ones is two work tiles of one wave (`splits` is two). TWO_IN_FLIGHT: a warpgroup's products, where
    registers hold them (own_pace.two_fit).
    """
    IN_PANELS: gl.constexpr = READING == "panels"
    x_ring, w_ring, scale_ring, full, empty, handover, panel_bars, check = allocate(
        x, BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, IN_PANELS
    )
    stage = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS, 64, out.block_type.shape[1]], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    halves = splits if SPLIT_K == "halves" else None
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, halves)
    own = WholeTiles(M, N, tiles_m, tiles_n, blocks, programs, group_m, whole if SPLIT_K == "halves" else None)
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # for a loader that does not copy scales
    places = Places(ring, bare, handover, panel_bars, check)
    if READING == "strided":
        run_with_scale_warps(
            x, w, out, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, places, work, own,
            BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SPLIT_K, REGISTERS, LOADER_REGISTERS, SCALE_BLOCK,
            TWO_IN_FLIGHT,
        )  # fmt: skip
    else:
        run_with_store_warps(
            x, w, out, scales, w_scale_ptr, w_scale_stride, scale_stride, scale_row_stride, places, work, own,
            BLOCK_SIZE_M, BLOCK_SIZE_N, STAGES, SPLIT_K, REGISTERS, LOADER_REGISTERS, SCALE_BLOCK, IN_PANELS,
            TWO_IN_FLIGHT,
        )  # fmt: skip
