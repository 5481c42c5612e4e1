"""aiter's kernels: composable (`ck`, in aiter_ck.py) and assembly (`asm`), each under its `libtype` in aiter's tables.

An assembly kernel is a name (which contains its tile) and a number of splits. Written to the functions and kernel lists
of aiter, unverified on hardware.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from gemmpipe.backends.aiter_ck import Ck, fp4_launch, prepare_fp4, row_or_block_scales
from gemmpipe.backends.aiter_package import (
    GFX,
    SPLITS,
    AiterBackend,
    AsmKernel,
    aiter_function,
    aiter_version,
    asm_kernels,
    int_or_default,
    log2_exact,
)
from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, Launch, Prepared, Weights
from gemmpipe.family.dtypes import FP4, FP8_DTYPES
from gemmpipe.family.layouts import ROW_MAJOR, TILES_16X16
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


KERNEL_NAME = "kernelName"
"""The knob with the kernel's name; empty: aiter's own choice."""
_MAX_SPLIT_TILES = 1024
"""Tiles of a product with split-K: aiter's workspace has as many counters."""
_SPLIT_BLOCK_K = 128
"""8-bit kernels split K in multiples of this block."""
_SPLIT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class _KernelList:
    """The products that the kernels of a list compute."""

    path: str
    dtypes: tuple[str, ...]
    scales: str
    layouts: tuple[str, ...]
    out: tuple[str, ...]
    most_splits: int
    powers: bool = False
    """True if splits are powers of two, of which the function takes the log2."""
    gfx: tuple[str, ...] = GFX


