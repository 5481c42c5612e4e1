"""Constraints of all tiled Triton kernels, one `if` each, with the physical cause."""

from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import element_bytes, native_fp8
from gemmpipe.templates.params import CACHE_MODIFIERS, NO_GPU, SWAP_AB, int_knob
from gemmpipe.templates.tiled import WGMMA_M, workspace_bytes

_MIB = 2**20
_MAX_WORKSPACE_BYTES = 256 * _MIB
_MAX_GRID_Z = 65535
_MAX_ROW_ELEMENTS = 2**20  # 32-bit offsets in a tile of at most 256 rows (device_fns.row_offsets)
_POWER_OF_TWO_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")


def tile_violation(
    spec: GemmSpec,
    knobs: Knobs,
    device: Device,
    accumulators: int,
    *,
    layout: str = "nk",
    batched: bool = False,
    parts: bool = True,
    gathered: bool = False,
) -> str | None:
    """`rule: detail` of the first rule broken, or None.

    `accumulators`: fp32 tiles in registers at once; `layout`: the weight layout that the kernel reads;
    `batched`: it computes several products; `parts`: its splits of K are added up in a workspace;
    `gathered`: the addresses of x's rows take registers too.
    """
    m, n, k = (int_knob(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
    warps, stages = int_knob(knobs, "num_warps"), int_knob(knobs, "num_stages")
    if reason := launch_violation(spec, knobs, device, layout=layout, batched=batched):
        return reason
    # The smallest matrix instruction is 16 x 8 with 16 (16-bit), 32 (8-bit) or 64 (4-bit) along K; none is padded.
    least_k = int(32 / element_bytes(spec.x_dtype))
    if m < 16 or n < 16 or k < least_k:
        return f"minimum tile: {m}x{n}x{k}, a matrix instruction needs 16x16x{least_k}"
    held = accumulators * m * n // (warps * device.warp_size)
    most = _most_accumulators(spec, knobs, device, alone=accumulators == 1 and not gathered)
    if most is not None and held > most:
        return f"registers: {held} accumulator registers per thread, {most} leave none for operands"
    needed = shared_bytes(spec, m, n, k, stages, device, swapped=bool(knobs.get(SWAP_AB)))
    if needed > device.shared_bytes:
        return f"shared memory: about {needed} bytes, {device.shared_bytes} per block on {device.gfx}"
    return workspace_violation(workspace_bytes(spec, knobs)) if parts else None


def workspace_violation(needed: int) -> str | None:
    """`rule: detail` if the parts of split-K need more than the workspace limit, or None."""
    if needed > _MAX_WORKSPACE_BYTES:
        return f"workspace: {needed // _MIB} MiB of split-K parts, over {_MAX_WORKSPACE_BYTES // _MIB}"
    return None


def launch_violation(
    spec: GemmSpec, knobs: Knobs, device: Device, *, layout: str = "nk", batched: bool = False
) -> str | None:
    """`rule: detail` of the first rule broken that does not depend on the tile size, or None."""
    if device.kind == "cpu":
        return NO_GPU
    if spec.w_layout != layout:
        return f"weight layout: this kernel reads '{layout}', not '{spec.w_layout}'"
    if spec.experts is not None:
        return "experts: this kernel computes one product"
    if spec.batch != 1 and not batched:
        return "batch: this kernel computes one product"
    if spec.batch > _MAX_GRID_Z:
        return f"grid: {spec.batch} products, at most {_MAX_GRID_Z} programs in its third dimension"
    if spec.k >= _MAX_ROW_ELEMENTS:
        return f"row: K={spec.k}, offsets within a tile are 32 bits, {_MAX_ROW_ELEMENTS} is the limit"
    if reason := _fp8_violation(spec, device):
        return reason
    if reason := _size_violation(knobs):
        return reason
    if int_knob(knobs, "num_warps") * device.warp_size > 1024:
        return f"threads: {knobs['num_warps']} warps of {device.warp_size} are over 1024 per block"
    return None


def shared_bytes(spec: GemmSpec, m: int, n: int, k: int, stages: int, device: Device, *, swapped: bool = False) -> int:
    """Estimated shared memory of a block: at most a few kB above the compiler's (600 builds, triton 3.6 and 3.9)."""
    stage = int((m + n) * k * element_bytes(spec.x_dtype))
    if spec.x_scale is not None and spec.x_scale.dtype != "float32":
        return _microscaled_bytes(stage, m, n, k, stages, device)
    scales = 4 * (m + n)
    if device.vendor == "amd":
        return _amd_bytes(spec, m, n, k, stages, device)
    # The warpgroup instruction reads shared memory while later stages arrive; narrow tiles are read to registers first.
    held = stages if m >= WGMMA_M or swapped else max(stages - 1, 1)
    return max(held * stage + stages * scales, 4 * m * n)  # the ring, then the fp32 tile on its way to the output


def _amd_bytes(spec: GemmSpec, m: int, n: int, k: int, stages: int, device: Device) -> int:
    """LDS of 8- and 16-bit operands (compared with 280 builds, triton 3.9)."""
    by_block = spec.x_scale is not None and spec.x_scale.granularity == "block"
    scales = 4 * (m + n) if by_block else 0
    if stages == 1:  # the smaller operand goes to registers directly
        ring = int(max(m, n) * k * element_bytes(spec.x_dtype))
    elif device.gfx == "gfx950":  # copies go straight to LDS, where every row is padded by a sixteenth
        ring = int((m + n) * k * element_bytes(spec.x_dtype)) * stages * 17 // 16
    else:  # one stage is in registers
        ring = int((m + n) * k * element_bytes(spec.x_dtype)) * (stages - 1)
    # Small tiles change their layout on the way to the output; no build did so for a large one.
    return max(ring + scales, 2 * m * n if m * n <= 128 * 128 else 0)


def _microscaled_bytes(stage: int, m: int, n: int, k: int, stages: int, device: Device) -> int:
    """Shared memory for 4-bit operands, one-byte scales of 32 elements along K (150 builds compared, triton 3.9)."""
    scales = (m + n) * k // 32
    if device.vendor == "amd":
        if stages == 1:  # one operand changes its layout on the way to the registers
            return max(m, n) * k // 2
        return (
            stages * (stage * 17 // 16 + scales // 2 + 64)
            if device.gfx == "gfx950"
            else (stages - 1) * stage + 2 * scales
        )
    # The warpgroup instruction reads the decoded bf16 weight from shared memory; sm_100 decodes none of 128 rows on.
    if m < WGMMA_M or (m >= 2 * WGMMA_M and int(device.gfx.removeprefix("sm_")) >= 100):
        return max(stages - 1, 1) * stage + 2 * scales
    return 1088 + (max(stage, 2 * n * k) if stages == 1 else (stages - 1) * stage + 2 * n * k)


def _most_accumulators(spec: GemmSpec, knobs: Knobs, device: Device, *, alone: bool) -> int | None:
    """The accumulator registers per thread that leave some for operands, or None: they take none.

    A thread has 255 registers on NVIDIA, 512 on AMD's matrix cores, 256 on RDNA: accumulators beyond that spill. On
    sm_100 a sum stays in tensor memory until it is stored. That of scaled 4-bit products is stored piece by piece, so
    that a tile of any size fits; others are read to registers as a whole. `alone`: no second sum and no gathered rows
    need registers then, and 256 values are spilled by 16 bytes at most, 512 by 80 and more (triton 3.9).
    """
    if device.vendor == "amd":
        return 480 if device.warp_size == 64 else 240
    if int(device.gfx.removeprefix("sm_")) >= 100 and knobs["NUM_KSPLIT"] == 1:
        if spec.x_dtype.startswith("float4"):
            return None
        if alone:
            return 256
    return 240


def _size_violation(knobs: Knobs) -> str | None:
    """`rule: detail` unless tile sides and warps are powers of two and the other counts at least 1."""
    for name in _POWER_OF_TWO_KNOBS:
        if int_knob(knobs, name) < 1 or int_knob(knobs, name) & (int_knob(knobs, name) - 1):
            return f"power of two: {name}={knobs[name]}, as tl.arange and warps need"
    if knobs["cache_modifier"] not in CACHE_MODIFIERS:
        return f"cache modifier: {knobs['cache_modifier']!r}, a load takes '', '.ca' or '.cg'"
    for name in ("num_stages", "GROUP_SIZE_M", "NUM_KSPLIT"):
        if int_knob(knobs, name) < 1:
            return f"positive: {name}={knobs[name]}"
    return None


def _fp8_violation(spec: GemmSpec, device: Device) -> str | None:
    """Only gfx942 multiplies e4m3fnuz; all others multiply e4m3fn (emulated, hence slow, on gfx942)."""
    if not spec.x_dtype.startswith("float8"):
        return None
    native = native_fp8(device.gfx)
    if spec.x_dtype != native:
        return f"fp8 format: {device.gfx} multiplies {native}, not {spec.x_dtype}"
    if device.kind == "cuda" and int(device.gfx.removeprefix("sm_")) < 89:
        return f"fp8 format: {device.gfx} has no fp8 matrix instructions"
    return None
