"""What fits where: the rules of Hopper's warp-specialised kernels, one `if` each, with the physical cause.

How Hopper's warp-specialised kernels share out a product: its tiles over the device, a tile in its program.
"""

from dataclasses import dataclass
from math import prod

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import element_bytes
from gemmpipe.templates.params import CLUSTER_SIZE, CTAS_PER_SM, MAX_PORTABLE_CLUSTER, int_knob
from gemmpipe.templates.tiled import ceil_div, next_power_of_2, tile_counts

WARPGROUP_M = 64
"""Rows of a warpgroup's matrix instruction."""
SLOT_ROW_BYTES = 128
"""Of a ring slot: the widest swizzle."""
REGISTERS = {1: (232, 24), 2: (96, 48)}
"""A thread's of a math warpgroup and of the loader, by CTAS_PER_SM."""
MAXNREG_TWO_CTAS = 80
"""Of all threads, so that two programs of 384 fit a multiprocessor."""
ANY_N_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8")
"""Elements that hopper_columns has instructions for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxColumns:
    """The most columns of a tile that the registers of a warpgroup hold."""

    whole: int
    """Of a power of two of columns."""
    parts: int
    """Of any multiple of 16 (hopper_columns); 0: there are no such tiles."""


DENSE_MAX_COLUMNS = MaxColumns(whole=256, parts=224)
"""The sums alone."""
BLOCK_SCALED_MAX_COLUMNS = MaxColumns(whole=128, parts=192)
"""Beside the sums two products, or from 112 columns in parts one (a8w8_blockscale/_columns.py)."""
_STAGED_COLUMNS = 64  # from twice as many columns on, half of them are on their way to the output at a time
_FEW_ROWS = 16
_MIN_STAGED_COLUMNS = 16
MAX_WORK_TILES = 2**20
"""Of a product, so that hopper_order.quotient is exact."""
_MAX_SHARED_BYTES = 232_448  # a program's, on sm_90; a multiprocessor has 1 kB more for each


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistentGrid:
    """How the tiles of a product are shared out."""

    tiles: int
    whole: int
    """Tiles that a program computes alone; NUM_KSPLIT splits the rest, which would not fill a round over the device."""
    programs: int
    work_tiles: int
    """Of work: whole tiles, and splits of the rest."""
    parts: int
    """fp32 elements of all splits of all tiles that are split; 0 where K is not."""

    @classmethod
    def of(cls, spec: GemmSpec, knobs: Knobs, device: Device) -> "PersistentGrid":
        """As few programs as the same number of rounds over the device needs."""
        tiles, splits, room = (
            prod(tile_counts(spec, knobs)),
            int_knob(knobs, "NUM_KSPLIT"),
            device.cu_num * ctas_per_sm(knobs),
        )
        whole = tiles if splits == 1 else tiles // room * room
        pieces = whole + (tiles - whole) * splits
        programs = room if 0 < whole < tiles else ceil_div(pieces, ceil_div(pieces, room))
        together = cluster_size(knobs)
        programs = min(ceil_div(programs, together), room // together) * together
        size = int_knob(knobs, "BLOCK_SIZE_M") * int_knob(knobs, "BLOCK_SIZE_N")
        return cls(tiles=tiles, whole=whole, programs=programs, work_tiles=pieces, parts=(pieces - whole) * size)


def ctas_per_sm(knobs: Knobs) -> int:
    """Programs that share a multiprocessor."""
    return int_knob(knobs, CTAS_PER_SM) if CTAS_PER_SM in knobs else 1


def cluster_size(knobs: Knobs) -> int:
    """Programs that are launched side by side."""
    return max(1, int_knob(knobs, CLUSTER_SIZE)) if CLUSTER_SIZE in knobs else 1


def split_k_mode(knobs: Knobs) -> str:
    """Who adds up the splits of K: `none`, the `last` to arrive, or all of them in a `cluster`."""
    if int_knob(knobs, "NUM_KSPLIT") == 1:
        return "none"
    return "last" if cluster_size(knobs) == 1 else "cluster"


def warpgroup_columns(knobs: Knobs) -> int:
    """Columns of a warpgroup: all of a 128-row tile's, half of a 64-row tile's."""
    return int_knob(knobs, "BLOCK_SIZE_N") * int_knob(knobs, "BLOCK_SIZE_M") // (2 * WARPGROUP_M)


def accumulator_width(columns: int) -> int:
    """Columns of a warpgroup that a tensor holds: all, or the greatest power of two in them (see hopper_columns)."""
    return columns if columns & (columns - 1) == 0 else min(_STAGED_COLUMNS, columns & -columns)


def x_box_rows(spec: GemmSpec, block_m: int) -> int:
    """Rows of x in a copy: a tile's, or few where x has fewer than a tile (see hopper.load_x).

    A copy costs the loader warp 12 ns, but one that lies mostly outside x costs more (H200, docs/kernels.md).
    """
    if spec.m >= block_m:
        return block_m
    return 2 * _FEW_ROWS if -spec.m % (2 * _FEW_ROWS) <= _FEW_ROWS // 2 else _FEW_ROWS


def hopper_shared_bytes(knobs: Knobs) -> int:
    """Shared memory of a program: the ring, and what is on its way to the output, 16 bits an element."""
    return _ring_bytes(knobs) + 2 * 2 * WARPGROUP_M * epilogue_columns(knobs)


def _ring_bytes(knobs: Knobs) -> int:
    """Shared memory of the slots, with scales for every row, and of the barriers."""
    m, n, stages = (int_knob(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
    return stages * ((m + n) * SLOT_ROW_BYTES + 4 * m) + 1024


def epilogue_columns(knobs: Knobs) -> int:
    """Columns of a warpgroup on their way to the output at a time: all, or half where the ring leaves no more room.

    Half as well where K is split: there are registers to add up so much of several parts. In a cluster about as many as
    each split adds up.
    """
    columns = warpgroup_columns(knobs)
    if accumulator_width(columns) != columns:
        return accumulator_width(columns)
    if split_k_mode(knobs) == "cluster":
        return max(_MIN_STAGED_COLUMNS, columns // next_power_of_2(int_knob(knobs, "NUM_KSPLIT")))
    room = _MAX_SHARED_BYTES - _ring_bytes(knobs)
    halved = int_knob(knobs, "NUM_KSPLIT") > 1 or 2 * 2 * WARPGROUP_M * columns > room
    return columns // 2 if columns >= 2 * _STAGED_COLUMNS and halved else columns


def hopper_tile_violation(spec: GemmSpec, knobs: Knobs, device: Device, widest: MaxColumns) -> str | None:
    """The first rule that a product of these sizes breaks on the ring and the registers, or None."""
    m, n, stages = (int_knob(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
    size = int(element_bytes(spec.x_dtype))
    if device.kind == "cpu":
        return "no GPU: Triton compiles for GPUs"
    if device.gfx != "sm_90":
        return f"architecture: warpgroup instructions are sm_90's, this is {device.gfx}"
    if spec.out_dtype not in ("bfloat16", "float16"):
        return f"output: {spec.out_dtype} does not fit beside the ring"
    # A descriptor's rows begin at multiples of 16 bytes.
    if spec.n % 8 or spec.k * size % 16:
        return f"alignment: N={spec.n} K={spec.k}, the copy engine's rows begin at multiples of 16 bytes"
    if m not in (WARPGROUP_M, 2 * WARPGROUP_M) or int_knob(knobs, "BLOCK_SIZE_K") * size != SLOT_ROW_BYTES:
        return f"tile: {m} rows, BLOCK_SIZE_K={knobs['BLOCK_SIZE_K']}; two warpgroups share 64 or 128 of 128 bytes"
    if reason := _columns_violation(spec, m, n, warpgroup_columns(knobs), widest):
        return reason
    needed = hopper_shared_bytes(knobs)
    if stages < 2 or needed > device.shared_bytes:
        return f"shared memory: about {needed} bytes for {stages} stages, {device.shared_bytes} a block"
    return None


def _columns_violation(spec: GemmSpec, m: int, n: int, columns: int, widest: MaxColumns) -> str | None:
    """Why a warpgroup cannot hold so many columns, or None."""
    if n & (n - 1):
        if not widest.parts:
            return f"tile: {m}x{n}, no power of two; this kernel has no other tiles for the layout of this weight"
        if columns % 16 or spec.x_dtype not in ANY_N_DTYPES:
            return f"tile: {m}x{n}, no power of two and not of 16 columns a warpgroup, for {spec.x_dtype}"
        # These spill nothing with triton 3.6 and 3.9, but for block-scaled splits of 96 columns: two registers (3.9).
        most = widest.parts
    else:
        # Triton has no warpgroup instruction of int8 with 256 columns (3.6 and 3.9).
        most = min(widest.whole, 128) if spec.x_dtype == "int8" else widest.whole
    if not 16 <= columns <= most or n > 256:
        return f"registers: {columns} columns a warpgroup of a {m}x{n} tile, 16 to {most} are held"
    return None


def ctas_violation(knobs: Knobs, device: Device) -> str | None:
    """Why so many programs cannot share a multiprocessor, or None."""
    ctas, columns, needed = ctas_per_sm(knobs), warpgroup_columns(knobs), hopper_shared_bytes(knobs)
    if ctas not in REGISTERS:
        return f"{CTAS_PER_SM}: {ctas}, there are registers for 1 or 2 programs"
    if ctas > 1 and (columns > 32 or ctas * (needed + 1024) > device.shared_bytes + 1024):
        return f"two programs: about {needed} bytes and {columns} columns a warpgroup, 32 fit the registers"
    return None


def cluster_violation(knobs: Knobs, grid: PersistentGrid) -> str | None:
    """Why a cluster cannot have these programs, or None."""
    size = cluster_size(knobs)
    if size > MAX_PORTABLE_CLUSTER:
        return f"{CLUSTER_SIZE}: {size}, {MAX_PORTABLE_CLUSTER} programs are portable"
    if split_k_mode(knobs) == "cluster" and grid.programs != grid.work_tiles:
        return f"{CLUSTER_SIZE}: {grid.work_tiles} splits for {grid.programs} programs, those of a tile would not meet"
    return None
