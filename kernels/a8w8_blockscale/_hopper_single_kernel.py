"""The block-scaled product on Hopper in tiles of 64 rows, which one warpgroup multiplies at its own pace.

As _hopper_kernel.py with one warpgroup: the loop over K is that of own_pace.py with two products in flight, in which
warps wait for slots and release them by themselves, and one thread initialises the barriers at once, or with
EARLY_COPIES the loader those that its copies arrive at. x's scales come with the slots. Programs are persistent, and K
may be split. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gemmpipe.kernels.a8w8_blockscale._hopper_waves_kernel import scales_of_columns
from gemmpipe.templates.hopper.epilogue import EpilogueOperands, cluster_arrive, store_accumulators
from gemmpipe.templates.hopper.own_pace import multiply_at_own_pace
from gemmpipe.templates.hopper.own_pace_loader import loader_warp
from gemmpipe.templates.hopper.own_pace_memory import allocate, first_row_of_w, init_warp
from gemmpipe.templates.hopper.pipeline import Ring, gdc_wait
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.tile_scheduler import TileSchedule, tile_coord, work_tile_count
from gemmpipe.templates.hopper.waves import wave_partition
from gemmpipe.templates.hopper.wgmma_any_n import matrix_descriptor

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.jit
def single_warpgroup(
    wg, output, w_scale_ptr, w_scale_stride, ring, work, SCALE_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The math warpgroup: all rows and columns of a tile."""
    slot = 0
    phase = 0
    x_at = matrix_descriptor(0)
    w_at = matrix_descriptor(first_row_of_w(wg.BLOCK_SIZE_M, STAGES))
    mbarrier.wait(ring.ready, 0)
    gdc_wait()
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        coord = tile_coord(work, work_id, wg.BLOCK_SIZE_M, wg.BLOCK_SIZE_N, 0, 0, False, True)
        of = scales_of_columns(w_scale_ptr, w_scale_stride, coord.column, work, SCALE_BLOCK)
        slot, phase, sums = multiply_at_own_pace(
            wg, x_at, w_at, slot, phase, coord.end - coord.begin, of.low_ptr + coord.begin, of.high_ptr + coord.begin,
            of.edge, None, None, STAGES, SCALE_BLOCK, True,
        )  # fmt: skip
        store_accumulators(sums, wg, output, ring.stage, work, work_id, coord, SPLIT_K, "none")
    tma.store_wait(0)


@gluon.jit
def blockscale_single(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr, READING: gl.constexpr, EARLY_COPIES: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised.

    EARLY_COPIES: as in own_pace_loader.loader_warp, which then initialises some of the barriers.
    """
    x_ring, w_ring, scale_ring, full, empty, _, _, check = allocate(x, 64, BLOCK_SIZE_N, STAGES, False)
    stage = gl.allocate_shared_memory(out.dtype, [BUFFERS, 64, out.block_type.shape[1]], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=2 if EARLY_COPIES else 1)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # for a loader that does not copy scales
    tiles_m = gl.cdiv(M, 64)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    parts = None if SPLIT_K == "none" else splits
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, parts)
    output = EpilogueOperands(out, None, None, None)
    if READING == "copied":
        gl.warp_specialize([
            (single_warpgroup,
             (wave_partition(0, 64, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, SCALE_BLOCK,
              STAGES, SPLIT_K)),
            (loader_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, STAGES, SPLIT_K, EARLY_COPIES, 1)),
            (init_warp, (ring, check, 64, STAGES, SPLIT_K, 1, not EARLY_COPIES)),
            (cluster_arrive, (SPLIT_K,)),
        ], [1, 1, 2], [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (single_warpgroup,
             (wave_partition(0, 64, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, SCALE_BLOCK,
              STAGES, SPLIT_K)),
            (loader_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, STAGES, SPLIT_K, EARLY_COPIES, 2)),
            (init_warp, (ring, check, 64, STAGES, SPLIT_K, 2, not EARLY_COPIES)),
            (scale_producer_warps,
             (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, READING == "fours", SPLIT_K, True)),
        ], [1, 1, 2], [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
