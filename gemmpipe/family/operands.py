"""Random operands (signed, with outliers, quantised, scales of many sizes), and quantisation."""

import re
from typing import TYPE_CHECKING

from gemmpipe.core.spec import COLUMN
from gemmpipe.family import GemmSpec, Inputs, Scaling, Weights, layouts
from gemmpipe.family.dtypes import FP4

if TYPE_CHECKING:
    import torch


E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a 4-bit float by its low three bits; the fourth bit is the sign."""

_OUTLIERS_PCT = 0.1
_OUTLIER_FACTOR = 8.0
_BITS = re.compile(r"\d+")  # in the name, so that sizes need no torch
_BINADES = 2  # scales are multiplied by 2**-2 .. 2**2, so that a kernel that mixes up scales fails the check

_GRID_EXPONENTS = (-9, -4)
"""Exponents of the scales of values on the fp8 grid, the second not included: values of about 1, of different size."""


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a name without `torch.`. Raises AttributeError for an unknown one."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def is_fp8(name: str) -> bool:
    """True for the name of an 8-bit float type."""
    return name.startswith("float8")


def storage_bytes(name: str, elements: int) -> int:
    """Bytes of a number of elements of a dtype; 4-bit elements are packed two per byte."""
    bits = _BITS.search(name)
    assert bits is not None, f"{name}: a dtype without its number of bits"
    return elements * int(bits[0]) // 8


def make_weights(spec: GemmSpec, generator: "torch.Generator") -> Weights:
    """Random `w` [N, K] of about 1/sqrt(K) (so that outputs are about 1), its scales, and bias [N] in the out dtype.

    `w` is in the spec's layout; in a batch it is [B, N, K], with scales by row as [B, 1, N].
    """
    import torch

    values = random_normal(spec.batch * spec.n, spec.k, generator).mul_(spec.k**-0.5)
    w, w_scale = quantise_with_random_scales(values, spec.w_dtype, spec.w_scale, generator)
    w = layouts.preshuffle(w, spec.w_layout)
    if spec.batch > 1:
        w = w.view(spec.batch, spec.n, -1)
        if w_scale is not None and spec.w_scale is not None and spec.w_scale.granularity == "row":
            w_scale = w_scale.view(spec.batch, 1, spec.n)
    bias = None
    if spec.bias:
        bias = torch.randn(spec.n, generator=generator, device=generator.device).to(torch_dtype(spec.out_dtype))
    return Weights(w=w, w_scale=w_scale, bias=bias)


def make_inputs(spec: GemmSpec, generator: "torch.Generator") -> Inputs:
    """Random `x` [M, K] of about 1 and its scales; in a batch [B, M, K] and [B, M, 1].

    Block scales are in the memory order of the spec, row-major if it has none.
    """
    x, x_scale = quantise_with_random_scales(
        random_normal(spec.batch * spec.m, spec.k, generator), spec.x_dtype, spec.x_scale, generator
    )
    if spec.batch > 1:
        x = x.view(spec.batch, spec.m, -1)
        if x_scale is not None and spec.x_scale is not None and spec.x_scale.granularity == "row":
            x_scale = x_scale.view(spec.batch, spec.m, 1)
    if x_scale is not None and spec.x_scale is not None and spec.x_scale.order == COLUMN:
        x_scale = x_scale.t().contiguous().t()
    return Inputs(x=x, x_scale=x_scale)


def in_memory_order(scale: "torch.Tensor", order: str) -> "torch.Tensor":
    """Block scales [M, blocks] row-major (`row`) or M-major (`column`); a copy if their order differs."""
    return scale.contiguous() if order == "row" else scale.mT.contiguous().mT


def random_normal(rows: int, columns: int, generator: "torch.Generator") -> "torch.Tensor":
    """fp32 [rows, columns] from N(0, 1) on the generator's device, with 0.1 % of the elements 8 times as large."""
    import torch

    device = generator.device
    values = torch.randn(rows, columns, generator=generator, device=device)
    count = max(1, round(values.numel() * _OUTLIERS_PCT / 100))
    outliers = torch.randint(values.numel(), (count,), generator=generator, device=device)
    values.view(-1)[outliers] *= _OUTLIER_FACTOR
    return values


