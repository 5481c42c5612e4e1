"""Published hybrid decoders, compared with the modules that transformers builds from the file."""

from collections.abc import Mapping

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.sources.meta import MetaModelShapes
from gemmpipe.sources.model.linear import Linear
from gemmpipe.sources.model.quantization import Quantization, split_by_quantization
from gemmpipe.sources.model.rules import linears

Fields = Mapping[str, object]


def file(kind: str, hidden: int, heads: int, kv: int, *parts: Fields, **more: object) -> Fields:
    """A published file, reduced to 8 layers."""
    found: dict[str, object] = {"model_type": kind, "num_hidden_layers": 8, "vocab_size": 163840}
    found |= {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv}
    for part in parts:
        found |= part
    return found | more


GRANITE4: Fields = {
    "layer_types": [*["mamba"] * 5, "attention", "mamba", "mamba"],
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
}
NEMOTRON: Fields = {"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "expand": 2, "head_dim": 128}
MLA: Fields = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
KDA = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128, "num_heads": 32}
GEMMA4: Fields = {"head_dim": 256, "global_head_dim": 512, "layer_types": ["sliding_attention", "full_attention"] * 4}
GRANITE4_MOE = {"num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128}
KIMI_MOE = {"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024}
NANO_MOE = {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856}
FALCON = {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_n_groups": 2, "mamba_d_state": 256}
LFM2 = {"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_auto_adjust_ff_dim": True}
SWA = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
MIMO_MOE = {"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}
MAMBA = {"intermediate_size": 8192, "expand": 16, "state_size": 16, "time_step_rank": 256, "use_bias": False}
PUBLISHED: Mapping[str, Fields] = {
    "granite-4.0-h-small": file(
        *("granitemoehybrid", 4096, 32, 8, GRANITE4, GRANITE4_MOE),
        intermediate_size=768,
        shared_intermediate_size=1536,
    ),
    "granite-4.0-h-micro": file(
        *("granitemoehybrid", 2048, 32, 8, GRANITE4),
        intermediate_size=8192,
        shared_intermediate_size=8192,
        num_local_experts=0,
        mamba_n_heads=64,
    ),
    "Kimi-Linear-48B-A3B": file(
        *("kimi_linear", 2304, 32, 32, MLA, KIMI_MOE),
        linear_attn_config=KDA | {"short_conv_kernel_size": 4},
        head_dim=72,
        q_lora_rank=None,
        intermediate_size=9216,
        first_k_dense_replace=1,
        moe_layer_freq=1,
    ),
    "Nemotron-H-8B": file(
        *("nemotron_h", 4096, 32, 8, NEMOTRON),
        hybrid_override_pattern="M-M-M*-M",
        mamba_num_heads=128,
        intermediate_size=21504,
    ),
    "Nemotron-3-Nano-30B-A3B": file(
        *("nemotron_h", 2688, 32, 2, NEMOTRON, NANO_MOE),
        hybrid_override_pattern="MEMEM*EM",
        mamba_num_heads=64,
        intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
    "Falcon-H1-7B": file("falcon_h1", 3072, 12, 2, FALCON, head_dim=128, intermediate_size=12288),
    "LFM2-1.2B": file("lfm2", 2048, 32, 8, LFM2, block_ff_dim=12288, full_attn_idxs=[2, 5], conv_bias=False),
    "MiMo-V2-Flash": file(
        *("mimo_v2_flash", 4096, 64, 4, SWA, MIMO_MOE),
        head_dim=192,
        v_head_dim=128,
        intermediate_size=16384,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0, 1, 1],
        moe_layer_freq=[0, *[1] * 7],
    ),
    "falcon-mamba-7b": MAMBA
    | {"model_type": "falcon_mamba", "num_hidden_layers": 8, "hidden_size": 4096, "vocab_size": 65024},
    "gemma-4-31B": file(
        *("gemma4_text", 5376, 32, 16, GEMMA4),
        intermediate_size=21504,
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
        hidden_size_per_layer_input=0,
    ),
}


def cut(config: Fields, tp: int = 1) -> dict[tuple[str, int], tuple[int, int]]:
    """(layer, N) of every product, to its K and calls."""
    return {(x.layer, x.n): (x.k, x.calls) for x in linears(config, tp, "here", sixteen_bit=True)}


def total(found: list[Linear]) -> list[tuple[object, ...]]:
    return sorted((x.n, x.k, x.bias, x.experts, x.sixteen_bit, x.topk) for x in found for _ in x.layer_ids)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_what_transformers_builds(name: str, tp: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = PUBLISHED[name]
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {config['model_type']}")
    meta = MetaModelShapes(path=None, config=config, tp=tp, ep=1, nsets=[1], quantization="config")
    assert total(meta.linears(config, name, batched=False)) == total(linears(config, tp, name, sixteen_bit=True))


def test_a_single_group_of_a_state_space_is_on_every_device() -> None:
    """vLLM's MambaMixer2: gate, input and time step sharded, B and C of the one group replicated."""
    config = PUBLISHED["granite-4.0-h-small"]
    assert cut(config)["mamba.in_proj", 2 * 8192 + 2 * 128 + 128] == (4096, 7)
    assert cut(config, 8)["mamba.in_proj", 2 * 1024 + 2 * 128 + 16] == (4096, 7)
    assert cut(config, 8)["mamba.out_proj", 4096] == (1024, 7)
    eight = {**PUBLISHED["Nemotron-H-8B"]}
    assert cut(eight, 8)["mamba.in_proj", 2 * 1024 + 2 * 128 + 16] == (4096, 4)
    with pytest.raises(UserError, match=r"mamba_n_groups 2 does not divide by shapes.tp=4"):
        linears(PUBLISHED["Falcon-H1-7B"], 4, "here", sixteen_bit=True)
    with pytest.raises(UserError, match=r"mamba_n_heads 128 does not divide by shapes.tp=3"):
        linears({**config, "layer_types": ["mamba"] * 8}, 3, "here", sixteen_bit=True)


def test_delta_attention_between_latent_attention() -> None:
    found = cut(PUBLISHED["Kimi-Linear-48B-A3B"], 4)
    assert found["self_attn.qkv_proj", 3072] == (2304, 6)
    assert found["self_attn.f_a_proj", 128] == (2304, 6), "the first half of a gate is on every device"
    assert found["self_attn.g_b_proj", 1024] == (128, 6)
    assert found["q_proj", 8 * 192] == (2304, 2)
    assert found["kv_a_proj", 576] == (2304, 2)


def test_gemma_4s_layers_with_shared_keys_are_wider_and_keep_qkv() -> None:
    """As in vLLM: a full qkv where transformers has only the query, so meta is no reference here."""
    fields = {"intermediate_size": 6144, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}
    found = cut(file("gemma4_text", 1536, 8, 1, GEMMA4, fields, hidden_size_per_layer_input=256), 2)
    assert found["qkv_proj", (8 // 2 + 2) * 256] == (1536, 4)
    assert found["qkv_proj", (8 // 2 + 2) * 512] == (1536, 4)
    assert found["gate_up_proj", 6144] == found["gate_up_proj", 12288] == (1536, 4)
    assert found["per_layer_model_projection", 8 * 256 // 2] == (1536, 1)
    assert found["per_layer_input_gate", 256] == (1536, 8)


@pytest.mark.e2e
def test_a_checkpoint_names_modules_its_own_way() -> None:
    left = ("backbone.layers.0.mixer.in_proj", "backbone.layers.5.mixer.q_proj", "*.mixer.down_proj")
    quantization = Quantization(what="fp8", families=("a8w8",), experts="", weight="fp8", ignored=left)
    found = linears(PUBLISHED["Nemotron-H-8B"], 1, "here", sixteen_bit=True)
    sixteen = {(x.layer, x.layer_ids) for x, quantised in split_by_quantization(found, quantization) if not quantised}
    assert sixteen == {
        ("mamba.in_proj", (0,)),
        ("qkv_proj", (5,)),
        ("down_proj", (1, 3, 6)),
        ("lm_head", (0,)),
    }


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("Nemotron-H-8B", {"hybrid_override_pattern": "M-M"}, r"hybrid_override_pattern: 'M-M', expected 8 of"),
        ("Nemotron-H-8B", {"hybrid_override_pattern": "M-M-M*-X"}, "hybrid_override_pattern: 'M-M-M"),
        ("granite-4.0-h-micro", {"layer_types": ["mamba"] * 7}, "layer_types: 7 values"),
        ("granite-4.0-h-micro", {"layer_types": ["lstm"] * 8}, "layer_types: .* expected a list of full_attention"),
        ("LFM2-1.2B", {"full_attn_idxs": [2, 8]}, r"attention in layers \[2, 8\], expected 0 to 7"),
        ("LFM2-1.2B", {"block_ffn_dim_multiplier": "wide"}, "block_ffn_dim_multiplier: 'wide', expected a number"),
        ("Kimi-Linear-48B-A3B", {"linear_attn_config": None}, "no field 'linear_num_heads'"),
    ],
)
def test_contradictions(name: str, change: Fields, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        linears({**PUBLISHED[name], **change}, 1, "here", sixteen_bit=True)
    assert "\n" not in str(caught.value)
