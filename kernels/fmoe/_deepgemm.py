"""The fused experts with DeepGEMM's grouped products: rows ordered, quantised, activated and summed by our kernels.

The products are those of its kernel for Hopper with a weight per group of rows, instantiated from its headers and
compiled by nvcc (gemmpipe.backends.deepgemm_build). What is around them is the form without FUSED_ACT of _gluon.py.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.backends.cuda_driver import Grid, Matrix
from gemmpipe.backends.deepgemm import tiles_problem
from gemmpipe.backends.deepgemm_build import grouped_problem, load_tile, tile_build
from gemmpipe.backends.deepgemm_package import find_package, no_package_reason
from gemmpipe.backends.deepgemm_tiles import K_BLOCK, PRODUCER_THREADS, Tile, ranked_tiles
from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Prepared
from gemmpipe.family.moe import require_experts, routing
from gemmpipe.kernels.fmoe._grouped_launch_plan import (
    TmaLaunchStep,
    grouped_launch_steps,
    grouped_scratch_shapes,
    has_block_scales,
    row_capacity,
)
from gemmpipe.kernels.fmoe._launch_plan import INT, ORDER_MODULE, LaunchStep, dtypes_of, order_scratch_shapes
from gemmpipe.launch.build import load_build
from gemmpipe.launch.workspace import SCRATCH, TensorShape
from gemmpipe.templates.hopper.constraints import WARPGROUP_M
from gemmpipe.templates.params import SCALE_BLOCK, int_knob
from gemmpipe.templates.tiled import ceil_div, next_power_of_2

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

_KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_N_2")
_ROWS = (64, 128)
_WIDTHS = 2  # of a product's tiles, those that the package's model ranks first
_AROUND: Mapping[str, Scalar] = {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": K_BLOCK, "GROUP_SIZE_M": 1, "num_stages": 4}


@dataclass(frozen=True, kw_only=True)
class DeepGemmExperts(Implementation):
    """`deepgemm`: fp8 by blocks; tiles of 64 or 128 rows, of some widths for either product."""

    label = "deepgemm"

    def unavailable(self, device: Device) -> str | None:
        """It needs an sm_90 GPU, the package's headers, alone or within vLLM, and nvcc."""
        package = find_package()
        if package is None:
            return no_package_reason()
        return tiles_problem(package, device) or grouped_problem()

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The sides of the tiles."""
        return _KNOBS

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """For either number of rows the widths that the package's model ranks first, combined."""
        if _violation(spec, device) is not None:
            return
        for rows in _ROWS:
            first, second = (_widths(product, rows, device) for product in _products(spec, rows))
            yield from ({"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": a, "BLOCK_SIZE_N_2": b} for a in first for b in second)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if reason := _violation(spec, device):
            return reason
        if set(knobs) != set(_KNOBS):
            return f"knobs: expected {', '.join(_KNOBS)}"
        if int_knob(knobs, "BLOCK_SIZE_M") not in _ROWS:
            return f"tile: {knobs['BLOCK_SIZE_M']} rows, expected 64 or 128"
        for tile, product in zip(_tiles(knobs), _products(spec, int_knob(knobs, "BLOCK_SIZE_M")), strict=True):
            if reason := tile.violation(product, device):
                return reason
        return no_package_reason() if find_package() is None else grouped_problem()

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for blocks that are mostly padding (an expert gets M rows at most), or None."""
        rows = int_knob(knobs, "BLOCK_SIZE_M")
        if rows > WARPGROUP_M and rows >= 2 * next_power_of_2(spec.m):
            return f"tile beyond the problem: {rows} rows for at most {spec.m} per expert"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """Our launches', and the two products'."""
        own = (build for _, build in _planned(spec, int_knob(knobs, "BLOCK_SIZE_M"), device) if build is not None)
        return tuple(dict.fromkeys([*own, *_product_builds(spec, knobs, device)]))

    def kernel_name(self, knobs: Knobs) -> str:
        """`deepgemm_grouped_128x160_128`."""
        rows, first, second = (knobs[name] for name in _KNOBS)
        return f"deepgemm_grouped_{rows}x{first}_{second}"

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The launches in order; the tensors between them are the current stream's scratch."""
        ids, shares = routing(inputs)
        rows, weights = int_knob(knobs, "BLOCK_SIZE_M"), prepared.weights
        tensors: dict[str, torch.Tensor | None] = {"x": inputs.x, "ids": ids, "shares": shares, "out": out}
        tensors |= {"w": weights.w, "w_scale": weights.w_scale, "w2": weights.w2, "w2_scale": weights.w2_scale}
        tensors |= SCRATCH.take(_scratch(spec, rows), out.device)
        products = iter(_product_launches(spec, knobs, device, tensors))
        runs = [
            next(products) if build is None else load_build(build, device).launcher(step.grid, step.arguments(tensors))
            for step, build in _planned(spec, rows, device)
        ]

        def launch() -> "torch.Tensor":
            for run in runs:
                run()
            return out

        return launch