_LISTS = (
    _KernelList(
        path="bf16gemm/bf16gemm_fp32bf16.csv",
        dtypes=("bfloat16",),
        scales="",
        layouts=(ROW_MAJOR, TILES_16X16),
        out=("bfloat16", "float32"),
        most_splits=16,
    ),
    _KernelList(
        path="i8gemm/i8gemm_bf16_perTokenI8.csv",
        dtypes=("int8",),
        scales="row",
        layouts=(TILES_16X16,),
        out=("bfloat16",),
        most_splits=8,
    ),
    _KernelList(
        path="fp8gemm_blockscale/fp8gemm_bf16_blockscale.csv",
        dtypes=FP8_DTYPES,
        scales="block",
        layouts=(TILES_16X16,),
        out=("bfloat16",),
        most_splits=8,
    ),
    _KernelList(
        path="f4gemm/f4gemm_bf16_per1x32Fp4.csv",
        dtypes=(FP4,),
        scales="block",
        layouts=(ROW_MAJOR,),
        out=("bfloat16",),
        most_splits=8,
        powers=True,
        gfx=("gfx950",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Asm(AiterBackend):
    """`asm`: by `kernelName` and the number of splits; without a name aiter chooses the tile, with 0 the splits."""

    label = "asm"

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every kernel of the list with every number of splits that it supports; without a list aiter's own choice."""
        if self.unavailable(device) is not None:
            return ()
        products = _kernel_list(spec)
        if products is None:
            return ({KERNEL_NAME: "", SPLITS: 1},)  # one config, for unsupported_reason
        kernels = [kernel for kernel in asm_kernels(products.path) if _supports(kernel, spec)]
        if not kernels:
            counts = _SPLIT_COUNTS if products.scales == "" else (0,)
            return tuple({KERNEL_NAME: "", SPLITS: splits} for splits in counts)
        return tuple(
            {KERNEL_NAME: kernel.name, SPLITS: splits}
            for kernel in kernels
            for splits in _split_counts(kernel, products, spec, device)
        )

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The kernel and the number of splits."""
        return KERNEL_NAME, SPLITS

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """An absent kernel name is empty: aiter chooses."""
        return {KERNEL_NAME: "", **knobs}

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row of aiter's: its `kernelName` and `splitK`."""
        return {KERNEL_NAME: str(row.get(KERNEL_NAME) or ""), SPLITS: max(1, int_or_default(row.get("splitK"), 1))}

    def kernel_name(self, knobs: Knobs) -> str:
        """`asm_<name>@0.1.8`: aiter's name of the kernel, and the package's version."""
        return f"{self.label}_{knobs.get(KERNEL_NAME) or 'own_choice'}@{aiter_version()}"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` per rule, as in aiter's tuners."""
        products, splits = _kernel_list(spec), int_or_default(knobs.get(SPLITS), 1)
        if device.gfx not in GFX:
            return f"architecture: aiter has assembly for {' and '.join(GFX)}, not {device.gfx}"
        if products is None:
            return f"product: aiter has no assembly for {spec.x_dtype} in '{spec.w_layout}' scaled like this"
        if device.gfx not in products.gfx:
            return f"architecture: {products.path} is for {' and '.join(products.gfx)}, not {device.gfx}"
        if spec.out_dtype not in products.out:
            return f"output type: {' or '.join(products.out)}, not {spec.out_dtype}"
        if reason := _alignment_violation(spec, device):
            return reason
        if splits not in range(products.most_splits + 1) or (products.powers and splits & (splits - 1)):
            return f"splits: {splits}, from 1 to {products.most_splits}{' in powers of two' if products.powers else ''}"
        return _kernel_violation(str(knobs.get(KERNEL_NAME) or ""), splits, products, spec)

    def prepare_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        """None: all kernels read the same form of a weight."""
        return {}

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """A 4-bit weight in tiles with its scales shuffled; others unchanged."""
        return prepare_fp4(weights) if spec.w_dtype == FP4 else Prepared(weights=weights)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call of the function for these types that writes `out`."""
        name, splits = str(knobs.get(KERNEL_NAME) or ""), int_or_default(knobs.get(SPLITS), 1)
        if spec.x_dtype == FP4:
            call = aiter_function("gemm_a4w4_asm")

            def fp4(*operands: "torch.Tensor") -> object:
                return call(
                    *operands, name, None, bpreshuffle=True, log2_k_split=log2_exact(splits) if splits else None
                )

            return fp4_launch(spec, inputs, prepared, out, fp4)
        if spec.x_scale is None:
            return _bf16(spec, name, splits, inputs, prepared, out)
        return _scaled(spec, name, splits, inputs, prepared, out)


def _bf16(spec: GemmSpec, name: str, splits: int, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Launch:
    call, x, weights = aiter_function("gemm_a16w16_asm"), inputs.x.contiguous(), prepared.weights
    w, shuffled = weights.w.contiguous(), spec.w_layout != ROW_MAJOR

    def launch() -> "torch.Tensor":
        call(x, w, out, weights.bias, splits or None, name or None, shuffled)
        return out

    return launch


def _scaled(spec: GemmSpec, name: str, splits: int, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Launch:
    x, w = inputs.x.contiguous(), prepared.weights.w.contiguous()
    x_scale, w_scale, copy_scales = row_or_block_scales(spec, inputs, prepared)
    if spec.x_dtype == "int8":
        eight_bits, zeros = aiter_function("gemm_a8w8_asm"), _zeros(spec.n, str(out.device))  # it requires a bias
        return lambda: (eight_bits(x, w, x_scale, w_scale, out, name, zeros, splitK=splits or None), out)[1]
    blockwise = aiter_function("gemm_a8w8_blockscale_bpreshuffle_asm")

    def launch() -> "torch.Tensor":
        copy_scales()
        blockwise(x, w, out, x_scale, w_scale, splitK=splits or None, kernelName=name or None)
        return out

    return launch


@cache
def _zeros(columns: int, device: str) -> "torch.Tensor":
    import torch

    return torch.zeros(1, columns, dtype=torch.float32, device=device)


def _kernel_list(spec: GemmSpec) -> _KernelList | None:
    """The list for this product, or None."""
    scales = {scale.granularity if scale else "" for scale in (spec.x_scale, spec.w_scale)}
    if spec.experts is not None or spec.batch != 1 or spec.x_dtype != spec.w_dtype:
        return None
    return next(
        (
            products
            for products in _LISTS
            if scales == {products.scales} and spec.x_dtype in products.dtypes and spec.w_layout in products.layouts
        ),
        None,
    )


def _supports(kernel: AsmKernel, spec: GemmSpec) -> bool:
    """True if a kernel reads the weight's layout (fp4 weights are prepared in tiles) and adds the bias."""
    shuffled = spec.w_layout != ROW_MAJOR or spec.w_dtype == FP4
    return kernel.shuffled == shuffled and (kernel.bias or not spec.bias)


def _split_counts(kernel: AsmKernel, products: _KernelList, spec: GemmSpec, device: Device) -> Iterable[int]:
    """The split counts that aiter's tuners try; for 16 bits up to one tile per compute unit, or 4 for many tiles."""
    if not kernel.splits:
        return (1,)
    if products.powers:
        return tuple(1 << power for power in range(log2_exact(products.most_splits) + 1))
    if products.scales:
        return [n for n in range(1, products.most_splits + 1) if _splits_evenly(spec.k, n)]
    tiles = _tile_count(kernel, spec)
    most = device.cu_num // tiles if tiles < device.cu_num else 4
    return [n for n in range(2, min(most, products.most_splits) + 1) if spec.k // n >= kernel.least_k]


def _splits_evenly(k: int, splits: int) -> bool:
    """True if K in `splits` parts of whole blocks has no empty part."""
    part = ceil_div(ceil_div(k, splits), _SPLIT_BLOCK_K) * _SPLIT_BLOCK_K
    return ceil_div(k, part) == splits


def _tile_count(kernel: AsmKernel, spec: GemmSpec) -> int:
    return ceil_div(spec.m, kernel.tile_m) * ceil_div(spec.n, kernel.tile_n)


def _alignment_violation(spec: GemmSpec, device: Device) -> str | None:
    if spec.x_scale is None and (spec.k % 64 or (device.gfx == "gfx950" and spec.n % 64)):
        return f"alignment: N={spec.n} and K={spec.k} must be multiples of 64"
    if spec.x_dtype == FP4 and (spec.n % 16 or spec.k % 64):
        return f"alignment: N={spec.n} and K={spec.k}, expected multiples of 16 and 64"
    if spec.bias and spec.x_scale is not None:
        return "epilogue: scaled products have no bias here"
    return None


def _kernel_violation(name: str, splits: int, products: _KernelList, spec: GemmSpec) -> str | None:
    """`rule: detail` if this version's kernel `name` does not compute the product with these splits, or None."""
    kernels = {kernel.name: kernel for kernel in asm_kernels(products.path)}
    if not name or not kernels:
        return None
    if not splits:
        return f"splits: 0, expected a number from 1 for {name}"
    if name not in kernels:
        return f"kernel: this version of aiter has no {name}"
    kernel = kernels[name]
    if not _supports(kernel, spec):
        return f"kernel: {name} reads another layout of the weight, or adds no bias"
    if splits != 1 and not kernel.splits:
        return f"splits: {name} does not split K"
    if splits > 1 and _tile_count(kernel, spec) > _MAX_SPLIT_TILES:
        return f"grid: {_tile_count(kernel, spec)} tiles with K split, at most {_MAX_SPLIT_TILES}"
    return None


@dataclass(frozen=True, kw_only=True)
class Aiter:
    """aiter's composable and assembly kernels."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """Both for any family: they check the product."""
        return Ck(), Asm()
