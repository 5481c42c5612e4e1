"""vLLM's Triton experts: a call with a tuned row for its number of tokens runs it, any other vLLM's own kernels.

The tuned kernels take activations in 16 bits and quantise them, so vLLM must not quantise them before; its own kernels
then do it in `apply`, as they do for LoRA.
"""

import inspect
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from gemmpipe.core.errors import GemmpipeError
from gemmpipe.plugins.engine_dispatch import DTYPES_16BIT, SCALE_BLOCK
from gemmpipe.plugins.engine_experts import engine_experts
from gemmpipe.plugins.scope import EXPERTS
from gemmpipe.plugins.tuned_products import rows_text
from gemmpipe.plugins.vllm_notice import NOTICE, PRODUCTS
from gemmpipe.runtime.cache import process_device
from gemmpipe.runtime.moe import RoutedOperands

PARAMETERS = (
    "self",
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "activation",
    "global_num_experts",
    "expert_map",
    "a1q_scale",
    "a2_scale",
    "workspace13",
    "workspace2",
    "expert_tokens_meta",
    "apply_router_weight_on_input",
)
"""The parameters of `TritonExperts.apply`, which vLLM passes by name."""
_ELIGIBLE = "gemmpipe_eligible"
"""The attribute of experts: whether rows may answer, found once per layer."""


def install() -> None:
    """Replace `apply` and `expects_unquantized_inputs` of vLLM's Triton experts. Raises GemmpipeError."""
    engine_apply = TritonExperts.apply
    if getattr(engine_apply, _ELIGIBLE, False):
        return
    found = tuple(inspect.signature(engine_apply).parameters)
    if found != PARAMETERS:
        raise GemmpipeError(f"TritonExperts.apply has the parameters {', '.join(found)}")
    deferred: Any = inspect.getattr_static(TritonExperts, "expects_unquantized_inputs")

    def apply(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, **others: Any) -> None:
        if not run_tuned(self, output, hidden_states, others):
            engine_apply(self, output=output, hidden_states=hidden_states, **others)

    def expects_unquantized_inputs(self: Any) -> bool:
        return bool(deferred.fget(self)) or (self.quant_dtype is not None and is_eligible(self))

    setattr(apply, _ELIGIBLE, True)
    TritonExperts.apply = apply
    TritonExperts.expects_unquantized_inputs = property(expects_unquantized_inputs)


def is_eligible(experts: Any) -> bool:
    """True if rows may answer for these experts; found once, and without an active LoRA."""
    if getattr(experts, "_lora_context", None) is not None:
        NOTICE.leave(EXPERTS, "LoRA")
        return False
    known = getattr(experts, _ELIGIBLE, None)
    if known is None:
        NOTICE.announce()
        reason = ineligible_reason(experts)
        if reason:
            NOTICE.leave(EXPERTS, reason)
        known = not reason
        setattr(experts, _ELIGIBLE, known)
    return bool(known)


def ineligible_reason(experts: Any) -> str:
    """Why these experts are left to vLLM; empty if rows may answer."""
    if type(experts) is not TritonExperts:
        return f"{type(experts).__name__} is another kind of experts"
    if NOTICE.moe_backend:
        return NOTICE.moe_backend
    parallel = experts.moe_config.moe_parallel_config
    if parallel.use_ep or parallel.use_all2all_kernels or getattr(parallel, "dp_size", 1) > 1:
        return "experts are spread over devices"
    quantised = experts.quant_config
    clamp = getattr(getattr(experts, "activation_config", quantised), "clamp_limit", None)
    if clamp is not None or getattr(quantised, "gemm1_clamp_limit", None) is not None:
        return "the activation is clamped"
    if experts.w1_bias is not None or experts.w2_bias is not None:
        return "experts have a bias"
    if experts.quant_dtype is not None and not _is_fp8_scheme(experts):
        return f"scheme {experts.quant_dtype}, scales of {experts.block_shape or 'tensors'}"
    if getattr(quantised, "use_int8_w8a16", False) or getattr(quantised, "use_int4_w4a16", False):
        return "weights are integers"
    if not rows_text(PRODUCTS[EXPERTS][1], process_device()):
        return "no tuned rows for this device"
    return ""


def _is_fp8_scheme(experts: Any) -> bool:
    """True for fp8 with dynamic scales of 1 x 128 and 128 x 128, or per token and channel."""
    if not experts.quant_config.use_fp8_w8a8 or experts.a1_scale is not None or experts.a2_scale is not None:
        return False
    by_rows = experts.block_shape is None and experts.per_act_token_quant and experts.per_out_ch_quant
    return bool(by_rows or list(experts.block_shape or ()) == [SCALE_BLOCK, SCALE_BLOCK])


def run_tuned(experts: Any, output: torch.Tensor, x: torch.Tensor, others: dict[str, Any]) -> bool:
    """Compute the experts into `output` by a tuned row; False if none answers."""
    if not is_eligible(experts) or x.dtype not in DTYPES_16BIT or output.dtype != x.dtype:
        return False
    if others["a1q_scale"] is not None or others["expert_map"] is not None or others["apply_router_weight_on_input"]:
        return False
    if others["activation"] != MoEActivation.SILU or others["global_num_experts"] not in (-1, others["w1"].shape[0]):
        return False
    hooked = getattr(experts, "_uses_post_gemm2_hook", None)
    if hooked is not None and hooked(x.shape[0]):
        return False
    if output.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return False  # the tuned kernels may write the output before they have read all of x
    given = RoutedOperands(
        x=x,
        w=others["w1"],
        w2=others["w2"],
        topk_weights=others["topk_weights"],
        topk_ids=others["topk_ids"],
        w_scale=experts.w1_scale,
        w2_scale=experts.w2_scale,
        activation="silu",
        weight_first=False,
    )
    return engine_experts().run(given, output)
