"""`deepgemm`: DeepSeek's fp8 block-scaled kernels: the package's own choice, and its kernel for Hopper tile by tile.

The package is found alone or within vLLM's wheel. Its own choice is a call of `fp8_gemm_nt`, which compiles when it is
first called; a tile is compiled from the package's headers beforehand, like our kernels, and needs no extension.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.cuda_driver import Grid, Matrix, aligned_rows, scales_for_copy_engine
from gemmpipe.backends.deepgemm_build import load_tile, tile_build, toolkit_problem
from gemmpipe.backends.deepgemm_package import DeepGemmPackage, find_package, load_module, no_package_reason
from gemmpipe.backends.deepgemm_tiles import K_BLOCK, PRODUCER_THREADS, Tile, likely_tiles
from gemmpipe.backends.packages import also_missing
from gemmpipe.backends.scaled_mm import scaled_mm_violation
from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, Launch, Prepared, Weights

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


_TILE_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "multicast", "num_stages")


@dataclass(frozen=True, kw_only=True)
class DeepGemm(Backend):
    """With a tile as knobs: the library's kernel with this tile. Without knobs: its own choice (`fp8_gemm_nt`)."""

    label = "deepgemm"
    reads_strides = False
    tiles: int = 4
    """The number of tiles per product, those that the library's model of time ranks first."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """The family's own launches around the library's kernels, where it has some; else the backend itself."""
        return (family.library_kernels.get(self.label, self),)

    def unavailable(self, device: Device) -> str | None:
        """It needs an NVIDIA GPU and the package, alone or within vLLM."""
        package = find_package()
        missing = no_package_reason() if package is None else None
        if device.kind != "cuda":
            return also_missing("no NVIDIA GPU: DeepGEMM has kernels for NVIDIA only", missing)
        if package is None:
            return missing
        extension = package.extension_problem()
        return None if extension is None or tiles_problem(package, device) is None else extension

    def form_violation(self, spec: GemmSpec) -> str | None:
        """1x128 by 128x128 scales and bf16 output."""
        return _form_violation(spec)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Tiles, of which the first is the library's choice; that choice by a call where tiles cannot be compiled.

        A call compiles on the worker that times it, which waits for 4 s; tiles are compiled beforehand, in parallel.
        """
        package = find_package()
        if package is None or tiles_problem(package, device) is not None:
            yield {}
        elif _violation(spec, device) is None:
            for tile in likely_tiles(spec, device, self.tiles):
                yield tile.knobs(spec.k, device.shared_bytes)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """Those of a tile."""
        return _TILE_KNOBS

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """1x128 by 128x128 scales and bf16 output; any M. For tiles also the kernel's own rules."""
        if reason := _violation(spec, device):
            return reason
        if not knobs:
            return None
        if set(knobs) != set(_TILE_KNOBS):
            return f"knobs: expected none, or {', '.join(_TILE_KNOBS)}"
        package, tile, stages = find_package(), Tile.of(knobs), int(str(knobs["num_stages"]))
        problem = no_package_reason() if package is None else tiles_problem(package, device)
        if problem or (problem := tile.violation(spec, device)):
            return problem
        most = tile.stages(spec.k, device.shared_bytes)
        return None if 0 < stages <= most else f"stages: {stages}, {most} fit"

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """A tile's; the library compiles its own choice by itself."""
        return (tile_build(spec, Tile.of(knobs), int(str(knobs["num_stages"])), device),) if knobs else ()

    def kernel_name(self, knobs: Knobs) -> str:
        """`deepgemm`, or `deepgemm_128x160_x` for a tile that shares rows of x with the next one."""
        if not knobs:
            return self.label
        tile = Tile.of(knobs)
        shared = "" if tile.multicast == "none" else f"_{tile.multicast}"
        return f"{self.label}_{tile.rows}x{tile.columns}{shared}"

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The stored weight, contiguous and aligned as the kernel reads it; checkpoints' weights are."""
        scales = weights.w_scale if weights.w_scale is None else weights.w_scale.contiguous()
        return Prepared(weights=replace(weights, w=aligned_rows(weights.w), w_scale=scales))

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """Scales of x in any order: those that are not M-major and padded are copied within the call."""
        if inputs.x_scale is None or prepared.weights.w_scale is None:
            raise ValueError("deepgemm needs the scales of both operands")
        if knobs:
            return _bind_tile(spec, knobs, device, inputs, prepared, out)
        multiply = load_module().fp8_gemm_nt
        weights = prepared.weights
        x, w = (inputs.x, inputs.x_scale), (weights.w, weights.w_scale)

        def launch() -> "torch.Tensor":
            multiply(x, w, out)
            return out

        return launch


