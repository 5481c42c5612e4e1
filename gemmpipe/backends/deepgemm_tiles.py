"""Tiles of DeepGEMM's block-scaled kernel for Hopper, with its rules and its model of their time, and its parameters.

The kernel is `sm90_fp8_gemm_1d2d_impl` of the package's headers: persistent, one producer, one or two consumers. The
rules and the model are those of `SM90ArchSpec` (csrc/jit_kernels/heuristics/sm90.hpp, version 2.5).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.templates.tiled import ceil_div

K_BLOCK = 128
"""Columns of x and w per stage, which is the block of the scales."""
PRODUCER_THREADS = 128
MULTICAST = ("none", "x", "w")
"""The operand that two adjacent programs share: none, x (adjacent along N) or w (along M)."""
GROUPED = "MGroupedContiguousWithPsumLayout"
"""The kind of grouped product: the rows of all groups in one matrix, `grouped_layout` has the end of each group's."""
_MAX_STAGES = 16
_WGMMA_ROWS = 64
_L2_BYTES_PER_CYCLE, _L1_BYTES_PER_CYCLE = 8e6 / 1.3e3, 128
_TEMPLATE = re.compile(
    r"template\s*<([^<>]*)>\s*CUTLASS_GLOBAL[^{;]*?sm90_fp8_gemm_1d2d_impl\s*\(([^{]*?)\)\s*\{", re.DOTALL
)
_LAUNCH_PARAMETERS = (
    *("sfb", "grouped_layout", "shape_m", "shape_n", "shape_k"),
    *("tensor_map_a", "tensor_map_b", "tensor_map_d", "tensor_map_sfa"),
)
"""The parameters that a launch here passes."""


@dataclass(frozen=True, kw_only=True, order=True)
class Tile:
    """A tile of the output, and the operand that adjacent programs share."""

    rows: int
    columns: int
    multicast: str = "none"

    @classmethod
    def of(cls, knobs: Knobs) -> "Tile":
        """The tile of a candidate. Raises KeyError for a missing knob."""
        return cls(
            rows=int(str(knobs["BLOCK_SIZE_M"])),
            columns=int(str(knobs["BLOCK_SIZE_N"])),
            multicast=str(knobs.get("multicast", "none")),
        )

    def knobs(self, k: int, shared_bytes: int) -> dict[str, Scalar]:
        """The candidate's knobs; as many stages as fit, as the package chooses."""
        return {
            "BLOCK_SIZE_M": self.rows,
            "BLOCK_SIZE_N": self.columns,
            "multicast": self.multicast,
            "num_stages": self.stages(k, shared_bytes),
        }

    @property
    def cluster(self) -> int:
        """Programs that share operands."""
        return 1 if self.multicast == "none" else 2

    @property
    def consumer_threads(self) -> int:
        """One warpgroup, or two for more rows than one instruction has."""
        return 128 if self.rows <= _WGMMA_ROWS else 256

    @property
    def out_swizzle(self) -> int:
        """Bytes of the output's pattern in shared memory."""
        return next(mode for mode in (128, 64, 32, 16) if self.columns * 2 % mode == 0)

    def stages(self, k: int, shared_bytes: int) -> int:
        """The stages that fit into shared memory."""
        fixed = self._fixed_bytes(k)
        return min((shared_bytes - fixed) // self._stage_bytes, _MAX_STAGES)

    def shared_bytes(self, k: int, stages: int) -> int:
        """Shared memory of a launch."""
        return self._fixed_bytes(k) + stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.columns) * K_BLOCK + _align(self.rows * 4, 128)

    def _fixed_bytes(self, k: int) -> int:
        """Output, barriers and the scales of w for the tile's columns."""
        rows_of_scales = 1 if K_BLOCK % self.columns == 0 else 2
        scales = _align(ceil_div(k, K_BLOCK) * 4 * rows_of_scales, 8)
        return _align(self.rows * self.columns * 2, 1024) + _MAX_STAGES * 16 + scales

    def violation(self, spec: GemmSpec, device: Device) -> str | None:
        """`rule: detail` of the first rule of the package's that it breaks, or None."""
        if self.rows not in (16, 32, 64, 128, 256) or self.columns not in range(16, 193, 16):
            return f"tile: {self.rows}x{self.columns}, expected 16 to 256 rows and 16 to 192 columns"
        if self.rows < _WGMMA_ROWS and spec.m > self.rows:
            return f"tile: {self.rows} rows are for M <= {self.rows}"
        over = self.columns - K_BLOCK
        if over > 0 and self.columns % over and K_BLOCK % over:
            return f"tile: its scales of w cannot be unrolled with {self.columns} columns"
        if self.rows > 128 and self.columns > 128:
            return f"registers: a tile of {self.rows}x{self.columns} is too large"
        if self.multicast not in MULTICAST:
            return f"multicast: {self.multicast!r}, expected one of {', '.join(MULTICAST)}"
        if device.cu_num % self.cluster:
            return f"multicast: {device.cu_num} SMs are no pairs"
        least = 3 if self.rows * self.columns >= 128 * 192 else 4
        if (stages := self.stages(spec.k, device.shared_bytes)) < least:
            return f"stages: {stages} fit, expected {least}"
        return None

    def cycles(self, spec: GemmSpec, device: Device) -> float:
        """The package's estimate of the product's time, in cycles; infinite for pairs that run in one wave."""
        blocks = ceil_div(spec.m, self.rows) * ceil_div(spec.n, self.columns)
        waves = ceil_div(blocks, device.cu_num)
        if self.cluster > 1 and waves <= 1:
            return float("inf")
        x_rows = self.rows // (2 if self.multicast == "x" else 1)
        w_rows = self.columns // (2 if self.multicast == "w" else 1)
        out = self.rows * self.columns * 2
        l2 = (spec.k * (x_rows + w_rows) + out) * blocks / min(64 * device.cu_num, _L2_BYTES_PER_CYCLE)
        read = spec.k * (self.rows + self.columns + max(_WGMMA_ROWS, self.rows) + self.columns)
        l1 = (read + 2 * out) * blocks / (_L1_BYTES_PER_CYCLE * device.cu_num)
        return max(l1, l2) * waves * device.cu_num / blocks