def _violation(spec: GemmSpec, device: Device) -> str | None:
    """`rule: detail` of the first rule that the layer breaks, or None."""
    if spec.experts is None:
        return "experts: these launches compute routed products alone"
    if device.gfx != "sm_90":
        return f"architecture: DeepGEMM's kernel is for sm_90, not {device.gfx}"
    if not has_block_scales(spec) or spec.w_scale is None or spec.w_scale.block != (SCALE_BLOCK, SCALE_BLOCK):
        return "scales: 1x128 x 128x128 only"
    if spec.x_dtype != "bfloat16" or spec.out_dtype != "bfloat16":
        return f"types: bfloat16 in and out, not {spec.x_dtype} and {spec.out_dtype}"
    inner = spec.experts.inner
    if any(size % K_BLOCK for size in (spec.k, inner, spec.n)):
        return f"sizes: model_dim={spec.k}, inter_dim={inner}, expected multiples of {K_BLOCK}"
    return None


def _products(spec: GemmSpec, rows: int) -> tuple[GemmSpec, GemmSpec]:
    """The two products over all places of rows, as dense ones."""
    experts, places = require_experts(spec), row_capacity(spec, {"BLOCK_SIZE_M": rows})
    plain = replace(spec, m=places, x_dtype=spec.w_dtype, x_scale=experts.quantised, experts=None)
    return replace(plain, n=experts.w1_rows), replace(plain, k=experts.inner)


def _widths(product: GemmSpec, rows: int, device: Device) -> list[int]:
    """The columns of the tiles of so many rows, without sharing, that the package's model ranks first."""
    found = (tile for tile in ranked_tiles(product, device) if tile.rows == rows and tile.multicast == "none")
    return [tile.columns for tile in found][:_WIDTHS]


def _tiles(knobs: Knobs) -> tuple[Tile, Tile]:
    rows = int_knob(knobs, "BLOCK_SIZE_M")
    first, second = (Tile(rows=rows, columns=int_knob(knobs, name)) for name in _KNOBS[1:])
    return first, second


def _product_builds(spec: GemmSpec, knobs: Knobs, device: Device) -> list[Build]:
    return _cached_builds(spec, tuple(sorted(knobs.items())), device)


@lru_cache(maxsize=1024)
def _cached_builds(spec: GemmSpec, items: tuple[tuple[str, Scalar], ...], device: Device) -> list[Build]:
    """The builds of the two products, cached: a call outside of a graph binds its launches again."""
    experts, knobs, found = require_experts(spec), dict(items), []
    for tile, product in zip(_tiles(knobs), _products(spec, int_knob(knobs, "BLOCK_SIZE_M")), strict=True):
        stages = tile.stages(product.k, device.shared_bytes)
        found.append(tile_build(product, tile, stages, device, groups=experts.count))
    return found


def _scratch(spec: GemmSpec, rows: int) -> dict[str, TensorShape]:
    shapes = grouped_scratch_shapes(spec, {**_AROUND, "BLOCK_SIZE_M": rows})
    return {**shapes, "ends": ((require_experts(spec).count,), INT)}


