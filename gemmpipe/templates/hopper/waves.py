"""Waves: 64 rows of x that a warpgroup multiplies by a slot of w, one wave after the other.

A tile of 256 rows has two waves for each of the two warpgroups: it copies a quarter fewer bytes than two tiles of 128
rows, as both waves read the same slot of w. All tiles here have sums in parts (wgmma_any_n.py), those with a power of
two of columns too: the parts of both waves are one tuple, the first wave's before the second's. Written in Gluon, which
has no interpreter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gemmpipe.templates.hopper.gluon_compat import tma_store, view_as_ring
from gemmpipe.templates.hopper.tile_scheduler import WarpgroupPartition, accumulator_layout, swizzled_tile
from gemmpipe.templates.hopper.wgmma_any_n import slot_descriptors, wgmma_steps

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"


@gluon.constexpr_function
def wave_part_columns(columns):
    """Columns of a part: the greatest power of two that divides them, 64 at most, so that there are two or more."""
    return min(64, columns // 2, columns & -columns)


@gluon.constexpr_function
def wave_count(block_m):
    """Waves of a warpgroup: a tile's rows over 64 and two warpgroups."""
    return block_m // 128


@gluon.constexpr_function
def wave_partition(group, block_m, block_n, bits):
    """A warpgroup's share of a tile: all columns of its waves, of which ROW is the first's first row."""
    width, depth = wave_part_columns(block_n), 256 // bits
    row = group * 64 * wave_count(block_m)
    layout = accumulator_layout(width, depth)
    found = (block_m, block_n, group, row, 0, block_n, block_n // width, width, depth, layout)
    return WarpgroupPartition(*map(gl.constexpr, found))


@gluon.jit
def allocate_wave_rings(
    x, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, BLOCK_SIZE_K: gl.constexpr, STAGES: gl.constexpr
):
    """(x's slots, w's slots): one allocation of buffers as wide as a part, as wgmma_any_n.allocate_rings."""
    WIDTH: gl.constexpr = wave_part_columns(BLOCK_SIZE_N)
    ROWS: gl.constexpr = STAGES * (BLOCK_SIZE_M + BLOCK_SIZE_N)
    w_ring = gl.allocate_shared_memory(x.dtype, [ROWS // WIDTH, WIDTH, BLOCK_SIZE_K], x.layout)
    return view_as_ring(w_ring, STAGES, BLOCK_SIZE_M), w_ring


@gluon.constexpr_function
def _wave_asm(columns, parts):
    sums = columns // 2
    never = 2 * sums + 2 * sums // parts  # the last operand
    first, *others = wgmma_steps(columns, parts, "fp8e4nv", False)
    first = first.replace("setp.ne.b32 add, 1, 0;", f"setp.ne.b32 add, ${never}, 0;")
    steps = " ".join([first, *others])
    fence, commit = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
    return f"{{ .reg .pred add; .reg .b64 x, w; {fence} {steps} {commit} }}"


@gluon.constexpr_function
def _wave_constraints(columns, parts):
    sums = columns // 2
    held = [str(i) for i in range(sums)]
    return ",".join(["=f"] * sums + held + ["l"] * (2 * sums // parts) + ["r"] * (sums // parts))


@gluon.constexpr_function
def _wave_types(parts):
    return (gl.float32,) * parts


@gluon.jit
def wgmma_wave(product, never, ring, wg, x_at, w_at, slot, wave: gl.constexpr):
    """Start x @ w^T of a wave and a K block in the registers of an earlier product, which it replaces.

    x_at, w_at: wgmma_any_n.matrix_descriptors of this warpgroup.
    never: a number that is 0, but not for the compiler. It makes the instructions read the earlier product: ptxas then
    keeps its additions above them, and needs no registers for a third product.
    """
    x, w = slot_descriptors(ring, wg, x_at + wave * 512, w_at, slot)
    text: gl.constexpr = _wave_asm(wg.COLUMNS, wg.PARTS)
    constraints: gl.constexpr = _wave_constraints(wg.COLUMNS, wg.PARTS)
    types: gl.constexpr = _wave_types(wg.PARTS)
    everywhere = gl.zeros([64, wg.WIDTH], gl.int64, wg.LAYOUT)
    operands = product
    operands += (everywhere + x, everywhere + w, gl.zeros([64, wg.WIDTH], gl.int32, wg.LAYOUT) + never)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=types, is_pure=False, pack=wg.WIDTH // 2)


@gluon.jit
def hold_order(never):
    """Hold instructions before this above those after it, by a branch over which ptxas moves nothing.

    It is a loop that is never entered, as never is 0, but not for the compiler; an empty one ptxas removes.
    """
    asm: gl.constexpr = (
        "{ .reg .pred p; hold: setp.ne.s32 p, $1, 0; @p nanosleep.u32 32; @p bra hold; mov.u32 $0, $1; }"
    )
    gl.inline_asm_elementwise(asm, "=r,r", [never], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def zero_waves(wg, WAVES: gl.constexpr):
    """The parts of the empty sums of all waves."""
    parts = ()
    for _ in gl.static_range(WAVES * wg.PARTS):
        parts += (gl.zeros([64, wg.WIDTH], gl.float32, wg.LAYOUT),)
    return parts


@gluon.jit
def wave_scales(ring, wg, slot, wave: gl.constexpr):
    """x's scales of a wave's rows in a slot."""
    return ring.scales.index(slot).slice(wg.ROW + 64 * wave, 64).load(gl.SliceLayout(1, wg.LAYOUT))


@gluon.jit
def add_scaled_wave(
    sums, product, scales, low, high, edge, wave: gl.constexpr, PARTS: gl.constexpr, EDGES: gl.constexpr
):
    """The sums of all waves after adding this wave's product, scaled.

    low, high: w's scales of the columns before `edge` and from there on; without EDGES all columns have the first.
    """
    total = ()
    for j in gl.static_range(len(sums)):
        if j // PARTS == wave:
            scale = scales * low
            if EDGES:
                scale = gl.where(j % PARTS * product[0].shape[1] < edge, scale, scales * high)
            total += (sums[j] + product[j % PARTS] * scale[:, None],)
        else:
            total += (sums[j],)
    return total


class WholeTiles(NamedTuple):
    """The tiles of a product [M, N], none of them split; the fields are those of tile_scheduler.TileSchedule.

    Fewer than there: a math warpgroup keeps them in registers, of which it has few left.
    """

    M: gl.tensor
    N: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    blocks: gl.tensor
    programs: gl.tensor
    group_m: gl.tensor


@gluon.jit
def whole_tile_place(work, work_id, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr):
    """(first row, first column) of a tile, as tile_scheduler.tile_coord."""
    row, tile_n = swizzled_tile(work_id, work.M, work.tiles_m, work.tiles_n, work.group_m, BLOCK_SIZE_M)
    return row, tile_n * BLOCK_SIZE_N


@gluon.jit
def store_waves(sums, wg, out, stage, row, column, WAVES: gl.constexpr):
    """Store the sums of all waves of a tile, whose share for this warpgroup begins at (row, column).

    The parts take the warpgroup's buffers of `stage` in turn: while one is copied to memory, the next is filled.
    """
    BUFFERS: gl.constexpr = stage.shape[0] // 2
    for i in gl.static_range(WAVES * wg.PARTS):
        place = stage.index(wg.GROUP * BUFFERS + i % BUFFERS)
        tma.store_wait(BUFFERS - 1)  # the copy that began as many copies ago has read its buffer
        place.store(sums[i].to(place.dtype))
        fence_async_shared()
        tma_store(out, [row + i // wg.PARTS * 64, column + i % wg.PARTS * wg.WIDTH], place)
