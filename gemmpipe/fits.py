"""The rules that every tiled Triton kernel has in common, one `if` each, with the physical cause."""

from gemmpipe.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.tiled import SWAP, integer, workspace_bytes

_WGMMA_ROWS = 64
_MIB = 2**20
_WORKSPACE_BYTES = 256 * _MIB
_GRID = 65535
_POWERS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")


def tile_misfit(
    spec: GemmSpec,
    knobs: Knobs,
    device: Device,
    accumulators: int,
    *,
    layout: str = "nk",
    batched: bool = False,
    parts: bool = True,
) -> str | None:
    """`rule: detail` of the first rule broken.

    `accumulators` is how many fp32 tiles live in registers at once; `layout` the weight's that the kernel reads;
    `batched` whether it computes several products; `parts` whether its splits of K meet in a workspace.
    """
    m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
    warps, stages = integer(knobs, "num_warps"), integer(knobs, "num_stages")
    if device.kind == "cpu":
        return "no GPU: Triton compiles for GPUs"
    if spec.w_layout != layout:
        return f"weight layout: this kernel reads '{layout}', not '{spec.w_layout}'"
    if spec.experts is not None:
        return "experts: this kernel computes one product"
    if spec.batch != 1 and not batched:
        return "batch: this kernel computes one product"
    if spec.batch > _GRID:
        return f"grid: {spec.batch} products, at most {_GRID} programs in its third dimension"
    if reason := _wrong_fp8(spec, device):
        return reason
    if reason := _no_size(knobs):
        return reason
    # The smallest matrix instruction is 16 x 8 with 16 (16-bit), 32 (8-bit) or 64 (4-bit) along K; none is padded.
    least_k = int(32 / element_bytes(spec.x_dtype))
    if m < 16 or n < 16 or k < least_k:
        return f"minimum tile: {m}x{n}x{k}, a matrix instruction needs 16x16x{least_k}"
    # A tile of 64 rows can pay even for M = 16, as Hopper's warpgroup instruction starts there (measured on an H200,
    # 2026-11-21); with more, at least half of the rows are padding and there is no wider instruction to gain.
    if m > _WGMMA_ROWS and m >= 2 * _next_power(spec.m):
        return f"tile beyond the problem: {m} rows for M={spec.m}"
    if n > _WGMMA_ROWS and n >= 2 * _next_power(spec.n):
        return f"tile beyond the problem: {n} columns for N={spec.n}"
    if min(m, n) < int(knobs.get("matrix_instr_nonkdim") or 0):
        return f"matrix instruction: {knobs['matrix_instr_nonkdim']} wide, the tile {m}x{n}"
    # Swapped operands gain nothing but the 64-row instruction of Hopper and later, for few rows.
    if knobs.get(SWAP) and (device.vendor != "nvidia" or n < _WGMMA_ROWS or m > _WGMMA_ROWS):
        return f"swapped operands: a {m}x{n} tile on {device.gfx} has no wider side to offer"
    if warps * device.warp_size > 1024:
        return f"threads: {warps} warps of {device.warp_size} are over 1024 a block"
    # A thread has 255 registers on NVIDIA, 512 on AMD's matrix cores: accumulators beyond that spill in the K loop.
    held, most = accumulators * m * n // (warps * device.warp_size), 480 if device.vendor == "amd" else 240
    if held > most:
        return f"registers: {held} accumulator registers a thread, {most} leave none for operands"
    needed = shared_bytes(spec, m, n, k, stages, device)
    if needed > device.shared_bytes:
        return f"shared memory: about {needed} bytes, {device.shared_bytes} a block on {device.gfx}"
    if parts and workspace_bytes(spec, knobs) > _WORKSPACE_BYTES:
        return (
            f"workspace: {workspace_bytes(spec, knobs) // _MIB} MiB of split-K parts, over {_WORKSPACE_BYTES // _MIB}"
        )
    return None


def shared_bytes(spec: GemmSpec, m: int, n: int, k: int, stages: int, device: Device) -> int:
    """At most a few kB more than the compiler will ask for (held against 500 builds of triton 3.6 and 3.9)."""
    stage = int((m + n) * k * element_bytes(spec.x_dtype))
    if spec.x_scale is not None and spec.x_scale.dtype != "float32":
        return _microscaled_bytes(stage, m, n, k, stages, device)
    scales = 4 * (m + n)
    if device.gfx == "gfx950":  # copies go straight to LDS, where every row is padded by a sixteenth
        return (stages * stage * 17 // 16 if stages > 1 else stage) + scales
    if device.vendor == "amd":  # one stage is in registers
        return max(max(stages - 1, 1) * stage + scales, m * n * (4 if spec.out_dtype == "float32" else 2))
    return max(stages * (stage + scales), 4 * m * n)  # the ring, then the fp32 tile on its way to the output


def _microscaled_bytes(stage: int, m: int, n: int, k: int, stages: int, device: Device) -> int:
    """As above for 4-bit operands with a one-byte scale for every 32 along K (held against 150 builds, triton 3.9)."""
    scales = (m + n) * k // 32
    if device.vendor == "amd":
        if stages == 1:  # one operand changes its layout on the way to the registers
            return max(m, n) * k // 2
        return stages * (stage * 17 // 16 + scales) if device.gfx == "gfx950" else (stages - 1) * stage + 2 * scales
    # The warpgroup instruction reads the decoded bf16 weight from shared memory; sm_100 decodes none of 128 rows on.
    if m < _WGMMA_ROWS or (m >= 2 * _WGMMA_ROWS and int(device.gfx.removeprefix("sm_")) >= 100):
        return max(stages - 1, 1) * stage + 2 * scales
    return 1024 + (max(stage, 2 * n * k) if stages == 1 else (stages - 1) * stage + 2 * n * k)


def element_bytes(dtype: str) -> float:
    """0.5 for 4-bit operands, 1 for 8-bit, 2 for 16-bit ones."""
    if dtype.startswith("float4"):
        return 0.5
    return 1 if dtype.startswith("float8") or dtype == "int8" else 2


def _no_size(knobs: Knobs) -> str | None:
    """Tile sides and warps are powers of two, the rest at least 1."""
    for name in _POWERS:
        if integer(knobs, name) < 1 or integer(knobs, name) & (integer(knobs, name) - 1):
            return f"power of two: {name}={knobs[name]}, as tl.arange and warps need"
    if knobs["cache_modifier"] not in ("", ".ca", ".cg"):
        return f"cache modifier: {knobs['cache_modifier']!r}, a load takes '', '.ca' or '.cg'"
    for name in ("num_stages", "GROUP_SIZE_M", "NUM_KSPLIT"):
        if integer(knobs, name) < 1:
            return f"positive: {name}={knobs[name]}"
    return None


def _wrong_fp8(spec: GemmSpec, device: Device) -> str | None:
    """e4m3fnuz is multiplied by gfx942 alone, e4m3fn by everything else (emulated, hence slow, on gfx942)."""
    if not spec.x_dtype.startswith("float8"):
        return None
    native = "float8_e4m3fnuz" if device.gfx == "gfx942" else "float8_e4m3fn"
    if spec.x_dtype != native:
        return f"fp8 format: {device.gfx} multiplies {native}, not {spec.x_dtype}"
    if device.kind == "cuda" and int(device.gfx.removeprefix("sm_")) < 89:
        return f"fp8 format: {device.gfx} has no fp8 matrix instructions"
    return None


def _next_power(value: int) -> int:
    return 1 << (value - 1).bit_length()
