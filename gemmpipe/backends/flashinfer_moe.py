"""FlashInfer's mixture of experts, `flashinfer.fused_moe.cutlass_fused_moe`: bf16, or fp8 weights with block scales.

It reads the first weight with the up projection's rows before the gate's, x in bf16, and quantises by itself.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmpipe.family import Experts, GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.family.moe import routing

if TYPE_CHECKING:
    import torch

_BLOCK = 128
_ALIGNMENT = 8
"""Elements of 16 bytes of bf16."""


def form_violation(spec: GemmSpec, experts: Experts) -> str | None:
    """`rule: detail` of the first rule broken, or None."""
    if spec.x_dtype != "bfloat16" or spec.out_dtype != "bfloat16":
        return f"types: bfloat16 in and out, not {spec.x_dtype} and {spec.out_dtype}"
    if not experts.gated or experts.activation != "silu" or experts.weight_first:
        return "activation: silu with a gate, and the routing weight on the result"
    if experts.quantised is None:
        if spec.w_dtype != "bfloat16":
            return f"weights: bfloat16, or fp8 with block scales, not {spec.w_dtype}"
        sizes = all(size % _ALIGNMENT == 0 for size in (spec.k, spec.n, experts.inner))
        return None if sizes else f"alignment: sizes must be multiples of {_ALIGNMENT}"
    if spec.w_scale is None or spec.w_scale.block != (_BLOCK, _BLOCK) or spec.w_dtype != "float8_e4m3fn":
        return "weights: fp8 is float8_e4m3fn with 128x128 scales"
    if any(size % _BLOCK for size in (spec.k, spec.n, experts.inner)):
        return f"sizes: model_dim={spec.k} and inter_dim={experts.inner} must be multiples of {_BLOCK}"
    return None


def prepare(weights: Weights) -> Prepared:
    """A copy of the first weight and of its scales with the up projection's rows first."""
    w, scales = _up_first(weights.w), weights.w_scale
    kept = (w, None if scales is None else _up_first(scales))
    size = sum(each.numel() * each.element_size() for each in kept if each is not None)
    return Prepared(weights=weights, extra=kept, extra_bytes=size)


def bind(spec: GemmSpec, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Launch:
    """A call that writes `out` [M, N], in memory that the library allocates."""
    from flashinfer.fused_moe import cutlass_fused_moe

    multiply: Callable[..., Any] = cutlass_fused_moe
    weights = prepared.weights
    if not isinstance(prepared.extra, tuple) or weights.w2 is None:
        raise ValueError("flashinfer's experts need prepared weights")
    w, w_scale = prepared.extra
    ids, shares = routing(inputs)
    scaled = {"quant_scales": [], "use_deepseek_fp8_block_scale": False}
    if w_scale is not None:
        assert weights.w2_scale is not None
        scaled = {"quant_scales": [w_scale, weights.w2_scale.contiguous()], "use_deepseek_fp8_block_scale": True}
    import torch

    arguments = {
        "input": inputs.x.contiguous(),
        "token_selected_experts": ids.to(torch.int32).contiguous(),
        "token_final_scales": shares.to(torch.float32).contiguous(),
        "fc1_expert_weights": w,
        "fc2_expert_weights": weights.w2.contiguous(),
        "output_dtype": torch.bfloat16,
        "output": out,
        **scaled,
    }

    def launch() -> torch.Tensor:
        multiply(**arguments)
        return out

    return launch


def _up_first(rows: "torch.Tensor") -> "torch.Tensor":
    """[E, 2 * n, columns] with the second half of each expert's rows first."""
    import torch

    gate, up = rows.chunk(2, 1)
    return torch.cat((up, gate), 1)
