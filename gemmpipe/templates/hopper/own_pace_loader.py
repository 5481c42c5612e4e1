"""The loader warp of the kernels at own pace: copies x, w and x's scales into the slots of own_pace_memory.py.

As pipeline.producer_warp, but it waits for an empty slot and announces a slot's bytes by PTX. In Gluon Triton sees that
the barriers are in the same allocation as the slots, and places a fence between them before each slot's first copy:
`fence.proxy.async`, which ptxas makes `MEMBAR.ALL.CTA`. Nothing needs it: what the threads wrote to the barriers is not
what TMA writes to the slots. Written in Gluon, which has no interpreter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gemmpipe.templates.hopper.epilogue import cluster_arrive
from gemmpipe.templates.hopper.gluon_compat import tma_load
from gemmpipe.templates.hopper.own_pace_memory import full_barriers, init_full_barriers, line_bytes
from gemmpipe.templates.hopper.pipeline import advance, gdc_launch_dependents, gdc_wait, load_w, load_x
from gemmpipe.templates.hopper.tile_scheduler import tile_coord, work_tile_count

# mypy: disable-error-code="untyped-decorator,no-untyped-def"


@gluon.constexpr_function
def _begin_slot_asm(block_m, stages):
    """PTX: wait until slot $1 is empty, by the phase $2 of its barrier; then one lane announces $3 bytes.

    The lane's arrival is the loader's; the slot is full when these bytes are there and all that fill it have arrived.
    """
    full = full_barriers(block_m, stages)
    return (
        "{ .reg .pred p; .reg .b32 at, lane; mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at;"
        f" waiting: mbarrier.try_wait.parity.shared::cta.b64 p, [at + {full + line_bytes()}], $2; @!p bra.uni waiting;"
        " mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;"
        f" @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [at + {full}], $3; mov.u32 $0, $1; }}"
    )


@gluon.jit
def _slot_bytes(x, M, REST_BYTES: gl.constexpr, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_K: gl.constexpr):
    """The bytes after which a slot is full: REST_BYTES, and the copies of x that load_x starts.

    Boxes of x that begin beyond M are not copied; one that reaches beyond it counts whole, as TMA fills it with zeros.
    """
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = ROWS * BLOCK_SIZE_K * x.dtype.primitive_bitwidth // 8
    return REST_BYTES + gl.minimum(gl.cdiv(M, ROWS), BLOCK_SIZE_M // ROWS) * BYTES


@gluon.constexpr_function
def _announce_asm(block_m, stages):
    """PTX: one lane announces $2 bytes for slot $1, a slot that is empty from the beginning."""
    full = full_barriers(block_m, stages)
    return (
        "{ .reg .pred p; .reg .b32 at, lane; mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at;"
        " mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;"
        f" @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [at + {full}], $2; mov.u32 $0, $1; }}"
    )


@gluon.jit
def _copy(x, w, scales, scale_stride, ring, M, slot, row, column, k, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr):
    """Start the copies of K block k into a slot."""
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    FIRST: gl.constexpr = 0 if ring.scales is None else ring.scales.shape[0] - STAGES
    bar = ring.full.index(slot)
    load_w(w, ring, slot, column, k * BLOCK_SIZE_K, bar, BLOCK_SIZE_N)
    load_x(x, ring.x.index(slot), row, k * BLOCK_SIZE_K, M, bar)
    if ring.scales is not None:
        tma_load(scales, [k * scale_stride + row], bar, ring.scales.index(FIRST + slot))


@gluon.jit
def _first_copies(
    x, w, scales, scale_stride, ring, work, slot_bytes, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first work tile's K blocks, as many as there are slots; returns their number.

    None for a program without a work tile: where clusters are filled up there may be one.
    """
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    announce: gl.constexpr = _announce_asm(BLOCK_SIZE_M, STAGES)
    place = tile_coord(work, gl.program_id(0), BLOCK_SIZE_M, BLOCK_SIZE_N, 0, 0, SPLIT_K == "halves", True)
    blocks = gl.minimum(place.end - place.begin, STAGES)
    count = gl.where(gl.program_id(0) < work_tile_count(work), blocks, 0)
    row = gdc_wait(place.row)
    for i in range(count):
        gl.inline_asm_elementwise(announce, "=r,r,r", [i, slot_bytes], dtype=gl.int32, is_pure=False, pack=1)
        _copy(x, w, scales, scale_stride, ring, work.M, i, row, place.column, place.begin + i, BLOCK_SIZE_N, STAGES)
    return count


@gluon.jit
def loader_warp(
    x, w, scales, scale_stride, ring, work, BLOCK_SIZE_N: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    EARLY_COPIES: gl.constexpr = False, FILLERS: gl.constexpr = 1,
):  # fmt: skip
    """The loader warp: copies x, w and x's scales of each work tile and K block into the next empty slot.

    scales: a descriptor of M-major scales as one row, which come with the slots, or None: others bring them. ring: of
    own_pace_memory.allocate; scales and scale_stride as in pipeline.producer_warp. EARLY_COPIES: it initialises the
    barriers that its first copies need, and starts these while another warp initialises the rest.
    """
    BLOCK_SIZE_M: gl.constexpr = ring.x.shape[1]
    BLOCK_SIZE_K: gl.constexpr = ring.x.shape[2]
    W_BYTES: gl.constexpr = BLOCK_SIZE_N * BLOCK_SIZE_K * w.dtype.primitive_bitwidth // 8
    SCALE_BYTES: gl.constexpr = 0 if ring.scales is None else BLOCK_SIZE_M * 4
    begin_slot: gl.constexpr = _begin_slot_asm(BLOCK_SIZE_M, STAGES)
    slot = 0
    phase = 1
    if EARLY_COPIES:
        init_full_barriers(ring, BLOCK_SIZE_M, STAGES, FILLERS)
    slot_bytes = _slot_bytes(x, work.M, W_BYTES + SCALE_BYTES, BLOCK_SIZE_M, BLOCK_SIZE_K)
    if EARLY_COPIES:
        started = _first_copies(
            x, w, scales, scale_stride, ring, work, slot_bytes, BLOCK_SIZE_N, STAGES, SPLIT_K
        )  # fmt: skip
        slot = gl.where(started == STAGES, 0, started)
        phase = gl.where(started == STAGES, 0, 1)
    for work_id in range(gl.program_id(0), work_tile_count(work), work.programs):
        # Not carried over from the previous tile, and with the waits in the loop: as in pipeline.producer_warp.
        place = tile_coord(work, work_id, BLOCK_SIZE_M, BLOCK_SIZE_N, 0, 0, SPLIT_K == "halves", True)
        mbarrier.wait(ring.ready, 0)
        row = gdc_wait(place.row)
        gdc_launch_dependents()
        begin = place.begin
        if EARLY_COPIES:
            begin += gl.where(work_id == gl.program_id(0), started, 0)
        for k in range(begin, place.end):
            gl.inline_asm_elementwise(
                begin_slot, "=r,r,r,r", [slot, phase, slot_bytes], dtype=gl.int32, is_pure=False, pack=1
            )
            _copy(x, w, scales, scale_stride, ring, work.M, slot, row, place.column, k, BLOCK_SIZE_N, STAGES)
            slot, phase = advance(slot, phase, STAGES)
    cluster_arrive(SPLIT_K)
