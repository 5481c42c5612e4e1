"""The block-scaled product on Hopper in tiles of 64 rows that one warpgroup multiplies, with a loader warp.

As _hopper_kernel.py, but the warpgroup has all columns of the tile, not half of them: with eight warps a program starts
sooner and ends sooner, and there are registers for two programs of up to 64 columns per multiprocessor. Written in
Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmpipe.kernels.a8w8_blockscale._hopper_kernel import math_warpgroup
from gemmpipe.templates.hopper.epilogue import EpilogueOperands
from gemmpipe.templates.hopper.pipeline import Ring, allocate_barriers, producer_warp
from gemmpipe.templates.hopper.scales import scale_producer_warps
from gemmpipe.templates.hopper.tile_scheduler import TileSchedule, single_warpgroup_partition
from gemmpipe.templates.hopper.wgmma_any_n import allocate_rings, init_share_warp

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.jit
def blockscale_one_warpgroup(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, READING: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; arguments as in _hopper_kernel.blockscale_warp_specialised.

    REGISTERS is not used: Triton gives the warpgroup, the first role, all that the others leave.
    """
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    COPIED: gl.constexpr = READING == "copied"
    x_ring, w_ring = allocate_rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, BLOCK_SIZE_N, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = gl.allocate_shared_memory(out.dtype, [1, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = allocate_barriers(STAGES, 3 if COPIED else 1)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = TileSchedule(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = EpilogueOperands(out, None, None, None)
    never = M < 0
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # for a loader that does not copy scales
    if COPIED:
        gl.warp_specialize([
            (math_warpgroup,
             (single_warpgroup_partition(BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
              SCALE_BLOCK, SPLIT_K, BATCH)),
            (producer_warp, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 1, 1, 0, 3)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 1, 1, 1, 3)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 1, 1, 2, 3)),
        ], [1, 1, 1, 1], [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_warpgroup,
             (single_warpgroup_partition(BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
              SCALE_BLOCK, SPLIT_K, BATCH)),
            (producer_warp, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K)),
            (init_share_warp, (ring, BLOCK_SIZE_N, SPLIT_K, 2, 1, 0, 1)),
            (scale_producer_warps,
             (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, READING == "fours", SPLIT_K)),
        ], [1, 1, 2], [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