def ranked_tiles(spec: GemmSpec, device: Device) -> tuple[Tile, ...]:
    """All tiles that can compute a product, by the package's estimate; the first is its own choice."""
    return tuple(sorted(_all_tiles(spec, device), key=lambda tile: tile.cycles(spec, device)))


def likely_tiles(spec: GemmSpec, device: Device, limit: int) -> tuple[Tile, ...]:
    """The first `limit` by the estimate, without pairs that differ from one of them in `multicast` alone.

    Sharing changes the time by a few percent (H200, 2026-11-22: 0.98 to 1.04), another tile by more.
    """
    chosen: dict[tuple[int, int], Tile] = {}
    for tile in ranked_tiles(spec, device):
        chosen.setdefault((tile.rows, tile.columns), tile)
    return tuple(chosen.values())[:limit]


def _all_tiles(spec: GemmSpec, device: Device) -> Iterator[Tile]:
    """In the package's order: without sharing first, rows before columns."""
    for multicast in ("none", "x", "w"):
        for rows in (64, 128, 16, 32, 256):
            for columns in range(16, 193, 16):
                tile = Tile(rows=rows, columns=columns, multicast=multicast)
                if tile.violation(spec, device) is None:
                    yield tile


def source(header: str, tile: Tile, *, n: int, k: int, stages: int, programs: int, groups: int = 0) -> str:
    """CUDA source that instantiates the kernel of `header`, with N and K as constants as the package compiles it.

    `groups`: weights of their own for so many groups of rows, each of which begins a tile (see GROUPED); 0: one weight.
    Raises ValueError if the header's kernel has parameters that are not known here.
    """
    sizes = {"SHAPE_M": 0, "SHAPE_N": n, "SHAPE_K": k, "kNumGroups": max(1, groups), "kNumSMs": programs}
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": K_BLOCK}
    swizzles = {"kSwizzleAMode": K_BLOCK, "kSwizzleBMode": K_BLOCK, "kSwizzleDMode": tile.out_swizzle}
    threads = {"kNumTMAThreads": PRODUCER_THREADS, "kNumMathThreads": tile.consumer_threads, "kNumStages": stages}
    sharing = {"kNumTMAMulticast": tile.cluster, "kIsTMAMulticastOnA": str(tile.multicast == "x").lower()}
    kind = f"GemmType::{GROUPED if groups else 'Normal'}"
    types = {"kMajorSFB": "cute::UMMA::Major::K", "kGemmType": kind, "cd_dtype_t": "cutlass::bfloat16_t"}
    epilogue = {"epilogue_type_t": "epilogue::transform::EpilogueIdentity"}
    values = {**sizes, **blocks, **swizzles, **threads, **sharing, **types, **epilogue}
    arguments = ", ".join(str(values[name]) for name in _template_parameters(header, values))
    return (
        "#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>\n\nusing namespace deep_gemm;\n\n"
        "static void instantiate() {\n"
        f"    auto kernel = reinterpret_cast<void*>(&sm90_fp8_gemm_1d2d_impl<{arguments}>);\n}};\n"
    )


def header_violation(header: str) -> str | None:
    """Why a header's kernel cannot be instantiated and launched here, or None."""
    try:
        source(header, Tile(rows=64, columns=64), n=128, k=128, stages=4, programs=2)
    except ValueError as error:
        return str(error)
    return None


def _template_parameters(header: str, known: object) -> list[str]:
    """The names of the kernel's template parameters."""
    found = _TEMPLATE.search(header)
    if found is None:
        raise ValueError("DeepGEMM's headers have no kernel sm90_fp8_gemm_1d2d_impl")
    names, parameters = ([part.split()[-1].lstrip("*&") for part in text.split(",")] for text in found.groups())
    if tuple(parameters) != _LAUNCH_PARAMETERS:
        raise ValueError("DeepGEMM's headers are of another version: the kernel takes other arguments")
    if unknown := [name for name in names if name not in known]:  # type: ignore[operator]
        raise ValueError(f"DeepGEMM's headers are of another version: template parameter {unknown[0]}")
    return names


def _align(value: int, step: int) -> int:
    return ceil_div(value, step) * step
