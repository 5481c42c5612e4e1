"""SGLang's Triton experts: a call with a tuned row for its number of tokens runs it, any other SGLang's own kernels."""

from collections.abc import Callable
from typing import Any

import torch

from gemmpipe.plugins.engine_dispatch import DTYPES_16BIT, SCALE_BLOCK
from gemmpipe.plugins.engine_experts import engine_experts
from gemmpipe.plugins.scope import EXPERTS
from gemmpipe.plugins.sglang_notice import SGLANG_NOTICE
from gemmpipe.runtime.moe import RoutedOperands

_UNSET = (
    *("b1", "b2", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "a1_q"),
    *("use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "fuse_swiglu_interleaved"),
)
"""Arguments of `fused_experts` that tuned kernels do not have."""
_READ = ("use_fp8_w8a8", "per_channel_quant", "w1_scale", "w2_scale", "block_shape")
_UNSET_FIELDS = (
    *("apply_router_weight_on_input", "no_combine", "no_combine_keep_router_weight"),
    *("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit", "silu_mul_keep_fp32"),
)
"""Fields of `MoeRunnerConfig` that tuned kernels do not have."""


def around_experts(
    original: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    *rest: Any,
    **more: Any,
) -> torch.Tensor:
    """`fused_experts`: the result is new memory, also where SGLang would overwrite the input."""
    out = None
    if not rest and not torch.compiler.is_compiling() and SGLANG_NOTICE.allows(EXPERTS):
        out = run_rows(hidden_states, w1, w2, topk_output, moe_runner_config, more)
    return original(hidden_states, w1, w2, topk_output, moe_runner_config, *rest, **more) if out is None else out


def run_rows(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, config: Any, more: dict[str, Any]
) -> torch.Tensor | None:
    """The experts by a tuned row [tokens, model_dim]; None if none answers."""
    if reason := experts_reason(x, w1, w2, config, more):
        SGLANG_NOTICE.leave(EXPERTS, reason)
        return None
    weights = topk_output.topk_weights
    if (factor := config.routed_scaling_factor) not in (None, 1.0):
        weights = weights.float() * factor  # SGLang multiplies the sum, in fp32 too
    given = RoutedOperands(
        x=x,
        w=w1,
        w2=w2,
        topk_weights=weights,
        topk_ids=topk_output.topk_ids,
        w_scale=more.get("w1_scale"),
        w2_scale=more.get("w2_scale"),
        activation="silu",
        weight_first=False,
    )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out if engine_experts().run(given, out) else None


def experts_reason(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, config: Any, more: dict[str, Any]) -> str:
    """Why these experts are left to SGLang; empty if a row may answer."""
    for name, value in more.items():
        if name in _UNSET and value is not None and value is not False:
            return name
        if name not in _UNSET and name not in _READ:
            return f"{name}, which is not known here"
    for name in _UNSET_FIELDS:
        if getattr(config, name, None):
            return name
    if config.num_experts is None or config.num_experts != config.num_local_experts:
        return "experts are spread over devices"
    if config.activation != "silu" or not config.is_gated:
        return f"activation {config.activation}{'' if config.is_gated else ', not gated'}"
    if x.dim() != 2 or x.dtype not in DTYPES_16BIT or w1.shape[1] != 2 * w2.shape[2]:
        return "x is not [tokens, K] in 16 bits, or weights are packed"
    if not (w1.is_contiguous() and w2.is_contiguous()):
        return "weights are not contiguous"
    if not more.get("use_fp8_w8a8"):
        return "" if w1.dtype == x.dtype and more.get("w1_scale") is None else f"weights in {w1.dtype}"
    if more.get("block_shape") is not None:
        return "" if list(more["block_shape"]) == [SCALE_BLOCK, SCALE_BLOCK] else f"blocks of {more['block_shape']}"
    return "" if more.get("per_channel_quant") else "one scale per expert"