def _violation(spec: GemmSpec, device: Device) -> str | None:
    """`rule: detail` of the first rule that the product breaks, or None."""
    return _form_violation(spec) or scaled_mm_violation(replace(spec, m=4), device)


def _form_violation(spec: GemmSpec) -> str | None:
    if spec.x_scale is None or spec.x_scale.granularity != "block":
        return "scales: 1x128 x 128x128 only"
    return None if spec.out_dtype == "bfloat16" else f"output: bfloat16 only, not {spec.out_dtype}"


def tiles_problem(package: DeepGemmPackage, device: Device) -> str | None:
    """Why no tile can run, or None."""
    if device.gfx != "sm_90":
        return f"tiles: DeepGEMM's kernel of tiles is for sm_90, not {device.gfx}"
    return package.headers_problem() or toolkit_problem()


def _bind_tile(
    spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
) -> Launch:
    """The launch of a tile's kernel: one program per SM, which goes through the tiles."""
    import torch

    tile, stages = Tile.of(knobs), int(str(knobs["num_stages"]))
    x, w, w_scale = aligned_rows(inputs.x), prepared.weights.w, prepared.weights.w_scale
    assert w_scale is not None and inputs.x_scale is not None
    x_scale, copy_scales = scales_for_copy_engine(inputs.x_scale)
    grid = Grid(
        programs=device.cu_num,
        threads=PRODUCER_THREADS + tile.consumer_threads,
        shared_bytes=tile.shared_bytes(spec.k, stages),
        cluster=tile.cluster,
    )
    maps = [matrix.encode() for matrix in _matrices(spec, tile, (x, w, x_scale), out)]
    sizes = [ctypes.c_uint32(size) for size in (spec.m, spec.n, spec.k)]
    arguments = [ctypes.c_void_p(w_scale.data_ptr()), ctypes.c_void_p(None), *sizes, *maps]
    run = load_tile(tile_build(spec, tile, stages, device), device).launcher(grid, arguments)
    stream, index, held = torch._C._cuda_getCurrentRawStream, out.device.index, (x, w, x_scale, w_scale)

    def launch() -> torch.Tensor:
        assert held
        copy_scales()
        run(stream(index))
        return out

    return launch


def _matrices(
    spec: GemmSpec, tile: Tile, operands: "tuple[torch.Tensor, ...]", out: "torch.Tensor"
) -> tuple[Matrix, ...]:
    """The descriptors' matrices in the kernel's order: x, w, the output, and the scales of x with a line per block."""
    x, w, x_scale = operands
    row = {"kind": "bytes", "columns": spec.k, "swizzle": K_BLOCK}
    out_columns = tile.out_swizzle // 2
    return (
        Matrix(address=x.data_ptr(), rows=spec.m, row_bytes=spec.k, box=(tile.rows, K_BLOCK), **row),  # type: ignore[arg-type]
        Matrix(address=w.data_ptr(), rows=spec.n, row_bytes=spec.k, box=(tile.columns, K_BLOCK), **row),  # type: ignore[arg-type]
        Matrix(
            address=out.data_ptr(),
            kind="bfloat16",
            rows=spec.m,
            columns=spec.n,
            row_bytes=out.stride(0) * 2,
            box=(tile.rows, out_columns),
            swizzle=tile.out_swizzle,
        ),
        Matrix(
            address=x_scale.data_ptr(),
            kind="float32",
            rows=x_scale.shape[1],
            columns=spec.m,
            row_bytes=x_scale.stride(1) * 4,
            box=(1, tile.rows),
        ),
    )
