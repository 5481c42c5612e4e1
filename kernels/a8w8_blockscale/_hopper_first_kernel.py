"""The block-scaled product on Hopper, with the first copies started before the warps take their roles.

As _hopper_kernel.py, with the start of templates/hopper/prologue.py. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.kernels.a8w8_blockscale._hopper_kernel import math_warpgroup
from gemmpipe.templates.hopper.epilogue import EpilogueOperands, cluster_arrive
from gemmpipe.templates.hopper.pipeline import Ring, allocate_barriers, prefetch_descriptors
from gemmpipe.templates.hopper.prologue import init_later_slots_warp, later_producer_warp, start_first_copies
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.tile_scheduler import TileSchedule, warpgroup_partition
from gemmpipe.templates.hopper.wgmma_any_n import allocate_rings

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def descriptor_ranks(x, w, out, copied):
    """The ranks of the descriptors in the order of the parameters; x's scales are the fourth if TMA copies them."""
    return [len(each.block_type.shape) for each in (x, w, out)] + ([1] if copied else [])


@gluon.jit
def blockscale_first_copies(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, READING: gl.constexpr, FIRST_SLOTS: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised.

    FIRST_SLOTS: slots that are filled before the warps take their roles. PREFETCH: the descriptors are fetched first.
    """
    if PREFETCH:
        RANKS: gl.constexpr = descriptor_ranks(x, w, out, READING == "copied")
        prefetch_descriptors("blockscale_first_copies", RANKS)
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    x_ring, w_ring = allocate_rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = EpilogueOperands(out, None, None, None)
    never = M < 0
    COPIED: gl.constexpr = READING == "copied"
    FOURS: gl.constexpr = READING == "fours"
    FILLERS: gl.constexpr = 1 if COPIED else 2
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # for a loader that does not copy scales
    if COPIED:
        start_first_copies(x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, FILLERS, FIRST_SLOTS)
    else:
        start_first_copies(x, w, None, 0, bare, work, BLOCK_SIZE_N, FILLERS, FIRST_SLOTS)
    gl.warp_specialize([
        (math_warpgroup,
         (warpgroup_partition(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
          SCALE_BLOCK, SPLIT_K, BATCH)),
        (math_warpgroup,
         (warpgroup_partition(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
          SCALE_BLOCK, SPLIT_K, BATCH)),
        (later_producer_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K, FIRST_SLOTS))
        if COPIED else (later_producer_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K, FIRST_SLOTS)),
        (init_later_slots_warp, (ring, SPLIT_K, FILLERS, FIRST_SLOTS)),
        (cluster_arrive, (SPLIT_K,)) if COPIED else
        (scale_producer_warps, (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, FOURS, SPLIT_K)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
