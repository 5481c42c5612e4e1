"""A mixture of experts: random operands with a realistic routing, the fp32 reference, its tolerance and its cost."""

import torch

from gemmpipe.family import Experts, GemmSpec, Inputs, Scaling, Weights
from gemmpipe.operands import bytes_of, dtype_of, is_fp8, scale_count, signed_normal, stored
from gemmpipe.reference import dequantise, exact_fp32

_POPULARITY = 0.25
"""Standard deviation of the experts' popularity, in those of a row's own preference. With 8 of 128 experts a row the
busiest expert gets 2.7 times the mean and the idlest a fifth of it, with 2 of 8 it is 1.6 and 0.6 (4096 rows)."""
_FP8 = 0.12


def experts_of(spec: GemmSpec) -> Experts:
    """The spec's experts. Raises ValueError for a plain product."""
    if spec.experts is None:
        raise ValueError("a product without experts")
    return spec.experts


def make_weights(spec: GemmSpec, generator: torch.Generator) -> Weights:
    """Random `w` [E, wide, K] and `w2` [E, N, inner] of about 1/sqrt(their inner size), and the scales of both."""
    experts = experts_of(spec)
    w, w_scale = _per_expert(experts.count, experts.wide, spec.k, spec, generator)
    w2, w2_scale = _per_expert(experts.count, spec.n, experts.inner, spec, generator)
    return Weights(w=w, w_scale=w_scale, w2=w2, w2_scale=w2_scale)


def _per_expert(
    count: int, rows: int, columns: int, spec: GemmSpec, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One expert's weight at a time: in fp32 all of them would take four times the memory of the result."""
    device = generator.device
    weight = torch.empty(count, rows, columns, dtype=dtype_of(spec.w_dtype), device=device)
    scales: list[torch.Tensor] = []
    for expert in range(count):
        values = signed_normal(rows, columns, generator).mul_(columns**-0.5)
        weight[expert], scale = stored(values, spec.w_dtype, spec.w_scale, generator)
        if scale is not None:
            scales.append(scale)
    return weight, torch.stack(scales) if scales else None


def make_inputs(spec: GemmSpec, generator: torch.Generator) -> Inputs:
    """Random `x` [M, K] of about 1, and the experts of each row with weights that sum to 1 (softmax, normalised)."""
    x = signed_normal(spec.m, spec.k, generator).to(dtype_of(spec.x_dtype))
    experts = experts_of(spec)
    liking = torch.randn(spec.m, experts.count, generator=generator, device=generator.device)
    liking += _POPULARITY * torch.randn(experts.count, generator=generator, device=generator.device)
    best = liking.topk(experts.topk, dim=1)
    return Inputs(x=x, topk_ids=best.indices.to(torch.int32), topk_weights=best.values.softmax(1))


def routing(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_ids, topk_weights). Raises ValueError where there are none."""
    if inputs.topk_ids is None or inputs.topk_weights is None:
        raise ValueError("experts need topk_ids and topk_weights")
    return inputs.topk_ids, inputs.topk_weights


def activate(spec: GemmSpec, product: torch.Tensor) -> torch.Tensor:
    """act(product), or act(its first half) * its second half, [..., inner]."""
    experts = experts_of(spec)
    act = torch.nn.functional.silu if experts.activation == "silu" else torch.nn.functional.gelu
    if not experts.gated:
        return act(product)
    return act(product[..., : experts.inner]) * product[..., experts.inner :]


def expert_weights(
    spec: GemmSpec, weights: Weights, expert: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both weights of one expert as `dtype`, times their scales; where nothing is to convert, no copies."""
    if weights.w2 is None:
        raise ValueError("experts need a second weight")
    pairs = ((weights.w, weights.w_scale), (weights.w2, weights.w2_scale))
    first, second = (dequantise(w[expert], None if s is None else s[expert], spec.w_scale, dtype) for w, s in pairs)
    return first, second


def product(spec: GemmSpec, inputs: Inputs, weights: Weights) -> torch.Tensor:
    """What the experts give, in fp32 [M, N] without TF32: nothing between the two products is rounded or quantised."""
    experts = experts_of(spec)
    ids, shares = routing(inputs)
    out = torch.zeros(inputs.x.shape[0], spec.n, dtype=torch.float32, device=inputs.x.device)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        w, w2 = expert_weights(spec, weights, expert, torch.float32)
        share = shares[rows, places, None]
        with exact_fp32(inputs.x.device.type):
            wide = inputs.x[rows].float() @ w.T
            inner = activate(spec, wide * share if experts.weight_first else wide)
            part = inner @ w2.T
        out.index_add_(0, rows, part if experts.weight_first else part.mul_(share))
    return out


def tolerance(spec: GemmSpec) -> tuple[float, float]:
    """(atol as a share of the row's RMS, rtol) for a right implementation.

    16 bits: engines round the wide product, h and each expert's part to them, in all a few units (2**-8 for bf16) of
    the RMS, random over the sums, which makes less than one; two units are allowed, and the accumulation of two
    products in fp32. fp8: e4m3 has 3 bits of fraction, so rounding x and h errs by 2.6 % of an element on average, and
    a sum of such terms by as much of its RMS whatever K is; gate and up each carry x's. Done in fp32 but for these two
    roundings, a row is off by 4.3 % of its RMS, by 7 % at worst (K 200 to 2048); 12 % are allowed, to a row as to an
    element.
    """
    unit = float(torch.finfo(dtype_of(spec.out_dtype)).eps)
    accumulation = 8 * max(spec.k, experts_of(spec).inner) ** 0.5 * 2.0**-24
    return (_FP8 if is_fp8(spec.w_dtype) else 2 * unit + 2 * accumulation), unit


def flops(spec: GemmSpec) -> float:
    """Both products of every row with each of its experts; the activation is not counted."""
    experts = experts_of(spec)
    return 2.0 * spec.m * experts.topk * (experts.wide * spec.k + experts.inner * spec.n)


def bytes_moved(spec: GemmSpec) -> float:
    """x and the routing read and the output written once, and the weights of the experts that rows are sent to.

    So many experts are hit on average when each row picks its own at random: E * (1 - (1 - topk/E)**M).
    """
    experts = experts_of(spec)
    hit = experts.count * (1 - (1 - experts.topk / experts.count) ** spec.m)
    weights = bytes_of(spec.w_dtype, spec.weight_elements) / experts.count
    weights += _scale_bytes(spec.w_scale, experts.wide, spec.k) + _scale_bytes(spec.w_scale, spec.n, experts.inner)
    x, out = bytes_of(spec.x_dtype, spec.m * spec.k), bytes_of(spec.out_dtype, spec.m * spec.n)
    return hit * weights + x + out + 8.0 * spec.m * experts.topk


def _scale_bytes(scaling: Scaling | None, rows: int, columns: int) -> int:
    return bytes_of(scaling.dtype, scale_count(scaling, rows, columns)) if scaling else 0
