"""A forward of Qwen3, dense or mixture, in fp32 with the weights of a live vLLM model: the reference of its logits.

Plain PyTorch without vLLM's layers: weights in fp8 are multiplied by their scales, a part of a matrix at a time, and
activations are never rounded. It reads the tree of modules as vLLM names it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

ROWS = 4096
"""Rows of a weight that are converted at a time, a multiple of a block of scales."""
BLOCK = 128


def scale_of(layer: Any, prefix: str) -> torch.Tensor | None:
    """The scales of a weight in fp8, under either of vLLM's names; None for a weight in 16 bits."""
    for name in ("weight_scale_inv", "weight_scale"):
        found = getattr(layer, prefix + name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]  # a parameter
    return None


def dequantised(weight: torch.Tensor, scale: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Parts of a weight [N, K] in fp32, of at most ROWS rows; scales are [N/128, K/128], rounded up.

    Raises ValueError for a weight in one byte without such scales.
    """
    n, k = weight.shape
    if weight.element_size() == 1 or scale is not None:
        wanted = (-(-n // BLOCK), -(-k // BLOCK))
        if scale is None or tuple(scale.shape) != wanted or scale.dtype != torch.float32:
            found = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
            raise ValueError(f"scales of a weight {tuple(weight.shape)}: {found}, expected float32 {wanted}")
    for start in range(0, n, ROWS):
        part = weight[start : start + ROWS].float()
        if scale is not None:
            blocks = scale[start // BLOCK : -(-(start + part.shape[0]) // BLOCK)]
            part *= blocks.repeat_interleave(BLOCK, 0)[: part.shape[0]].repeat_interleave(BLOCK, 1)[:, :k]
        yield part


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K]^T in fp32."""
    return torch.cat([x @ part.t() for part in dequantised(weight, scale)], dim=-1)


def linear(layer: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    """A linear layer without bias. Raises ValueError if its weight is not stored as [n, K]."""
    if tuple(layer.weight.shape) != (n, x.shape[-1]):
        raise ValueError(f"a weight is stored as {tuple(layer.weight.shape)}, expected {(n, x.shape[-1])}")
    return product(x, layer.weight, scale_of(layer, ""))


def norm(layer: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * layer.weight.float()


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [sequences, tokens, heads, d] at positions 0, 1, ...; halves are paired."""
    d = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
    angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(layer: Any, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Causal self-attention of x [sequences, tokens, hidden]."""
    heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    qkv = linear(layer.qkv_proj, x.flatten(0, 1), (heads + 2 * kv_heads) * d)
    q, k, v = qkv.view(*x.shape[:2], heads + 2 * kv_heads, d).split([heads, kv_heads, kv_heads], dim=2)
    eps, theta = config["rms_norm_eps"], float(config["rope_theta"])
    q, k = rotated(norm(layer.q_norm, q, eps), theta), rotated(norm(layer.k_norm, k, eps), theta)
    k, v = (each.repeat_interleave(heads // kv_heads, dim=2) for each in (k, v))
    scores = torch.einsum("sqhd,skhd->shqk", q, k) * d**-0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    out = torch.einsum("shqk,skhd->sqhd", weights, v).flatten(2)
    return linear(layer.o_proj, out.flatten(0, 1), x.shape[-1]).view_as(x)


def dense(layer: Any, x: torch.Tensor, inner: int) -> torch.Tensor:
    """The gated product of x [M, hidden]."""
    gate, up = linear(layer.gate_up_proj, x, 2 * inner).chunk(2, dim=-1)
    return linear(layer.down_proj, F.silu(gate) * up, x.shape[-1])


def mixture(layer: Any, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The experts' products of x [M, hidden], weighted by the router."""
    held = next(each for each in layer.experts.modules() if hasattr(each, "w13_weight"))
    probabilities = linear(layer.gate, x, config["num_experts"]).softmax(dim=-1)
    weights, chosen = probabilities.topk(config["num_experts_per_tok"], dim=-1)
    if config["norm_topk_prob"]:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    scales = [scale_of(held, prefix) for prefix in ("w13_", "w2_")]
    for expert in chosen.unique().tolist():
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        first, second = (None if each is None else each[expert] for each in scales)
        gate, up = product(x[rows], held.w13_weight[expert], first).chunk(2, dim=-1)
        out[rows] += product(F.silu(gate) * up, held.w2_weight[expert], second) * weights[rows, place, None]
    return out


@torch.no_grad()
def log_probabilities(model: Any, config: dict[str, Any], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log-probabilities [prompts, vocabulary] in fp32 after the last token of prompts of one length, on the CPU."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would round as 16 bits do
    try:
        body, eps = model.model, config["rms_norm_eps"]
        embedding = body.embed_tokens.weight
        x = embedding[torch.tensor(tokens, device=embedding.device)].float()
        for layer in body.layers:
            x = x + attention(layer.self_attn, norm(layer.input_layernorm, x, eps), config)
            given = norm(layer.post_attention_layernorm, x, eps).flatten(0, 1)
            if hasattr(layer.mlp, "experts"):
                x = x + mixture(layer.mlp, given, config).view_as(x)
            else:
                x = x + dense(layer.mlp, given, config["intermediate_size"]).view_as(x)
        last = norm(body.norm, x[:, -1], eps)
        logits = product(last, model.lm_head.weight)[:, : config["vocab_size"]]
        return logits.log_softmax(dim=-1).cpu()
    finally:
        torch.set_float32_matmul_precision(precision)
