"""How Hopper's warp-specialised kernels share out a product: its tiles over the device, a tile in its program."""

from dataclasses import dataclass
from math import prod

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.templates.axes import CLUSTER, CTAS, integer
from gemmpipe.templates.tiled import ceil_div, next_power, tiles_of

GROUP_ROWS = 64
"""Rows of a warpgroup's matrix instruction."""
ROW_BYTES = 128
"""Of a ring slot: the widest swizzle."""
REGISTERS = {1: (232, 24), 2: (96, 48)}
"""A thread's of a math warpgroup and of the loader, by CTAS_PER_SM."""
LEAST_REGISTERS = 80
"""Of all threads, so that two programs of 384 fit a multiprocessor."""
ANY_COLUMNS = ("bfloat16", "float16", "float8_e4m3fn", "int8")
"""Elements that hopper_columns has instructions for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Widest:
    """The most columns of a tile that the registers of a warpgroup hold."""

    whole: int
    """Of a power of two of columns."""
    parts: int
    """Of any multiple of 16 (hopper_columns); 0: there are no such tiles."""


DENSE = Widest(whole=256, parts=224)
"""The sums alone."""
BLOCK_SCALED = Widest(whole=128, parts=192)
"""Beside the sums two products, or from 112 columns in parts one (a8w8_blockscale/_columns.py)."""
_STAGED = 64  # from twice as many columns on, half of them are on their way to the output at a time
_FEW_ROWS = 16
_LEAST_STAGED = 16
MOST_PIECES = 2**20
"""Of a product, so that hopper_order.quotient is exact."""
_SHARED_BYTES = 232_448  # a program's, on sm_90; a multiprocessor has 1 kB more for each


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How the tiles of a product are shared out."""

    tiles: int
    whole: int
    """Tiles that a program computes alone; NUM_KSPLIT splits the rest, which would not fill a round over the device."""
    programs: int
    pieces: int
    """Of work: whole tiles, and splits of the rest."""
    parts: int
    """fp32 elements of all splits of all tiles that are split; 0 where K is not."""

    @classmethod
    def of(cls, spec: GemmSpec, knobs: Knobs, device: Device) -> "Grid":
        """As few programs as the same number of rounds over the device needs."""
        tiles, splits, room = prod(tiles_of(spec, knobs)), integer(knobs, "NUM_KSPLIT"), device.cu_num * ctas_of(knobs)
        whole = tiles if splits == 1 else tiles // room * room
        pieces = whole + (tiles - whole) * splits
        programs = room if 0 < whole < tiles else ceil_div(pieces, ceil_div(pieces, room))
        together = cluster_of(knobs)
        programs = min(ceil_div(programs, together), room // together) * together
        size = integer(knobs, "BLOCK_SIZE_M") * integer(knobs, "BLOCK_SIZE_N")
        return cls(tiles=tiles, whole=whole, programs=programs, pieces=pieces, parts=(pieces - whole) * size)


def ctas_of(knobs: Knobs) -> int:
    """Programs that share a multiprocessor."""
    return integer(knobs, CTAS) if CTAS in knobs else 1


def cluster_of(knobs: Knobs) -> int:
    """Programs that are launched side by side."""
    return max(1, integer(knobs, CLUSTER)) if CLUSTER in knobs else 1


def summed_by(knobs: Knobs) -> str:
    """Who adds up the splits of K: `none`, the `last` to arrive, or all of them in a `cluster`."""
    if integer(knobs, "NUM_KSPLIT") == 1:
        return "none"
    return "last" if cluster_of(knobs) == 1 else "cluster"


def columns_of(knobs: Knobs) -> int:
    """Columns of a warpgroup: all of a 128-row tile's, half of a 64-row tile's."""
    return integer(knobs, "BLOCK_SIZE_N") * integer(knobs, "BLOCK_SIZE_M") // (2 * GROUP_ROWS)


def part_width(columns: int) -> int:
    """Columns of a warpgroup that a tensor holds: all, or the greatest power of two in them (see hopper_columns)."""
    return columns if columns & (columns - 1) == 0 else min(_STAGED, columns & -columns)


def copied_rows(spec: GemmSpec, block_m: int) -> int:
    """Rows of x in a copy: a tile's, or few where x has fewer than a tile (see hopper.load_x).

    A copy costs the loader warp 12 ns, but one that lies mostly outside x costs more (H200, docs/kernels.md).
    """
    if spec.m >= block_m:
        return block_m
    return 2 * _FEW_ROWS if -spec.m % (2 * _FEW_ROWS) <= _FEW_ROWS // 2 else _FEW_ROWS


def shared_bytes(knobs: Knobs) -> int:
    """Shared memory of a program: the ring, and what is on its way to the output, 16 bits an element."""
    return _ring_bytes(knobs) + 2 * 2 * GROUP_ROWS * staged_columns(knobs)


def _ring_bytes(knobs: Knobs) -> int:
    """Shared memory of the slots, with scales for every row, and of the barriers."""
    m, n, stages = (integer(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
    return stages * ((m + n) * ROW_BYTES + 4 * m) + 1024


def staged_columns(knobs: Knobs) -> int:
    """Columns of a warpgroup on their way to the output at a time: all, or half where the ring leaves no more room.

    Half as well where K is split: there are registers to add up so much of several parts. In a cluster about as many as
    each split adds up.
    """
    columns = columns_of(knobs)
    if part_width(columns) != columns:
        return part_width(columns)
    if summed_by(knobs) == "cluster":
        return max(_LEAST_STAGED, columns // next_power(integer(knobs, "NUM_KSPLIT")))
    room = _SHARED_BYTES - _ring_bytes(knobs)
    halved = integer(knobs, "NUM_KSPLIT") > 1 or 2 * 2 * GROUP_ROWS * columns > room
    return columns // 2 if columns >= 2 * _STAGED and halved else columns
