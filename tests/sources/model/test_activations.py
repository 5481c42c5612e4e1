"""The experts' activation by architecture and field: key columns, or a one-line error."""

from dataclasses import replace

import pytest

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.model.source import ModelShapes

SIZES = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 16}
MOE = {**SIZES, "vocab_size": 2048, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
DBRX = {"d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8}}
FFN = {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}


def source(architecture: str, **fields: object) -> ModelShapes:
    sizes = {} if architecture == "Dbrx" else MOE
    config = {"architectures": [f"{architecture}ForCausalLM"], **sizes, **fields}
    return ModelShapes(path=None, config=config, tp=1, ep=1, nsets=[16], quantization="config")


def experts(architecture: str, **fields: object) -> Problem:
    (problem,) = source(architecture, **fields).problems(load_family("fmoe"), NOTHING, "sm_90")
    return problem


@pytest.mark.parametrize(
    ("architecture", "fields", "activation"),
    [
        ("Mixtral", {"hidden_act": "silu"}, "Silu"),
        ("Mixtral", {}, "Silu"),
        ("Qwen3Moe", {"hidden_act": "silu"}, "Silu"),
        ("DeepseekV3", {"hidden_act": "silu", **LATENT}, "Silu"),
        ("Glm4Moe", {"hidden_act": "silu", "swiglu_limit": None}, "Silu"),
        ("PhiMoE", {"hidden_act": "swish"}, "Silu"),
        ("PhiMoE", {"hidden_act": "gelu"}, "Gelu"),
        ("Gemma4", {"hidden_activation": "gelu"}, "Gelu"),
        ("Dbrx", {**DBRX, "ffn_config": {**FFN, "ffn_act_fn": {"name": "gelu"}}}, "Gelu"),
    ],
)
def test_the_activation_is_the_configs(architecture: str, fields: dict[str, object], activation: str) -> None:
    problem = experts(architecture, **fields)
    assert (problem["act_type"], problem["doweight_stage1"]) == (f"ActivationType.{activation}", 0)


def test_llama_4_weighs_what_its_experts_are_given() -> None:
    problem = experts("Llama4", hidden_act="silu")
    assert (problem["act_type"], problem["doweight_stage1"]) == ("ActivationType.Silu", 1)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("GptOss", {"hidden_act": "silu"}, "experts with biases and a clamped SwiGLU"),
        ("Mixtral", {"hidden_act": "silu", "swiglu_limit": 7.0}, "experts with a clamped SwiGLU"),
        ("Mixtral", {"swiglu_limits": [0, 0, 7.0, 0]}, "experts with a clamped SwiGLU"),
        ("Qwen3Moe", {"hidden_act": "gelu_new"}, "hidden_act: 'gelu_new'"),
        ("Mixtral", {"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ("Gemma4", {"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation: 'gelu_pytorch_tanh'"),
        ("Gemma4", {}, "experts' activation: 'gelu_pytorch_tanh'"),
    ],
)
def test_experts_that_no_fused_kernel_has_are_refused(
    architecture: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=rf"\(grouped\): {message}, which kernel=fmoe does not compute") as caught:
        experts(architecture, **fields)
    assert "\n" not in str(caught.value)


def test_no_kernel_is_suggested_that_lacks_the_experts() -> None:
    sixteen = load_family("a16w16")
    assert source("Mixtral").left_out(sixteen, NOTHING, "sm_90") == "the experts (kernel=fmoe)"
    assert "no kernel of ours" in source("GptOss").left_out(sixteen, NOTHING, "sm_90")


def test_experts_in_a_format_that_no_kernel_has() -> None:
    with pytest.raises(UserError) as caught:
        experts("Mixtral", quantization_config={"quant_method": "mxfp4"})
    assert str(caught.value) == (
        "shapes.config: experts.w13 (grouped): MXFP4 weights: fmoe: q_type: 'QuantType.per_1x32' is not computed, "
        "expected QuantType.No, QuantType.per_Token or QuantType.per_1x128; "
        "shapes.quantization=ignore takes them in 16 bits"
    )


def test_a_routing_of_the_kernels_options_must_be_possible() -> None:
    fmoe, given = load_family("fmoe"), replace(NOTHING, key={"routing": "skewed"})
    (problem,) = source("Mixtral").problems(fmoe, given, "sm_90")
    assert problem["routing"] == "skewed"
    with pytest.raises(UserError, match=r"^kernel\.key\.routing: '32/0' gives the busiest of 32 experts 32 times"):
        source("Mixtral").problems(fmoe, replace(NOTHING, key={"routing": "32/0"}), "sm_90")