def ends_step(spec: GemmSpec, rows: int) -> LaunchStep:
    """Finds where each expert's rows end, after the launches that order pairs."""
    chunks, bins = order_scratch_shapes(spec, rows)["counts"][0]
    return LaunchStep(
        kernel="ends_of_experts",
        module=ORDER_MODULE,
        tensors={"counts_ptr": "counts", "ends_ptr": "ends"},
        integers={"experts": require_experts(spec).count, "chunks": chunks},
        constants={"BINS": bins, "BLOCK_SIZE_M": rows},
        grid=(1, 1, 1),
        options={"num_warps": max(1, min(8, bins // 32))},
    )


@lru_cache(maxsize=1024)
def _planned(spec: GemmSpec, rows: int, device: Device) -> tuple[tuple[LaunchStep, Build | None], ...]:
    """Our launches with their builds; None is DeepGEMM's in the place of a product of ours."""
    knobs: Knobs = {**_AROUND, "BLOCK_SIZE_M": rows}
    dtypes = dtypes_of(spec, _scratch(spec, rows))
    steps = grouped_launch_steps(spec, knobs, device, interpreted=False)
    ordered = sum("counts_ptr" in step.tensors for step in steps)  # the first ones
    return tuple(
        (step, None if isinstance(step, TmaLaunchStep) else step.build(dtypes))
        for step in (*steps[:ordered], ends_step(spec, rows), *steps[ordered:])
    )


def _product_launches(
    spec: GemmSpec, knobs: Knobs, device: Device, tensors: "Mapping[str, torch.Tensor | None]"
) -> list[Callable[[], object]]:
    """The launches of the two products on the tensors of a call by name."""
    import torch

    out, ends = tensors["out"], tensors["ends"]
    assert out is not None
    assert ends is not None
    stream, index = torch._C._cuda_getCurrentRawStream, out.device.index
    found: list[Callable[[], object]] = []
    places = _products(spec, int_knob(knobs, "BLOCK_SIZE_M"))
    names = (("sorted", "w", "wide"), ("inner", "w2", "parts"))
    for tile, product, build, (x, w, y) in zip(
        _tiles(knobs), places, _product_builds(spec, knobs, device), names, strict=True
    ):
        grid = Grid(
            programs=device.cu_num,
            threads=PRODUCER_THREADS + tile.consumer_threads,
            shared_bytes=tile.shared_bytes(product.k, tile.stages(product.k, device.shared_bytes)),
        )
        operands = (tensors[x], tensors[w], tensors[y], tensors[f"{x}_scale"])
        maps = [matrix.encode() for matrix in _matrices(tile, product, require_experts(spec).count, operands)]
        scales = tensors[f"{w}_scale"]
        assert scales is not None
        sizes = [ctypes.c_uint32(size) for size in (product.m, product.n, product.k)]
        pointers = [ctypes.c_void_p(scales.data_ptr()), ctypes.c_void_p(ends.data_ptr())]
        run = load_tile(build, device).launcher(grid, [*pointers, *sizes, *maps])
        held = (*operands, scales, ends)
        found.append(lambda run=run, held=held: run(stream(index)))  # type: ignore[misc]
    return found


def _matrices(
    tile: Tile, product: GemmSpec, groups: int, operands: "tuple[torch.Tensor | None, ...]"
) -> tuple[Matrix, ...]:
    """The descriptors' matrices in the kernel's order: x, the weights of all groups, the output, the scales of x."""
    x, w, y, x_scale = (0 if tensor is None else tensor.data_ptr() for tensor in operands)
    m, n, k, out_columns = product.m, product.n, product.k, tile.out_swizzle // 2
    row = {"kind": "bytes", "columns": k, "row_bytes": k, "swizzle": K_BLOCK}
    return (
        Matrix(address=x, rows=m, box=(tile.rows, K_BLOCK), **row),  # type: ignore[arg-type]
        Matrix(address=w, rows=n * groups, box=(tile.columns, K_BLOCK), **row),  # type: ignore[arg-type]
        Matrix(
            address=y,
            kind="bfloat16",
            rows=m,
            columns=n,
            row_bytes=2 * n,
            box=(tile.rows, out_columns),
            swizzle=tile.out_swizzle,
        ),
        Matrix(
            address=x_scale,
            kind="float32",
            rows=ceil_div(k, K_BLOCK),
            columns=m,
            row_bytes=4 * m,
            box=(1, tile.rows),
        ),
    )
