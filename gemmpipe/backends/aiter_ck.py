"""`ck`: aiter's composable kernels, by the numbers that its own tuners use.

Written to the functions of aiter, unverified on hardware. A kernel's number is valid in one version of the package
only, so the candidate's `kernelName` contains the version. The functions that take a number belong to aiter's tuning
modules, which aiter compiles at their first call.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.backends import aiter_moe
from gemmpipe.backends.aiter_package import (
    GFX,
    SPLITS,
    AiterBackend,
    aiter_function,
    aiter_version,
    int_or_default,
    log2_exact,
    shuffled_scales,
)
from gemmpipe.backends.hipblaslt import SOLIDX
from gemmpipe.backends.scaled_mm import no_copy, scales_in_order
from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights, layouts
from gemmpipe.family.dtypes import DTYPES_16BIT, FP4, FP8_DTYPES
from gemmpipe.family.layouts import ROW_MAJOR, TILES_16X16
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

_SPLIT_COUNTS = (1, 2, 4, 8)
"""The counts that aiter's tuners try; the functions take their log2."""
_FP4_ROW_MULTIPLE = 32
"""The rows of an fp4 product's output are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TuneFunction:
    """A function of aiter's: the products that it computes, and its number of kernels (`kernelId`)."""

    function: str
    count: int
    dtypes: tuple[str, ...]
    scales: str = ""
    layout: str = ROW_MAJOR
    batched: bool = False
    gfx: tuple[str, ...] = GFX


_LISTS = (
    _TuneFunction(function="gemm_a8w8_tune", count=86, dtypes=("int8", *FP8_DTYPES), scales="row"),
    _TuneFunction(function="gemm_a8w8_blockscale_tune", count=19, dtypes=FP8_DTYPES, scales="block"),
    _TuneFunction(
        function="gemm_a8w8_bpreshuffle_tune", count=159, dtypes=("int8", *FP8_DTYPES), scales="row", layout=TILES_16X16
    ),
    _TuneFunction(
        function="gemm_a8w8_blockscale_bpreshuffle_tune",
        count=18,
        dtypes=FP8_DTYPES,
        scales="block",
        layout=TILES_16X16,
    ),
    _TuneFunction(function="batched_gemm_a8w8_tune", count=86, dtypes=("int8",), scales="row", batched=True),
    _TuneFunction(function="batched_gemm_bf16_tune", count=86, dtypes=("bfloat16",), batched=True),
    _TuneFunction(function="gemm_a4w4_blockscale_tune", count=20, dtypes=(FP4,), scales="block", gfx=("gfx950",)),
)