def quantise_with_random_scales(
    values: "torch.Tensor", dtype_name: str, scaling: Scaling | None, generator: "torch.Generator"
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """fp32 [R, C] quantised with scales of many sizes: (stored values, scales); `values` is overwritten."""
    import torch

    dtype = torch_dtype(dtype_name)
    if scaling is None:
        return values.to(dtype), None
    tile = scale_tile(scaling, values.shape[1])
    if scaling.granularity == "tensor":
        q, scale = quantise_blockwise(values, (values.shape[0], values.shape[1]), dtype)
        return q, scale.reshape(1)
    rows, columns = -(-values.shape[0] // tile[0]), -(-values.shape[1] // tile[1])
    powers = torch.randint(-_BINADES, _BINADES + 1, (rows, columns), generator=generator, device=values.device)
    apply_scales(torch.exp2(powers.float()), tile, values)
    if dtype_name == FP4:
        return quantise_mx(values, tile[1])
    return quantise_blockwise(values, tile, dtype)


def values_on_fp8_grid(spec: GemmSpec, tile: tuple[int, int], generator: "torch.Generator") -> "torch.Tensor":
    """Random x [M, K] of about 1 in its 16-bit type that is quantised to w's fp8 type without an error.

    Each `tile` (rows, columns) holds fp8 values times a power of two, with the greatest value of the format among them,
    so that a quantiser by tiles finds this scale.
    """
    import torch

    values = random_normal(spec.m, spec.k, generator)
    stored, scales = quantise_blockwise(values, tile, torch_dtype(spec.w_dtype))
    exponents = torch.randint(*_GRID_EXPONENTS, scales.shape, generator=generator, device=generator.device)
    return apply_scales(torch.exp2(exponents.float()), tile, stored.float()).to(torch_dtype(spec.x_dtype))


def scale_count(scaling: Scaling, rows: int, columns: int) -> int:
    """Number of scales of an operand of [rows, columns]."""
    if scaling.granularity == "block":
        return -(-rows // scaling.block[0]) * -(-columns // scaling.block[1])
    return 1 if scaling.granularity == "tensor" else rows


def scale_tile(scaling: Scaling, columns: int) -> tuple[int, int]:
    """(rows, columns) of the tile that one scale covers; a `row` scale covers one whole row."""
    return scaling.block if scaling.granularity == "block" else (1, columns)


def quantise_blockwise(
    values: "torch.Tensor", tile: tuple[int, int], dtype: "torch.dtype"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Quantise fp32 [R, C] to (`dtype` [R, C], fp32 scales [ceil(R/tile_r), ceil(C/tile_c)]); values = q * scale.

    A scale is the largest magnitude in its tile over the largest of the format; an all-zero tile has scale 1.
    """
    import torch

    top = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    amax = _tile_amax(values, tile)
    scales = torch.where(amax > 0, amax / top, torch.ones_like(amax))
    scaled = apply_scales(scales.reciprocal(), tile, values.clone()).clamp_(-top, top)
    return (scaled if dtype.is_floating_point else scaled.round_()).to(dtype), scales


def quantise_mx(values: "torch.Tensor", group: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Quantise fp32 [R, C] to (float4_e2m1fn_x2 [R, C/2], float8_e8m0fnu scales [R, C/group]) as in OCP's MX format.

    A scale is the power of two that brings the largest magnitude of its group to [4, 8); values above 6 saturate. C is
    a multiple of `group`, which is even.
    """
    import torch

    amax = _tile_amax(values, (1, group))
    exponents = torch.where(amax > 0, amax.log2().floor() - 2, torch.zeros_like(amax)).clamp_(-127, 127)
    scaled = apply_scales(torch.exp2(-exponents), (1, group), values.clone())
    steps = torch.tensor(E2M1_MAGNITUDES, device=values.device)
    codes = torch.bucketize(scaled.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    packed = codes[:, 0::2] | codes[:, 1::2] << 4  # even k in the low half
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return packed.view(torch.float4_e2m1fn_x2), scales


def unpack_mx(values: "torch.Tensor") -> "torch.Tensor":
    """float4_e2m1fn_x2 [..., C/2] as fp32 [..., C], without applying scales."""
    import torch

    bits = values.view(torch.uint8)
    codes = torch.stack((bits & 15, bits >> 4), -1).flatten(-2)
    # Arithmetic instead of a lookup table, which would be copied to the device: graph capture does not allow that.
    exponent, half = (codes >> 1 & 3).float(), (codes & 1).float()
    magnitude = torch.where(exponent > 0, (half + 2) * torch.exp2(exponent - 2), half * 0.5)
    return torch.where(codes > 7, -magnitude, magnitude)


def _tile_amax(values: "torch.Tensor", tile: tuple[int, int]) -> "torch.Tensor":
    import torch

    rows, columns = values.shape
    pad = (0, -columns % tile[1], 0, -rows % tile[0])
    padded = torch.nn.functional.pad(values, pad) if any(pad) else values
    return padded.view(padded.shape[0] // tile[0], tile[0], -1, tile[1]).abs().amax((1, 3))


def apply_scales(scales: "torch.Tensor", tile: tuple[int, int], values: "torch.Tensor") -> "torch.Tensor":
    """Multiply `values` [R, C] in place by the scales [ceil(R/tile_r), ceil(C/tile_c)] of their tiles."""
    rows, columns = values.shape
    if tile[0] > 1:
        scales = scales.repeat_interleave(tile[0], 0)[:rows]
    whole = columns // tile[1]
    body = values[:, : whole * tile[1]].view(rows, whole, tile[1]) if whole else None
    if body is not None:
        body.mul_(scales[:, :whole, None])
    if columns % tile[1]:
        values[:, whole * tile[1] :].mul_(scales[:, whole:])
    return values
