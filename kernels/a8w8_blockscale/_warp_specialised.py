"""The block-scaled product on Hopper, warp-specialised: a loader warp fills a ring, two warpgroups multiply.

The scaling of one K block by the CUDA cores runs under the matrix instructions of the next, into a second
temporary accumulator, or of the other warpgroup's where there is room for one alone; programs are persistent. Written
in Gluon, which has no interpreter.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gemmpipe.kernels.a8w8_blockscale._columns import Scales, parts_in_turns, parts_of_piece, takes_turns
from gemmpipe.templates.hopper import Ring, after, barriers, load_ring, part_of_w, prepare, wait_for_previous
from gemmpipe.templates.hopper_columns import matrix_descriptors, prepare_rings, rings
from gemmpipe.templates.hopper_order import Work, pieces_of, place_of
from gemmpipe.templates.hopper_output import Output, leave
from gemmpipe.templates.hopper_scales import load_scales
from gemmpipe.templates.hopper_share import parts_of, share_of
from gemmpipe.templates.hopper_splits import come_along
from gemmpipe.templates.hopper_turns import begin_turns, end_turns


@gluon.jit
def begin_block(ring, share, slot, phase, product, never):
    """Wait for a slot and start its product; returns x's scales and the product in flight.

    `never` is false, but the compiler cannot know: a literal False would let it move the scaling below the next
    matrix instruction, into registers that it does not have.
    """
    mbarrier.wait(ring.full.index(slot), phase)
    scales = ring.scales.index(slot).slice(share.ROW, 64).load(gl.SliceLayout(1, share.LAYOUT))
    x = ring.x.index(slot).slice(share.ROW, 64)
    w = part_of_w(ring, share, slot)
    return scales, warpgroup_mma(x, w, product, use_acc=never, is_async=True)


@gluon.jit
def end_block(acc, flying, scales, w_scale, ring, slot, IN_FLIGHT: gl.constexpr):
    """Wait for the older product in flight, give its slot back, add it scaled; returns (sum, the product's place)."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=[flying])
    mbarrier.arrive(ring.empty.index(slot), count=1)
    acc += product * (scales * w_scale)[:, None]
    # No instruction: holds the additions above the next matrix instruction.
    return warpgroup_mma_wait(IN_FLIGHT, deps=[acc]), product


@gluon.jit
def four_scales(w_scales, k, last):
    """The weight's scales of K blocks k to k + 3; past the last one its own, which nothing is multiplied by."""
    return (
        gl.load(w_scales + gl.minimum(k, last)),
        gl.load(w_scales + gl.minimum(k + 1, last)),
        gl.load(w_scales + gl.minimum(k + 2, last)),
        gl.load(w_scales + gl.minimum(k + 3, last)),
    )


@gluon.jit
def sum_four(ring, share, slot0, phase, acc, d0, d1, four, w_scales, begin, batch, last, never):
    """Add four K blocks, one scaled while the next is multiplied into the other of d0 and d1; none is left in flight.

    `four` are their scales; those of the batch after this one, of a piece from K block `begin` on, are loaded under the
    first product, as their latency would show otherwise. Returns (the next four scales, slot, phase, sum, d0, d1).
    """
    SLOTS: gl.constexpr = ring.x.shape[0]
    s0, f0 = begin_block(ring, share, slot0, phase, d0, never)
    after_four = four_scales(w_scales, begin + batch * 4 + 4, last)
    slot1, phase = after(slot0, phase, SLOTS)
    s1, f1 = begin_block(ring, share, slot1, phase, d1, never)
    acc, d0 = end_block(acc, f0, s0, four[0], ring, slot0, 1)
    slot0, phase = after(slot1, phase, SLOTS)
    s0, f0 = begin_block(ring, share, slot0, phase, d0, never)
    acc, d1 = end_block(acc, f1, s1, four[1], ring, slot1, 1)
    slot1, phase = after(slot0, phase, SLOTS)
    s1, f1 = begin_block(ring, share, slot1, phase, d1, never)
    acc, d0 = end_block(acc, f0, s0, four[2], ring, slot0, 1)
    acc, d1 = end_block(acc, f1, s1, four[3], ring, slot1, 0)
    slot0, phase = after(slot1, phase, SLOTS)
    return after_four, slot0, phase, acc, d0, d1


@gluon.jit
def sum_of_piece(ring, share, slot, phase, d0, d1, w_scales, begin, end, last, never):
    """Add the K blocks of a piece of work; returns (slot, phase, sum, d0, d1).

    Batches of four, then the rest up to `end`, with nothing in flight in between: over a loop's back edge ptxas would
    serialise every matrix instruction.
    """
    four = four_scales(w_scales, begin, last)
    acc = gl.zeros([64, share.COLUMNS], gl.float32, share.LAYOUT)
    for batch in range((end - begin) // 4):
        four, slot, phase, acc, d0, d1 = sum_four(
            ring, share, slot, phase, acc, d0, d1, four, w_scales, begin, batch, last, never
        )
    for i in range((end - begin) % 4):
        w_scale = gl.where(i == 0, four[0], gl.where(i == 1, four[1], four[2]))  # they came with the last batch
        scales, flying = begin_block(ring, share, slot, phase, d0, never)
        acc, d0 = end_block(acc, flying, scales, w_scale, ring, slot, 0)
        slot, phase = after(slot, phase, ring.x.shape[0])
    return slot, phase, acc, d0, d1


@gluon.jit
def sums_of_tile(
    ring, share, x_at, w_at, slot, phase, d0, d1, w_scale_ptr, w_scale_stride, work, place, never,
    SCALE_BLOCK: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """Add a piece's K blocks in the way that a tile of so many columns has; returns (slot, phase, parts, d0, d1)."""
    begin, end, last = place.begin, place.end, work.blocks - 1
    if share.PARTS == 1:
        w_scales = w_scale_ptr + gl.minimum(place.column, work.N - 1) // SCALE_BLOCK * w_scale_stride
        slot, phase, acc, d0, d1 = sum_of_piece(ring, share, slot, phase, d0, d1, w_scales, begin, end, last, never)
        sums = (acc,)
    else:
        block = gl.minimum(place.column, work.N - 1) // SCALE_BLOCK
        low_ptr = w_scale_ptr + block * w_scale_stride
        high_ptr = w_scale_ptr + gl.minimum(block + 1, (work.N - 1) // SCALE_BLOCK) * w_scale_stride
        w_scales = Scales(low_ptr, high_ptr, (block + 1) * SCALE_BLOCK - place.column)
        if takes_turns(share.COLUMNS):
            slot, phase, sums = parts_in_turns(ring, share, x_at, w_at, slot, phase, w_scales, begin, end, last)
        else:
            slot, phase, sums = parts_of_piece(ring, share, x_at, w_at, slot, phase, w_scales, begin, end, BATCH)
    return slot, phase, sums, d0, d1


@gluon.jit
def multiply(
    share, output, w_scale_ptr, w_scale_stride, ring, work, never,
    SCALE_BLOCK: gl.constexpr, SPLIT_K: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """A math warpgroup: its 64 rows of a 128-row tile, or its half of the columns of a 64-row tile."""
    TURNS: gl.constexpr = takes_turns(share.COLUMNS)
    slot = 0
    phase = 0
    d0 = gl.zeros([64, share.WIDTH], gl.float32, share.LAYOUT)
    d1 = gl.zeros([64, share.WIDTH], gl.float32, share.LAYOUT)
    stage = ring.stage.index(share.GROUP)
    x_at, w_at = matrix_descriptors(ring, share)
    mbarrier.wait(ring.ready, 0)
    wait_for_previous()
    if TURNS:
        begin_turns(share.GROUP)
    for piece in range(gl.program_id(0), pieces_of(work), work.programs):
        place = place_of(work, piece, share.BLOCK_SIZE_M, share.BLOCK_SIZE_N, share.ROW, share.COLUMN)
        slot, phase, sums, d0, d1 = sums_of_tile(
            ring, share, x_at, w_at, slot, phase, d0, d1, w_scale_ptr, w_scale_stride, work, place, never,
            SCALE_BLOCK, BATCH,
        )  # fmt: skip
        leave(sums, share, output, stage, work, piece, place, SPLIT_K, "none")
    if TURNS:
        end_turns(share.GROUP)
    tma.store_wait(0)


@gluon.jit
def blockscale_warp_specialised(
    x, w, out, scales, w_scale_ptr, parts_ptr, counters_ptr,
    M, N, blocks, programs, group_m, whole, splits, w_scale_stride, scale_stride, scale_row_stride,
    BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    BATCH: gl.constexpr, READING: gl.constexpr,
):  # fmt: skip
    """out = (x * x_scale) @ (w * w_scale)^T; x, w and out are tensor descriptors.

    SPLIT_K: as dense_hopper.dense_warp_specialised has it. BATCH: of tiles in parts with two products, the K blocks
    after which nothing is in flight. READING: how x's scales come; scale_stride lies between K blocks, scale_row_stride
    between rows. `copied`: by the copy engine, M-major; `scales` is a descriptor of them as one row. `fours` and
    `strided`: by two warps (hopper_scales.load_scales); `scales` is a pointer.
    """
    COLUMNS: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_M // 128
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    x_ring, w_ring = rings(x, w, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, COLUMNS, STAGES)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_SIZE_M], FLAT)
    stage = gl.allocate_shared_memory(out.dtype, [2, 64, out.block_type.shape[1]], out.layout)
    full, empty, ready = barriers(STAGES)
    ring = Ring(x_ring, w_ring, scale_ring, stage, full, empty, ready)
    tiles_m = gl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    work = Work(parts_ptr, counters_ptr, M, N, tiles_m, tiles_n, blocks, programs, group_m, whole, splits)
    output = Output(out, None, None, None)
    never = M < 0
    COPIED: gl.constexpr = READING == "copied"
    FOURS: gl.constexpr = READING == "fours"
    FILLERS: gl.constexpr = 1 if COPIED else 2
    bare = Ring(x_ring, w_ring, None, stage, full, empty, ready)  # of slots whose scales others fill
    gl.warp_specialize([
        (multiply, (share_of(0, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
                    SCALE_BLOCK, SPLIT_K, BATCH)),
        (multiply, (share_of(1, BLOCK_SIZE_M, BLOCK_SIZE_N, 8), output, w_scale_ptr, w_scale_stride, ring, work, never,
                    SCALE_BLOCK, SPLIT_K, BATCH)),
        (load_ring, (x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N, SPLIT_K)) if COPIED else
        (load_ring, (x, w, None, 0, bare, work, BLOCK_SIZE_N, SPLIT_K)),
        (prepare, (ring, SPLIT_K, FILLERS)) if parts_of(COLUMNS) == 1 else (prepare_rings, (ring, SPLIT_K, FILLERS)),
        (come_along, (SPLIT_K,)) if COPIED else
        (load_scales, (scales, scale_row_stride, scale_stride, ring, work, BLOCK_SIZE_N, FOURS, SPLIT_K)),
    ], [4, 1, 1, 2], [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
