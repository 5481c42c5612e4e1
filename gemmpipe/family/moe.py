"""Mixture of experts: random operands with realistic routing, the fp32 reference, its tolerance and its cost."""

from typing import TYPE_CHECKING

from gemmpipe.family import Experts, GemmSpec, Inputs, Scaling, Weights
from gemmpipe.family import routing as routed
from gemmpipe.family.operands import (
    is_fp8,
    quantise_with_random_scales,
    random_normal,
    scale_count,
    scale_tile,
    storage_bytes,
    torch_dtype,
    values_on_fp8_grid,
)
from gemmpipe.family.reference import dequantise, without_tf32

if TYPE_CHECKING:
    import torch


_FP8_ATOL = 0.08
_MAX_READS = 1.5


def require_experts(spec: GemmSpec) -> Experts:
    """The spec's experts. Raises ValueError for a plain product."""
    if spec.experts is None:
        raise ValueError("a product without experts")
    return spec.experts


def make_weights(spec: GemmSpec, generator: "torch.Generator") -> Weights:
    """Random `w` [E, w1_rows, K] and `w2` [E, N, inner] of about 1/sqrt(their last size), and the scales of both."""
    experts = require_experts(spec)
    w, w_scale = _per_expert(experts.count, experts.w1_rows, spec.k, spec, generator)
    w2, w2_scale = _per_expert(experts.count, spec.n, experts.inner, spec, generator)
    return Weights(w=w, w_scale=w_scale, w2=w2, w2_scale=w2_scale)


