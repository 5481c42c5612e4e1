"""What fits where: the rules of Hopper's warp-specialised kernels, one `if` each, with the physical cause."""

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import CLUSTER, CTAS, PORTABLE_CLUSTER, integer
from gemmpipe.templates.warp_specialised_tiles import (
    ANY_COLUMNS,
    GROUP_ROWS,
    REGISTERS,
    ROW_BYTES,
    Grid,
    Widest,
    cluster_of,
    columns_of,
    ctas_of,
    shared_bytes,
    summed_by,
)


def tile_misfit(spec: GemmSpec, knobs: Knobs, device: Device, widest: Widest) -> str | None:
    """The first rule that a product of these sizes breaks on the ring and the registers, or None."""
    m, n, stages = (integer(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
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
    if m not in (GROUP_ROWS, 2 * GROUP_ROWS) or integer(knobs, "BLOCK_SIZE_K") * size != ROW_BYTES:
        return f"tile: {m} rows, BLOCK_SIZE_K={knobs['BLOCK_SIZE_K']}; two warpgroups share 64 or 128 of 128 bytes"
    if reason := _columns_misfit(spec, m, n, columns_of(knobs), widest):
        return reason
    needed = shared_bytes(knobs)
    if stages < 2 or needed > device.shared_bytes:
        return f"shared memory: about {needed} bytes for {stages} stages, {device.shared_bytes} a block"
    return None


def _columns_misfit(spec: GemmSpec, m: int, n: int, columns: int, widest: Widest) -> str | None:
    """Why a warpgroup cannot hold so many columns, or None."""
    if n & (n - 1):
        if not widest.parts:
            return f"tile: {m}x{n}, no power of two; this kernel has no other tiles for the layout of this weight"
        if columns % 16 or spec.x_dtype not in ANY_COLUMNS:
            return f"tile: {m}x{n}, no power of two and not of 16 columns a warpgroup, for {spec.x_dtype}"
        # These spill nothing with triton 3.6 and 3.9, but for block-scaled splits of 96 columns: two registers (3.9).
        most = widest.parts
    else:
        # Triton has no warpgroup instruction of int8 with 256 columns (3.6 and 3.9).
        most = min(widest.whole, 128) if spec.x_dtype == "int8" else widest.whole
    if not 16 <= columns <= most or n > 256:
        return f"registers: {columns} columns a warpgroup of a {m}x{n} tile, 16 to {most} are held"
    return None


def crowded(knobs: Knobs, device: Device) -> str | None:
    """Why so many programs cannot share a multiprocessor, or None."""
    ctas, columns, needed = ctas_of(knobs), columns_of(knobs), shared_bytes(knobs)
    if ctas not in REGISTERS:
        return f"{CTAS}: {ctas}, there are registers for 1 or 2 programs"
    if ctas > 1 and (columns > 32 or ctas * (needed + 1024) > device.shared_bytes + 1024):
        return f"two programs: about {needed} bytes and {columns} columns a warpgroup, 32 fit the registers"
    return None


def scattered(knobs: Knobs, grid: Grid) -> str | None:
    """Why a cluster cannot have these programs, or None."""
    size = cluster_of(knobs)
    if size > PORTABLE_CLUSTER:
        return f"{CLUSTER}: {size}, {PORTABLE_CLUSTER} programs are portable"
    if summed_by(knobs) == "cluster" and grid.programs != grid.pieces:
        return f"{CLUSTER}: {grid.pieces} splits for {grid.programs} programs, those of a tile would not meet"
    return None
