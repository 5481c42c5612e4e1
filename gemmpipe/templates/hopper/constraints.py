"""Constraints of Hopper's warp-specialised kernels, one `if` each, with the physical cause.

Also the persistent grid (tiles over programs) and the partition of a tile within a program, which they depend on.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from math import prod

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import DTYPES_16BIT, element_bytes
from gemmpipe.templates.params import (
    CLUSTER_SIZE,
    CONSTANT_NK,
    CTAS_PER_SM,
    MAX_PORTABLE_CLUSTER,
    NO_GPU,
    ONE_WARPGROUP,
    OWN_PACE,
    SCALE_BLOCK,
    int_knob,
)
from gemmpipe.templates.tiled import ceil_div, next_power_of_2, tile_counts

WARPGROUP_M = 64
"""Rows of a warpgroup's matrix instruction."""
SLOT_ROW_BYTES = 128
"""Bytes of a ring slot's row: the widest swizzle."""
REGISTERS = {1: (232, 24), 2: (96, 48)}
"""CTAS_PER_SM -> registers per thread of (a math warpgroup, the loader)."""
MAXNREG_TWO_CTAS = {1: 128, 2: 80}
"""Math warpgroups -> registers per thread with which two programs, of 256 or 384 threads, fit a multiprocessor."""
TWO_CTAS_COLUMNS = {1: 64, 2: 32}
"""Math warpgroups -> columns of a warpgroup that these registers hold."""
ANY_N_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8")
"""Element types that wgmma_any_n.py has instructions for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxColumns:
    """The most columns of a tile that the registers of a warpgroup hold."""

    whole: int
    """With a power of two of columns."""
    parts: int
    """With any multiple of 16 columns (wgmma_any_n.py); 0: there are no such tiles."""
    two_waves: int = 0
    """With the sums of two waves, which tiles of 256 rows have (waves.py); 0: there are no such tiles."""


DENSE_MAX_COLUMNS = MaxColumns(whole=256, parts=224)
"""With registers for the sums alone."""
BLOCK_SCALED_MAX_COLUMNS = MaxColumns(whole=128, parts=192)
"""Two products in addition to the sums, or one from 112 columns in parts on (a8w8_blockscale/_hopper_kernel.py)."""
MAX_SINGLE_COLUMNS = MaxColumns(whole=128, parts=96)
"""Of a tile of 64 rows that one warpgroup multiplies: wider ones would multiply in turns, which takes two."""
_STAGED_COLUMNS = 64  # from twice as many columns on, half of them are staged for the output at a time
_FEW_ROWS = 16
_MIN_STAGED_COLUMNS = 16
_MIN_WAVE_COLUMNS = 32
MAX_WORK_TILES = 2**20
"""Work tiles of a product for which tile_scheduler.fast_div is exact."""
_MAX_SHARED_BYTES = 232_448  # per program on sm_90; a multiprocessor has 1 kB more for each program


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistentGrid:
    """The tiles of a product over the persistent programs."""

    tiles: int
    whole: int
    """Tiles that one program computes; the rest, which would not fill a wave over the device, is split or halved."""
    programs: int
    work_tiles: int
    """Whole tiles, and splits of the rest."""
    splits: int
    """Of each of the rest: NUM_KSPLIT, or two halves of its rows."""
    parts: int
    """fp32 elements of all splits of all tiles that are split; 0 without split-K."""

    @property
    def halved(self) -> bool:
        """True if the rest are in halves of their rows."""
        return self.whole < self.tiles and not self.parts

    @classmethod
    def of(cls, spec: GemmSpec, knobs: Knobs, device: Device) -> "PersistentGrid":
        """As few programs as the same number of waves over the device needs."""
        tiles, splits = prod(tile_counts(spec, knobs)), int_knob(knobs, "NUM_KSPLIT")
        resident, cluster = device.cu_num * ctas_per_sm(knobs), cluster_size(knobs)
        if has_halves(knobs):
            resident -= resident % cluster  # the programs of whole clusters: only these share the last wave
        if halves := has_halves(knobs) and tiles > resident and 2 * (tiles % resident) <= resident:
            splits = 2
        whole = tiles if splits == 1 else tiles // resident * resident
        work_tiles = whole + (tiles - whole) * splits
        programs = resident if 0 < whole < tiles else ceil_div(work_tiles, ceil_div(work_tiles, resident))
        programs = min(ceil_div(programs, cluster), resident // cluster) * cluster
        size = int_knob(knobs, "BLOCK_SIZE_M") * int_knob(knobs, "BLOCK_SIZE_N")
        parts = 0 if halves else (work_tiles - whole) * size
        return cls(tiles=tiles, whole=whole, programs=programs, work_tiles=work_tiles, splits=splits, parts=parts)


def has_halves(knobs: Knobs) -> bool:
    """True for tiles of which a program can compute half of the rows (waves.py): those of 256 rows and 128 columns.

    The kernel has a second copy of its loops for them. Narrower tiles lead nowhere, and most have several loops
    already, as w's scales change within a tile. With N and K constant ptxas spills 90 registers.
    """
    rows, columns = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "BLOCK_SIZE_N")
    return rows > 2 * WARPGROUP_M and columns == SCALE_BLOCK and not knobs.get(CONSTANT_NK)


def ctas_per_sm(knobs: Knobs) -> int:
    """Programs per multiprocessor."""
    return int_knob(knobs, CTAS_PER_SM) if CTAS_PER_SM in knobs else 1


def cluster_size(knobs: Knobs) -> int:
    """Programs per cluster."""
    return max(1, int_knob(knobs, CLUSTER_SIZE)) if CLUSTER_SIZE in knobs else 1


def split_k_mode(knobs: Knobs) -> str:
    """How the splits of K are added up: `none`, by the `last` to arrive, or by all of them in a `cluster`."""
    if int_knob(knobs, "NUM_KSPLIT") == 1:
        return "none"
    return "last" if cluster_size(knobs) == 1 else "cluster"


def math_warpgroups(knobs: Knobs) -> int:
    """Warpgroups that multiply."""
    return 1 if knobs.get(ONE_WARPGROUP) else 2


def warpgroup_columns(knobs: Knobs) -> int:
    """Columns of a warpgroup: all columns of a tile of 128 or 256 rows, half of a 64-row tile's with two warpgroups."""
    if math_warpgroups(knobs) == 1:
        return int_knob(knobs, "BLOCK_SIZE_N")
    return int_knob(knobs, "BLOCK_SIZE_N") * min(int_knob(knobs, "BLOCK_SIZE_M"), 2 * WARPGROUP_M) // (2 * WARPGROUP_M)


