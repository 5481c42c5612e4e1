"""The fp32 reference product for checking candidates, its tolerance and the error measure."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.family import GemmSpec, Inputs, Scaling, Weights, layouts
from gemmpipe.family.operands import apply_scales, scale_tile, torch_dtype, unpack_mx

if TYPE_CHECKING:
    import torch


_MAX_ELEMENT_ERROR = 8.0
"""Largest error of a single element in units of its tolerance; rounding errors do not exceed it."""


def product(spec: GemmSpec, inputs: Inputs, weights: Weights) -> "torch.Tensor":
    """(x * x_scale) @ (w * w_scale)^T + bias in fp32 [M, N] or [B, M, N], without TF32; M is that of the inputs."""
    import torch

    x = dequantise(inputs.x, inputs.x_scale, spec.x_scale, torch.float32)
    w = dequantise_weight(spec, weights, torch.float32)
    with without_tf32(x.device.type):
        out = x @ w.mT
    return out if weights.bias is None else out.add_(weights.bias.float())


def dequantise(
    values: "torch.Tensor", scale: "torch.Tensor | None", scaling: Scaling | None, dtype: "torch.dtype"
) -> "torch.Tensor":
    """`values` [..., R, K] times their scales as a new tensor of `dtype`; the scales are applied in fp32.

    4-bit values are packed two per byte: [..., R, K/2].
    """
    import torch

    if scale is None or scaling is None:
        return values.to(dtype)
    packed = values.dtype is getattr(torch, "float4_e2m1fn_x2", None)
    full = unpack_mx(values) if packed else values.to(torch.float32)
    if full is values:
        full = values.clone()
    if scaling.granularity == "tensor":
        return full.mul_(scale).to(dtype)
    rows = full.view(-1, full.shape[-1])
    tile = scale_tile(scaling, rows.shape[1])
    apply_scales(scale.float().reshape(-(-rows.shape[0] // tile[0]), -1), tile, rows)
    return full.to(dtype)


def dequantise_weight(spec: GemmSpec, weights: Weights, dtype: "torch.dtype") -> "torch.Tensor":
    """The weight times its scales as a row-major [N, K] or [B, N, K] of `dtype`."""
    return dequantise(layouts.unshuffle(weights.w, spec.w_layout), weights.w_scale, spec.w_scale, dtype)


def tolerance(spec: GemmSpec) -> tuple[float, float]:
    """(atol as a share of the row's RMS, rtol) for a correct implementation of this product.

    rtol: one unit of the output format (rounding gives half), since libraries add split-K parts in that format too.
    atol: fp32 accumulation in any order has an error of about sqrt(K) * 2**-24 of the RMS. Scaled operands may be
    dequantised to bf16: these roundings (2**-9 each, both sides) give 1.6e-3 of the RMS on average and 5.5 times that
    for the worst of 3e7 elements. A tensor core that keeps 14 bits of an fp8 sum is allowed as well.
    """
    import torch

    unit = float(torch.finfo(torch_dtype(spec.out_dtype)).eps)
    accumulation = 8 * spec.k**0.5 * 2.0**-24
    scaled = spec.x_scale is not None or spec.w_scale is not None
    return (max(unit, 1e-2) if scaled else unit + accumulation), max(unit, 1e-5)


@dataclass(frozen=True, kw_only=True, eq=False)
class ErrorBounds:
    """The largest allowed errors of a product, fp32."""

    elements: "torch.Tensor"
    """For each element, [..., N]; never 0, so that it can be a divisor."""
    rows: "torch.Tensor"
    """For each row as a whole (2-norm), [...]."""


def error_bounds(ref: "torch.Tensor", atol_share: float, rtol: float) -> ErrorBounds:
    """The allowed error of each element and of each row of `ref`.

    For an element: atol_share * RMS(its row of ref) * f + rtol * |ref|, with f the size of its column relative to the
    RMS column, at least 1. Weights with row scales make columns of different size, with errors of different size: for
    correctly rounded experts in fp8 with such scales, the worst of 10^6 elements has 6.7 times the bound without f, and
    4.3 times the bound with it. For a row: (atol_share + rtol) times its 2-norm.
    """
    import torch

    norm = torch.linalg.vector_norm(ref, dim=-1, keepdim=True)
    columns = torch.linalg.vector_norm(ref, dim=-2, keepdim=True)
    width, tiny = ref.shape[-1], torch.finfo(ref.dtype).tiny
    whole = torch.linalg.vector_norm(norm, dim=-2, keepdim=True).clamp_min_(tiny)
    larger = columns.div_(whole).mul_(width**0.5).clamp_min_(1.0)
    elements = ref.abs().mul_(rtol).addcmul_(norm, larger, value=atol_share / width**0.5).clamp_min_(tiny)
    return ErrorBounds(elements=elements, rows=norm.squeeze(-1) * (atol_share + rtol))


def error_ratio(out: "torch.Tensor", ref: "torch.Tensor", atol_share: float, rtol: float) -> float:
    """Like `fraction_out_of_bounds`, with the bounds of `error_bounds`."""
    return fraction_out_of_bounds(out, ref, error_bounds(ref, atol_share, rtol))


def fraction_out_of_bounds(out: "torch.Tensor", ref: "torch.Tensor", allowed: ErrorBounds) -> float:
    """The share of elements [..., N] with an error above the allowed one.

    1.0 for any share if an element of `out` is not finite, if an error exceeds 8 times the allowed one, or if the error
    of a row as a whole exceeds its bound: one wrong row, swapped columns or an unwritten output cannot pass.
    Synchronizes with the device once.
    """
    import torch

    error = out - ref  # in fp32, as ref is
    broken = (torch.linalg.vector_norm(error, dim=-1) > allowed.rows).any()
    error.abs_().div_(allowed.elements)
    # Negated, since a comparison with NaN is false.
    broken |= ~(error.amax() <= _MAX_ELEMENT_ERROR)
    share = (error > 1).sum() / error.numel()
    return float(share.masked_fill(broken, 1.0))


@contextmanager
def without_tf32(device_type: str) -> Iterator[None]:
    """Compute fp32 products in fp32 on a GPU, independent of the process's TF32 settings."""
    import torch

    if device_type == "cpu":
        yield
        return
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)