@dataclass(frozen=True, kw_only=True)
class Ck(AiterBackend):
    """`ck`: by a kernel's number in aiter's lists and the number of splits; experts by both stages' kernel names."""

    label = "ck"

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every kernel for this product with every split count."""
        if self.unavailable(device) is not None:
            return ()
        if spec.experts is not None:
            return aiter_moe.CONFIGS
        kernels = _tune_function(spec)
        count = kernels.count if kernels else 1  # one config, for unsupported_reason
        return tuple({SOLIDX: index, SPLITS: splits} for splits in _SPLIT_COUNTS for index in range(count))

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The kernel and the number of splits."""
        return aiter_moe.KNOBS if spec.experts is not None else (SOLIDX, SPLITS)

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row of aiter's: its `kernelId` and `splitK`, or its stages."""
        if spec.experts is not None:
            return aiter_moe.knobs_from_row(row)
        index = row.get(SOLIDX)
        return {SOLIDX: index, SPLITS: int_or_default(row.get("splitK"), 1)} if isinstance(index, int) else None

    def kernel_name(self, knobs: Knobs) -> str:
        """`ck_34@0.1.8`: the kernel's number and the package's version."""
        name = aiter_moe.kernel_name(knobs) if SOLIDX not in knobs else f"{self.label}_{knobs[SOLIDX]}"
        return f"{name}@{aiter_version()}"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` per rule; a kernel's own limits raise at its launch."""
        if device.gfx not in GFX:
            return f"architecture: aiter has composable kernels for {' and '.join(GFX)}, not {device.gfx}"
        if spec.experts is not None:
            return aiter_moe.unsupported_reason(spec, spec.experts, knobs)
        kernels, splits = _tune_function(spec), int_or_default(knobs.get(SPLITS), 1)
        if kernels is None:
            return f"product: aiter has no composable kernel for {spec.x_dtype} in '{spec.w_layout}' scaled like this"
        if device.gfx not in kernels.gfx:
            return f"architecture: {kernels.function} is for {' and '.join(kernels.gfx)}, not {device.gfx}"
        if spec.bias or spec.out_dtype not in DTYPES_16BIT:
            return f"epilogue: a composable kernel writes bf16 or fp16 without bias, not {spec.out_dtype}"
        if splits not in _SPLIT_COUNTS:
            return f"splits: {splits}, expected one of {_SPLIT_COUNTS}"
        if not 0 <= int_or_default(knobs.get(SOLIDX), -1) < kernels.count:
            return f"kernel: {kernels.function} has numbers from 0 to {kernels.count - 1}, not {knobs.get(SOLIDX)}"
        if spec.x_dtype == FP4 and (spec.n % 16 or spec.k % 64):
            return f"alignment: N={spec.n} and K={spec.k}, expected multiples of 16 and 64"
        return None

    def prepare_knobs(self, spec: GemmSpec, knobs: Knobs) -> Knobs:
        """None: all kernels read the same form of a weight; for experts `shuffled`."""
        return aiter_moe.prepare_knobs(knobs) if spec.experts is not None else {}

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """A 4-bit weight in tiles with its scales shuffled, experts' weights in tiles; others unchanged."""
        if spec.experts is not None:
            return aiter_moe.prepare(weights, knobs)
        return prepare_fp4(weights) if spec.w_dtype == FP4 else Prepared(weights=weights)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call by number that writes `out`."""
        if spec.experts is not None:
            return aiter_moe.bind(spec, spec.experts, knobs, inputs, prepared, out)
        kernels = _tune_function(spec)
        if kernels is None:
            raise ValueError("no composable kernel computes this product")
        call, number = aiter_function(kernels.function), int_or_default(knobs[SOLIDX])
        power = log2_exact(int_or_default(knobs[SPLITS], 1))
        if spec.x_dtype == FP4:
            return fp4_launch(spec, inputs, prepared, out, lambda *operands: call(*operands, number, power))
        x, w = inputs.x.contiguous(), prepared.weights.w.contiguous()
        scales: list[torch.Tensor] = []
        copy_scales: Callable[[], object] = no_copy
        if kernels.scales:
            *scales, copy_scales = row_or_block_scales(spec, inputs, prepared)

        def launch() -> "torch.Tensor":
            copy_scales()
            call(x, w, *scales, out, number, power)
            return out

        return launch


def _tune_function(spec: GemmSpec) -> _TuneFunction | None:
    """aiter's composable kernels for this product, or None."""
    scales = {scale.granularity if scale else "" for scale in (spec.x_scale, spec.w_scale)}
    return next(
        (
            kernels
            for kernels in _LISTS
            if scales == {kernels.scales}
            and spec.w_layout == kernels.layout
            and (spec.batch > 1) == kernels.batched
            and spec.x_dtype == spec.w_dtype
            and spec.x_dtype in kernels.dtypes
        ),
        None,
    )


def row_or_block_scales(
    spec: GemmSpec, inputs: Inputs, prepared: Prepared
) -> "tuple[torch.Tensor, torch.Tensor, Callable[[], object]]":
    """(scales of x, scales of w, a call before each product, see scales_in_order).

    Row scales are [M, 1] and [1, N]; block scales row-major, with a pre-shuffled weight those of x transposed.
    """
    x_scale, w_scale = inputs.x_scale, prepared.weights.w_scale
    if x_scale is None or w_scale is None:
        raise ValueError("aiter's kernels need the scales of both operands")
    if spec.x_scale is not None and spec.x_scale.granularity == "block":
        ordered, copy_scales = scales_in_order(x_scale, ROW if spec.w_layout == ROW_MAJOR else COLUMN)
        x_scale = ordered if spec.w_layout == ROW_MAJOR else ordered.t().view(x_scale.shape)
        return x_scale, w_scale.contiguous(), copy_scales
    return x_scale.contiguous(), w_scale.contiguous() if spec.batch > 1 else w_scale.reshape(1, -1), no_copy


def prepare_fp4(weights: Weights) -> Prepared:
    """The weight [N, K/2] in 16 x 16 tiles of bytes and its scales shuffled, both in addition to the stored ones."""
    import torch

    if weights.w_scale is None:
        raise ValueError("fp4 weights need scales")
    tiles = layouts.preshuffle(weights.w.contiguous().view(torch.uint8), TILES_16X16).view(weights.w.dtype)
    form = (tiles, shuffled_scales(weights.w_scale))
    return Prepared(weights=weights, extra=form, extra_bytes=sum(each.numel() for each in form))


def fp4_launch(spec: GemmSpec, inputs: Inputs, prepared: Prepared, out: "torch.Tensor", call: "_Fp4Call") -> Launch:
    """A call of an fp4 kernel: it shuffles x's scales each time, and writes whole blocks of 32 rows."""
    import torch

    form, x, x_scale = prepared.extra, inputs.x.contiguous(), inputs.x_scale
    if not isinstance(form, tuple) or x_scale is None:
        raise ValueError("an fp4 kernel needs a prepared weight and the scales of x")
    w, w_scale = form
    rows = ceil_div(spec.m, _FP4_ROW_MULTIPLE) * _FP4_ROW_MULTIPLE
    wide = out if rows == spec.m else torch.empty(rows, spec.n, dtype=out.dtype, device=out.device)

    def launch() -> "torch.Tensor":
        call(x, w, shuffled_scales(x_scale), w_scale, wide)
        return wide[: spec.m]

    return launch


if TYPE_CHECKING:
    _Fp4Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    """(x, w, x_scale, w_scale, out), the first arguments of an fp4 kernel."""