def in_waves(knobs: Knobs) -> bool:
    """True for the kernels with waves (waves.py): tiles of 256 rows, and warpgroups at their own pace."""
    rows = int_knob(knobs, "BLOCK_SIZE_M")
    return rows > 2 * WARPGROUP_M or (rows == 2 * WARPGROUP_M and bool(knobs.get(OWN_PACE)))


def alone_at_own_pace(knobs: Knobs) -> bool:
    """True for the kernel of tiles of 64 rows that one warpgroup multiplies by the loop of own_pace.py."""
    return math_warpgroups(knobs) == 1 and bool(knobs.get(OWN_PACE)) and knobs["BLOCK_SIZE_M"] == WARPGROUP_M


def own_allocation(knobs: Knobs) -> bool:
    """True for the kernels whose slots and barriers are those of own_pace_memory.allocate."""
    return in_waves(knobs) or alone_at_own_pace(knobs)


def part_columns(knobs: Knobs) -> int:
    """Columns of each tensor of a warpgroup's sums; the kernels have the same rules (waves.py, tile_scheduler.py)."""
    columns = warpgroup_columns(knobs)
    if own_allocation(knobs):
        return min(_STAGED_COLUMNS, columns // 2, columns & -columns)
    return accumulator_width(columns)


def accumulator_width(columns: int) -> int:
    """Columns of a warpgroup per tensor: all, or the greatest power of two that divides them (see wgmma_any_n.py)."""
    return columns if columns & (columns - 1) == 0 else min(_STAGED_COLUMNS, columns & -columns)


def x_box_rows(spec: GemmSpec, block_m: int) -> int:
    """Rows of x per copy: a tile's, or fewer if x has fewer rows than a tile (see pipeline.load_x).

    A copy costs the loader warp 12 ns, but one that is mostly outside x costs more (H200, docs/explanation/kernels.md).
    """
    if spec.m >= block_m:
        return block_m
    return 2 * _FEW_ROWS if -spec.m % (2 * _FEW_ROWS) <= _FEW_ROWS // 2 else _FEW_ROWS


def hopper_shared_bytes(knobs: Knobs) -> int:
    """Shared memory of a program: the ring, and the columns staged for the output, 16 bits per element.

    At most: the dense kernel has a single buffer for them (see stage_buffers).
    """
    rows = math_warpgroups(knobs) * WARPGROUP_M
    return _ring_bytes(knobs) + 2 * rows * epilogue_columns(knobs) * stage_buffers(knobs)


def stage_buffers(knobs: Knobs) -> int:
    """Buffers of a warpgroup for `epilogue_columns`: for a tile in parts as many as the ring leaves room for.

    With waves a divisor of the parts, so that every tile begins with the buffer that has been copied out of longest
    ago. Otherwise the fewest that need no more rounds than all that fit; one with splits of K, staged part by part.
    """
    if int_knob(knobs, "NUM_KSPLIT") > 1:
        return 1
    columns = part_columns(knobs)
    parts = ceil_div(int_knob(knobs, "BLOCK_SIZE_M"), 2 * WARPGROUP_M) * warpgroup_columns(knobs) // columns
    limit = (_MAX_SHARED_BYTES + 1024) // ctas_per_sm(knobs) - 1024
    room = max(1, (limit - _ring_bytes(knobs)) // (2 * math_warpgroups(knobs) * WARPGROUP_M * columns))
    if in_waves(knobs):
        return max(each for each in range(1, parts + 1) if parts % each == 0 and each <= room)
    rounds = ceil_div(parts, room)
    return ceil_div(parts, rounds)


def _ring_bytes(knobs: Knobs) -> int:
    """Shared memory of the slots, each with scales for every row, and of the barriers.

    At own pace scales may be in two panels of four K blocks instead, and slots are aligned to 1024 bytes
    (own_pace_memory.py).
    """
    m, n, stages = (int_knob(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
    control = stages * 4 * m + 1024
    if own_allocation(knobs):
        # Apart from it: a barrier, and Triton's record of the roles.
        control = ceil_div(max(2 * 4, stages) * 4 * m + 1536, 1024) * 1024 + 288
    return stages * (m + n) * SLOT_ROW_BYTES + control


def epilogue_columns(knobs: Knobs) -> int:
    """Columns of a warpgroup staged for the output at a time: all, or half if the ring leaves no more room.

    Half with split-K too, for which there are registers to add up several parts; in a cluster about as many as each
    split adds up.
    """
    columns = warpgroup_columns(knobs)
    if part_columns(knobs) != columns:
        return part_columns(knobs)
    if split_k_mode(knobs) == "cluster":
        return max(_MIN_STAGED_COLUMNS, columns // next_power_of_2(int_knob(knobs, "NUM_KSPLIT")))
    room = _MAX_SHARED_BYTES - _ring_bytes(knobs)
    halved = int_knob(knobs, "NUM_KSPLIT") > 1 or 2 * math_warpgroups(knobs) * WARPGROUP_M * columns > room
    return columns // 2 if columns >= 2 * _STAGED_COLUMNS and halved else columns


def hopper_tile_violation(spec: GemmSpec, knobs: Knobs, device: Device, widest: MaxColumns) -> str | None:
    """`rule: detail` of the first rule on the ring and the registers that a product of these sizes breaks, or None."""
    m, n, stages = (int_knob(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
    size = int(element_bytes(spec.x_dtype))
    if device.kind == "cpu":
        return NO_GPU
    if device.gfx != "sm_90":
        return f"architecture: warpgroup instructions are sm_90's, this is {device.gfx}"
    if spec.out_dtype not in DTYPES_16BIT:
        return f"output: {spec.out_dtype} does not fit in shared memory with the ring"
    # A descriptor's rows begin at multiples of 16 bytes.
    if spec.n % 8 or spec.k * size % 16:
        return f"alignment: N={spec.n} K={spec.k}, rows of a TMA descriptor begin at multiples of 16 bytes"
    waves = bool(widest.two_waves) and m == 4 * WARPGROUP_M
    if not (waves or m in (WARPGROUP_M, 2 * WARPGROUP_M)) or int_knob(knobs, "BLOCK_SIZE_K") * size != SLOT_ROW_BYTES:
        return f"tile: {m} rows, BLOCK_SIZE_K={knobs['BLOCK_SIZE_K']}; two warpgroups share 64 or 128 of 128 bytes"
    if math_warpgroups(knobs) == 1 and m != WARPGROUP_M:
        return f"{ONE_WARPGROUP}: a tile of {m} rows, one warpgroup multiplies {WARPGROUP_M}"
    if in_waves(knobs) and int_knob(knobs, "NUM_KSPLIT") > 1:
        return f"tile: {m} rows or {OWN_PACE}, which are not split along K"
    if waves and spec.m < m:
        return f"tile: {m} rows for M={spec.m}, no copy of x is partial"
    columns = warpgroup_columns(knobs)
    if alone_at_own_pace(knobs) and columns < _MIN_WAVE_COLUMNS:
        return f"{OWN_PACE}: at least {_MIN_WAVE_COLUMNS} columns"
    if in_waves(knobs) and (columns < _MIN_WAVE_COLUMNS or ctas_per_sm(knobs) > 1):
        return f"{OWN_PACE}: at least {_MIN_WAVE_COLUMNS} columns, and one program, which needs all registers"
    if math_warpgroups(knobs) == 1:
        widest = MAX_SINGLE_COLUMNS
    reason = _waves_violation(m, columns, widest) if waves else _columns_violation(spec, m, n, columns, widest)
    if reason:
        return reason
    needed = hopper_shared_bytes(knobs)
    if stages < 2 or needed > device.shared_bytes:
        return f"shared memory: about {needed} bytes for {stages} stages, {device.shared_bytes} per block"
    if part_columns(knobs) != columns and not views_of_parts():
        return f"compiler: triton {version('triton')} views whole buffers only, which a tile of {m}x{n} cannot use"
    return None


@cache
def views_of_parts() -> bool:
    """False for Triton 3.8, whose views of shared memory have the size of what they view; x's ring is a part of one.

    Versions 3.6, 3.7 and 3.9 compile such tiles.
    """
    return not version("triton").startswith("3.8.")


def _waves_violation(m: int, columns: int, widest: MaxColumns) -> str | None:
    """`rule: detail` if a warpgroup cannot hold the sums of two waves of so many columns, or None."""
    if columns % 16 or columns > widest.two_waves:
        return f"registers: {columns} columns in tiles of {m} rows, {_MIN_WAVE_COLUMNS} to {widest.two_waves} by 16 fit"
    return None


def _columns_violation(spec: GemmSpec, m: int, n: int, columns: int, widest: MaxColumns) -> str | None:
    """`rule: detail` if a warpgroup cannot hold its columns, or None."""
    if n & (n - 1):
        if not widest.parts:
            return f"tile: {m}x{n}, not a power of two; this kernel has no other tiles for the layout of this weight"
        if columns % 16 or spec.x_dtype not in ANY_N_DTYPES:
            return f"tile: {m}x{n} for {spec.x_dtype}, no power of two and no multiple of 16 columns per warpgroup"
        # These spill nothing with triton 3.6 and 3.9, but for block-scaled splits of 96 columns (3.9).
        most = widest.parts
    else:
        # Triton has no warpgroup instruction of int8 with 256 columns (3.6 and 3.9).
        most = min(widest.whole, 128) if spec.x_dtype == "int8" else widest.whole
    if not 16 <= columns <= most or n > 256:
        return f"registers: {columns} columns per warpgroup of a {m}x{n} tile, 16 to {most} fit"
    return None


def ctas_violation(knobs: Knobs, device: Device) -> str | None:
    """`rule: detail` if CTAS_PER_SM programs cannot share a multiprocessor, or None."""
    ctas, columns, needed = ctas_per_sm(knobs), warpgroup_columns(knobs), hopper_shared_bytes(knobs)
    if ctas not in REGISTERS:
        return f"{CTAS_PER_SM}: {ctas}, there are registers for 1 or 2 programs"
    most = TWO_CTAS_COLUMNS[math_warpgroups(knobs)]
    if ctas > 1 and (columns > most or ctas * (needed + 1024) > device.shared_bytes + 1024):
        return f"two programs: about {needed} bytes and {columns} columns per warpgroup, {most} fit the registers"
    return None


def cluster_violation(knobs: Knobs, grid: PersistentGrid) -> str | None:
    """`rule: detail` if the programs cannot form clusters, or None."""
    size = cluster_size(knobs)
    if size > MAX_PORTABLE_CLUSTER:
        return f"{CLUSTER_SIZE}: {size}, {MAX_PORTABLE_CLUSTER} programs are portable"
    if split_k_mode(knobs) == "cluster" and grid.programs != grid.work_tiles:
        return f"{CLUSTER_SIZE}: {grid.work_tiles} splits for {grid.programs} programs do not share clusters by tile"
    return None