def _per_expert(
    count: int, rows: int, columns: int, spec: GemmSpec, generator: "torch.Generator"
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """A weight and its scales, made expert by expert: in fp32 all of them take four times the memory of the result."""
    import torch

    device = generator.device
    weight = torch.empty(count, rows, columns, dtype=torch_dtype(spec.w_dtype), device=device)
    scales: list[torch.Tensor] = []
    for expert in range(count):
        values = random_normal(rows, columns, generator).mul_(columns**-0.5)
        weight[expert], scale = quantise_with_random_scales(values, spec.w_dtype, spec.w_scale, generator)
        if scale is not None:
            scales.append(scale)
    return weight, torch.stack(scales) if scales else None


def make_inputs(spec: GemmSpec, generator: "torch.Generator") -> Inputs:
    """Random `x` [M, K] of about 1, and the experts of each row with weights that sum to 1 (softmax).

    Where x is quantised, its quantisation is exact (`tolerance` gives the reason).
    """
    import torch

    experts = require_experts(spec)
    if experts.quantised is None:
        x = random_normal(spec.m, spec.k, generator).to(torch_dtype(spec.x_dtype))
    else:
        x = values_on_fp8_grid(spec, scale_tile(experts.quantised, spec.k), generator)
    ids, preferences = routed.choose_experts(spec.m, experts.count, experts.topk, experts.routing, generator)
    return Inputs(x=x, topk_ids=ids.to(torch.int32), topk_weights=preferences.softmax(1))


def routing(inputs: Inputs) -> "tuple[torch.Tensor, torch.Tensor]":
    """(topk_ids, topk_weights). Raises ValueError if they are missing."""
    if inputs.topk_ids is None or inputs.topk_weights is None:
        raise ValueError("experts need topk_ids and topk_weights")
    return inputs.topk_ids, inputs.topk_weights


def activate(spec: GemmSpec, product: "torch.Tensor") -> "torch.Tensor":
    """act(product), or act(its first half) * its second half, [..., inner]."""
    import torch

    experts = require_experts(spec)
    act = torch.nn.functional.silu if experts.activation == "silu" else torch.nn.functional.gelu
    if not experts.gated:
        return act(product)
    return act(product[..., : experts.inner]) * product[..., experts.inner :]


def dequantise_expert(
    spec: GemmSpec, weights: Weights, expert: int, dtype: "torch.dtype"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Both weights of one expert as `dtype`, times their scales; not copied if they need no conversion."""
    if weights.w2 is None:
        raise ValueError("experts need a second weight")
    pairs = ((weights.w, weights.w_scale), (weights.w2, weights.w2_scale))
    first, second = (dequantise(w[expert], None if s is None else s[expert], spec.w_scale, dtype) for w, s in pairs)
    return first, second


def product(spec: GemmSpec, inputs: Inputs, weights: Weights) -> "torch.Tensor":
    """The output of the experts in fp32 [M, N] without TF32; nothing is rounded or quantised between the products."""
    import torch

    experts = require_experts(spec)
    ids, shares = routing(inputs)
    out = torch.zeros(inputs.x.shape[0], spec.n, dtype=torch.float32, device=inputs.x.device)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        w, w2 = dequantise_expert(spec, weights, expert, torch.float32)
        share = shares[rows, places, None]
        with without_tf32(inputs.x.device.type):
            wide = inputs.x[rows].float() @ w.T
            inner = activate(spec, wide * share if experts.weight_first else wide)
            part = inner @ w2.T
        out.index_add_(0, rows, part if experts.weight_first else part.mul_(share))
    return out


def tolerance(spec: GemmSpec) -> tuple[float, float]:
    """(atol as a share of the row's RMS, rtol) for a correct implementation.

    16 bits: engines round the wide product, h and each expert's part, in total a few units (2**-8 for bf16) of the
    RMS, random over the sums, which makes less than one; two units are allowed, plus the accumulation of two products
    in fp32.

    fp8: x is quantised without an error, since an error there has no bound. It changes gate and up by 2.6 % of their
    RMS over the columns, not of themselves. If a few columns of h make a row of the output (scales by row, or few
    columns) and their gate or up is small, the row is wrong by any share: up to 1.2 of its size with 16 columns, 0.28
    with 64 (70 rows, one expert each, 40 seeds, kernels without other errors). h is rounded to e4m3, with 3 bits of
    fraction: an element is wrong by at most 2**-4 of itself, and so is a row, since the parts of different columns are
    independent. 2**-4 and the two units of 16 bits are 8 %; the worst row of the same cases with exact x has 4.6 %.
    """
    import torch

    unit = float(torch.finfo(torch_dtype(spec.out_dtype)).eps)
    accumulation = 8 * max(spec.k, require_experts(spec).inner) ** 0.5 * 2.0**-24
    return (_FP8_ATOL if is_fp8(spec.w_dtype) else 2 * unit + 2 * accumulation), unit


def flops(spec: GemmSpec) -> float:
    """Operations of both products of every row with each of its experts, without the activation."""
    experts = require_experts(spec)
    return 2.0 * spec.m * experts.topk * (experts.w1_rows * spec.k + experts.inner * spec.n)


def expected_experts(spec: GemmSpec) -> float:
    """The experts that have rows on average, with the routing that the operands have (`make_inputs`)."""
    experts = require_experts(spec)
    return routed.expected_experts(spec.m, experts.count, experts.topk, experts.routing)


def hardly_shares_experts(spec: GemmSpec) -> bool:
    """True if the rows of a call have few experts in common, so that each pair may read its expert's weights itself.

    Popularity is left out: `_MAX_READS` was chosen by times over the experts that even routing has.
    """
    experts = require_experts(spec)
    routing = "uniform" if experts.routing in (None, *routed.ROUTINGS) else experts.routing
    even = routed.expected_experts(spec.m, experts.count, experts.topk, routing)
    return spec.m * experts.topk <= _MAX_READS * even


def bytes_moved(spec: GemmSpec) -> float:
    """Bytes of x, routing and output once, and of the weights of the experts that have rows (`expected_experts`)."""
    experts, hit = require_experts(spec), expected_experts(spec)
    weights = storage_bytes(spec.w_dtype, spec.weight_elements) / experts.count
    weights += _scale_bytes(spec.w_scale, experts.w1_rows, spec.k) + _scale_bytes(spec.w_scale, spec.n, experts.inner)
    x, out = storage_bytes(spec.x_dtype, spec.m * spec.k), storage_bytes(spec.out_dtype, spec.m * spec.n)
    return hit * weights + x + out + 8.0 * spec.m * experts.topk


def _scale_bytes(scaling: Scaling | None, rows: int, columns: int) -> int:
    return storage_bytes(scaling.dtype, scale_count(scaling, rows, columns)) if scaling else 0
