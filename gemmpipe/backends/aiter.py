"""`ck` and `asm`: the kernels of AMD's aiter package, by the numbers that its own tuners use.

Written to the documented interface of aiter, unverified on hardware. A kernel's number means a kernel in one version of
the package only, so the version stands in the candidate's `kernelName`.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from gemmpipe.backends import Backend
from gemmpipe.backends.hipblaslt import aiter_missing
from gemmpipe.data import Device, Knobs
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, Launch, Prepared
from gemmpipe.layouts import PLAIN, TILES_16X16

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

INDEX, SPLITS = "solidx", "NUM_KSPLIT"
_POWERS = (1, 2, 4, 8)  # CK's splitK is their log2, up to 3 as aiter's tuners try it
_LITERAL = (1, 2, 3, 4, 6, 8, 12, 16)
_GFX = ("gfx942", "gfx950")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kernels:
    """One entry of aiter's: which products it computes, and how many kernels stand behind its `kernelId`."""

    function: str
    count: int
    dtypes: tuple[str, ...]
    scales: str
    layout: str = PLAIN
    batched: bool = False


_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_CK = (
    _Kernels(function="gemm_a8w8_tune", count=86, dtypes=("int8", *_FP8), scales="row"),
    _Kernels(function="gemm_a8w8_blockscale_tune", count=19, dtypes=_FP8, scales="block"),
    _Kernels(
        function="gemm_a8w8_bpreshuffle_tune", count=159, dtypes=("int8", *_FP8), scales="row", layout=TILES_16X16
    ),
    _Kernels(
        function="gemm_a8w8_blockscale_bpreshuffle_tune", count=18, dtypes=_FP8, scales="block", layout=TILES_16X16
    ),
    _Kernels(function="batched_gemm_a8w8_tune", count=86, dtypes=("int8",), scales="row", batched=True),
)


@dataclass(frozen=True, kw_only=True)
class Aiter:
    """What aiter offers: its composable kernels and its assembly, each under the `libtype` its tables know it by."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """Both, whatever the family: they decide by the product."""
        return Ck(), Asm()


@dataclass(frozen=True, kw_only=True)
class _Library(Backend):
    """What both have in common."""

    def unavailable(self, device: Device) -> str | None:
        """It needs an AMD GPU and the package."""
        if device.kind != "hip":
            return "no AMD GPU: aiter's kernels are for these alone"
        return aiter_missing()

    def kernel_name(self, knobs: Knobs) -> str:
        """`ck_34@0.1.8`: the kernel's number, and the package's version whose it is."""
        return f"{self.label}_{knobs.get(INDEX, 0)}@{_version()}"

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """Which kernel, and in how many splits."""
        return INDEX, SPLITS


@dataclass(frozen=True, kw_only=True)
class Ck(_Library):
    """`ck`: composable kernels, by their number in aiter's lists and the number of splits (a power of two)."""

    label = "ck"

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every kernel of the list that is for this product, in every split."""
        if self.unavailable(device) is not None:
            return ()
        kernels = _for(spec)
        count = kernels.count if kernels else 1  # one point, to say why
        return tuple({INDEX: index, SPLITS: splits} for splits in _POWERS for index in range(count))

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` a rule; what a kernel itself does not take it says when launched."""
        kernels, splits = _for(spec), int(str(knobs[SPLITS]))
        if device.gfx not in _GFX:
            return f"architecture: aiter has composable kernels for {' and '.join(_GFX)}, not {device.gfx}"
        if kernels is None:
            return f"product: aiter has no composable kernel for {spec.x_dtype} in '{spec.w_layout}' scaled like this"
        if spec.bias or spec.out_dtype not in ("bfloat16", "float16"):
            return f"epilogue: a composable kernel writes bf16 or fp16 without bias, not {spec.out_dtype}"
        if splits not in _POWERS:
            return f"splits: {splits}, expected one of {_POWERS}"
        return None

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call by number, into `out`."""
        kernels = _for(spec)
        if kernels is None:
            raise ValueError("no composable kernel computes this product")
        call = _function(kernels.function)
        x_scale, w_scale = _scales(spec, inputs, prepared)
        number, exponent = int(str(knobs[INDEX])), int(str(knobs[SPLITS])).bit_length() - 1

        def launch() -> "torch.Tensor":
            call(inputs.x, prepared.weights.w, x_scale, w_scale, out, number, exponent)
            return out

        return launch


@dataclass(frozen=True, kw_only=True)
class Asm(_Library):
    """`asm`: aiter's assembly for bf16, by the number of splits; which kernel, it chooses itself."""

    label = "asm"

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every number of splits."""
        if self.unavailable(device) is not None:
            return ()
        return tuple({SPLITS: splits} for splits in _LITERAL)

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` a rule, as aiter's tuner has them."""
        if device.gfx not in _GFX:
            return f"architecture: aiter has assembly for {' and '.join(_GFX)}, not {device.gfx}"
        if spec.x_scale is not None or spec.w_layout != PLAIN or spec.batch != 1 or spec.x_dtype != "bfloat16":
            return f"product: the assembly multiplies plain bf16, not {spec.x_dtype} in '{spec.w_layout}'"
        if spec.out_dtype not in ("bfloat16", "float32"):
            return f"output type: bf16 or fp32, not {spec.out_dtype}"
        if spec.k % 64 or (device.gfx == "gfx950" and spec.n % 64):
            return f"alignment: N={spec.n} and K={spec.k} must be multiples of 64"
        if int(str(knobs[SPLITS])) not in range(1, 17):
            return f"splits: {knobs[SPLITS]}, from 1 to 16"
        return None

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call of `gemm_a16w16_asm` into `out`."""
        call, splits = _function("gemm_a16w16_asm"), int(str(knobs[SPLITS]))
        weights = prepared.weights

        def launch() -> "torch.Tensor":
            call(inputs.x, weights.w, out, weights.bias, splits)
            return out

        return launch


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module("aiter"), name)
    return found


@cache
def _version() -> str:
    try:
        return importlib.metadata.version("aiter")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _for(spec: GemmSpec) -> _Kernels | None:
    """aiter's composable kernels for this product, or None."""
    scales = {scale.granularity if scale else "" for scale in (spec.x_scale, spec.w_scale)}
    return next(
        (
            kernels
            for kernels in _CK
            if scales == {kernels.scales}
            and spec.w_layout == kernels.layout
            and (spec.batch > 1) == kernels.batched
            and spec.x_dtype == spec.w_dtype
            and spec.x_dtype in kernels.dtypes
        ),
        None,
    )


def _scales(spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> "tuple[torch.Tensor | None, torch.Tensor | None]":
    """By row [M, 1] and [1, N]; in blocks row-major, or with a pre-shuffled weight those of x stored transposed."""
    x_scale, w_scale = inputs.x_scale, prepared.weights.w_scale
    if x_scale is None or w_scale is None:
        raise ValueError("aiter's kernels need the scales of both operands")
    if spec.x_scale is not None and spec.x_scale.granularity == "block":
        if spec.w_layout == PLAIN:
            return x_scale, w_scale
        m_major = x_scale.t().contiguous() if inputs.x_scale_t is None else inputs.x_scale_t.t()
        return m_major.view(x_scale.shape), w_scale
    return x_scale, w_scale if spec.batch > 1 else w_scale.view(1, -1)
