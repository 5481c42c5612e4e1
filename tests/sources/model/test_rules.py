"""Rules by architecture: dense layers in between, shared experts, indexers, linear attention, nested files."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import parse_object
from gemmpipe.sources.model.rules import RULES, linears

BASE: Mapping[str, object] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
MOE = {**BASE, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MLA = {
    **BASE,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

STATES: Mapping[str, object] = {
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads", "linear_num_heads"), 64),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size"), 64),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 8),
    "mamba_expand": 2,
    "expand": 2,
    "state_size": 16,
    "mamba_dt_rank": "auto",
    "time_step_rank": 128,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "shared_intermediate_size": 1024,
}
SAID = (
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list", "attn_layer_indices"),
    *("full_attn_idxs", "attn_layer_period", "full_attention_interval", "linear_attn_config", "per_layer_config"),
    *("hybrid_layer_pattern", "num_kv_shared_layers", "use_double_wide_mlp", "block_ffn_dim_multiplier"),
)


def cut(config: Mapping[str, object], tp: int = 1, **more: int) -> dict[str, tuple[int, int, int]]:
    return {x.layer: (x.n, x.k, x.calls) for x in linears(config, tp, "here", sixteen_bit=True, **more)}


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({"mlp_only_layers": [0, 5], "decoder_sparse_step": 1}, 2),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, 6),
        ({"mlp_only_layers": [1, 2], "decoder_sparse_step": 2}, 7),
        ({"first_k_dense_replace": 3}, 3),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 2}, 7),
        ({"moe_layer_freq": [0] * 4 + [1] * 8}, 4),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 11}, 1),
        ({"moe_layers": [3, 7, 11]}, 9),
        ({"moe_layers_enum": "4,5,6"}, 9),
        ({"interleave_moe_layer_step": 4}, 9),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": -1, "moe_layer_interval": 1}, 3),
    ],
)
def test_dense_layers_in_between(fields: Mapping[str, object], dense: int) -> None:
    found = cut({**MOE, "architectures": ["Qwen3MoeForCausalLM"], **fields})
    assert found["mlp.gate_up_proj"] == (12288, 2048, dense)
    assert found["experts.w13 (grouped)"] == (1536, 2048, 12 - dense)
    assert found["router(gate)"] == (64, 2048, 12 - dense)


def test_shared_experts_by_count_and_by_width() -> None:
    by_count = cut({**MOE, "architectures": ["Glm4MoeForCausalLM"], "n_shared_experts": 2}, tp=2)
    assert by_count["shared_experts.gate_up_proj"] == (1536, 2048, 12)
    assert by_count["shared_experts.down_proj"] == (2048, 768, 12)
    by_width = cut({**MOE, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 5632})
    assert by_width["shared_experts.gate_up_proj"] == (11264, 2048, 12)
    assert by_width["shared_expert_gate"] == (1, 2048, 12)


def test_experts_cut_or_dealt_out() -> None:
    config = {**MOE, "architectures": ["Qwen3MoeForCausalLM"]}
    assert cut(config, 4)["experts.w13 (grouped)"] == (384, 2048, 12)
    assert cut(config, 4, ep=4)["experts.w13 (grouped)"] == (1536, 2048, 12)
    assert {x.experts for x in linears(config, 4, "here", sixteen_bit=False, ep=4)} == {0, 16}
    with pytest.raises(UserError, match=r"64 experts do not divide by shapes.ep=3"):
        cut(config, 1, ep=3)
    with pytest.raises(UserError, match="num_experts_per_tok 65, expected at most 64"):
        cut({**config, "num_experts_per_tok": 65})


def test_the_indexer_of_sparse_attention_is_on_every_device() -> None:
    index = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    config = {**MLA, "architectures": ["DeepseekV32ForCausalLM"], **index}
    found = cut(config, 8)
    assert found["indexer.wq_b"] == (8192, 1536, 12)
    assert found["indexer.wk"] == (128, 2048, 12)
    assert found["indexer.weights_proj"] == (64, 2048, 12)
    assert "indexer.weights_proj" not in {x.layer for x in linears(config, 8, "here", sixteen_bit=False)}
    some = cut({**config, "indexer_types": ["full", "shared"] * 6})
    assert some["indexer.wk"][2] == 6


def test_decode_absorbs_latent_attentions_kv_b() -> None:
    config = {**MLA, "architectures": ["DeepseekV3ForCausalLM"]}
    batched = linears(config, 8, "here", sixteen_bit=True, batched=True)
    assert [(x.batch, x.n, x.k) for x in batched] == [(2, 512, 128), (2, 128, 512)]
    assert not any(x.batch for x in linears(config, 8, "here", sixteen_bit=True))


def test_linear_attention_between_full() -> None:
    delta = {
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "shared_expert_intermediate_size": 512,
    }
    found = cut({**MOE, **delta}, 2)
    assert found["qkv_proj"] == ((16 * 2 + 4 + 4) * 256 // 2, 2048, 3)
    assert found["linear_attn.in_proj_qkvz"] == (6144, 2048, 9)
    assert found["linear_attn.in_proj_ba"] == (32, 2048, 9)
    assert found["linear_attn.out_proj"] == (2048, 2048, 9)
    lightning = {"architectures": ["MiniMaxM1ForCausalLM"], "attn_type_list": [0, 0, 0, 1] * 3, "num_local_experts": 8}
    found = cut({**MOE, **lightning})
    assert found["linear_attn.qkv_proj"] == (6144, 2048, 9)
    assert found["qkv_proj"] == (3072, 2048, 3)


def test_ungated_and_multi_query() -> None:
    falcon = {**BASE, "architectures": ["FalconForCausalLM"], "multi_query": True, "new_decoder_architecture": False}
    del falcon["num_key_value_heads"], falcon["intermediate_size"]
    found = cut(falcon)
    assert found["qkv_proj"] == (2048 + 2 * 128, 2048, 12)
    assert found["up_proj"] == (8192, 2048, 12)
    assert cut({**BASE, "architectures": ["ArceeForCausalLM"]})["up_proj"] == (6144, 2048, 12)


def test_a_width_that_counts_gate_and_up_together() -> None:
    first = {**BASE, "architectures": ["QWenLMHeadModel"], "intermediate_size": 22016}
    found = cut(first, 2)
    assert found["gate_up_proj"] == (11008, 2048, 12)
    assert found["down_proj"] == (2048, 5504, 12)
    with pytest.raises(UserError, match="intermediate_size: 22015, expected gate and up together"):
        cut({**first, "intermediate_size": 22015})


def test_sizes_of_nested_objects() -> None:
    """DBRX, as published."""
    dbrx = {
        "architectures": ["DbrxForCausalLM"],
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }
    found = cut(dbrx, 8)
    assert found["qkv_proj"] == (1024, 6144, 40)
    assert found["experts.w13 (grouped)"] == (2688, 6144, 40)
    assert found["router(gate)"] == (16, 6144, 40)
    with pytest.raises(UserError, match="num_experts_per_tok 4, expected at most 2"):
        cut({**dbrx, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 2, "moe_top_k": 4}})


def test_state_spaces_between_full_attention() -> None:
    """Jamba at tp 8: vLLM's MambaMixer shards in_proj, dt_proj by columns, x_proj and out_proj by rows."""
    jamba = {
        **BASE,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "architectures": ["JambaForCausalLM"],
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 256,
        "mamba_expand": 2,
    }
    found = cut(jamba, 8)
    assert found["qkv_proj"] == (768, 4096, 4)
    assert found["mamba.in_proj"] == (2048, 4096, 28)
    assert found["mamba.x_proj"] == (288, 1024, 28)
    assert found["mamba.dt_proj"] == (1024, 256, 28)
    assert found["mamba.out_proj"] == (4096, 1024, 28)
    assert (found["mlp.gate_up_proj"][2], found["experts.w13 (grouped)"][2]) == (16, 16)
    assert cut({**jamba, "mamba_dt_rank": "auto"}) == cut(jamba)


@pytest.mark.parametrize(
    ("outer", "inner", "layer"),
    [
        (
            "Gemma3ForConditionalGeneration",
            {"model_type": "gemma3_text"},
            (4096, 2048, 12),
        ),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral"}, (3072, 2048, 12)),
        ("Mistral3ForConditionalGeneration", {}, (3072, 2048, 12)),
        ("LlavaForConditionalGeneration", {"architectures": ["Qwen2ForCausalLM"]}, (3072, 2048, 12)),
        ("Qwen3VLForConditionalGeneration", {"model_type": "qwen3_vl_text", "head_dim": 256}, (6144, 2048, 12)),
        ("Qwen2_5OmniModel", {"model_type": "qwen2_5_omni_text"}, (3072, 2048, 12)),
    ],
)
def test_nested_files(outer: str, inner: Mapping[str, object], layer: object) -> None:
    text = {**BASE, **inner}
    if "gemma3" in str(inner):  # published without the class's defaults
        del text["num_key_value_heads"], text["num_attention_heads"]
    assert cut({"architectures": [outer], "text_config": text})["qkv_proj"] == layer


def test_what_the_inner_file_names_decides() -> None:
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**BASE, "model_type": "rwkv"}}
    with pytest.raises(UserError, match="no rule for architecture 'rwkv'"):
        cut(outer)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: 1 values, expected one per layer"),
        ({"mlp_layer_types": ["thin"] * 12}, "expected a list of dense and sparse"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq: 2 values, expected 12"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers: .*expected a list of whole numbers"),
        ({"first_k_dense_replace": 13}, "first_k_dense_replace: 13, expected 0 to 12 layers"),
        ({"num_hidden_layers": 10**8}, "expected at most 10000"),
    ],
)
def test_contradictions(change: Mapping[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        cut({**MOE, "architectures": ["Qwen3MoeForCausalLM"], **change})


def test_a_misspelt_field_is_reported() -> None:
    typo = {"num_key_value_headz": 4, **{n: v for n, v in BASE.items() if n != "num_key_value_heads"}}
    with pytest.raises(UserError, match="no such field 'num_key_value_headz'; did you mean 'num_key_value_heads'"):
        cut(typo)
    assert cut({**BASE, "num_key_value_headz": 4}), "no error if the real field is present"


@given(st.data())
def test_one_byte_of_a_file_changes_one_field_or_is_refused(data: st.DataObject) -> None:
    config = {**MOE, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "mlp_only_layers": [0]}
    raw = bytearray(json.dumps(config).encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    message, after = "", dict(config)
    try:
        after = parse_object(raw.decode(), "here")
        linears(after, 1, "here", sixteen_bit=True)
    except (UserError, UnicodeDecodeError) as error:
        message = str(error)
    if not message:
        changed = {n for n in {*config, *after} if config.get(n) != after.get(n)}
        assert len(changed & {*config}) <= 1, "another name of one field: it is missing, and the new one is ignored"
        assert len(changed - {*config}) <= 1


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *MOE,
                *MLA,
                *STATES,
                *SAID,
                "architectures",
                "text_config",
                "mlp_only_layers",
                "moe_layer_freq",
                "head_dim",
            ]
        ),
        st.none()
        | st.integers(-2, 5000)
        | st.text(max_size=3)
        | st.sampled_from(["M-E*" * 3, "MM*" * 4])
        | st.lists(st.integers(-1, 3), max_size=3)
        | st.lists(
            st.sampled_from(["mamba", "full_attention", "hybrid", "mlp", "moe", "conv", ""]), min_size=11, max_size=13
        )
        | st.dictionaries(
            st.sampled_from(["0", "11", "head_dim", "full_attn_layers"]), st.integers(-1, 99) | st.none()
        ),
        max_size=3,
    ),
    st.sampled_from(sorted(RULES)),
    st.sampled_from([1, 2, 3, 8]),
)
def test_any_file_is_read_or_refused_in_one_line(change: Mapping[str, object], name: str, tp: int) -> None:
    whole = {**(MOE if RULES[name].sparse else BASE), **(MLA if RULES[name].attention == "latent" else {}), **STATES}
    config = {**whole, "architectures": [f"{name}ForCausalLM"], **change}
    message, found = "", []
    try:
        found = linears(config, tp, "here", sixteen_bit=True)
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert all(x.n >= 1 and x.k >= 1 and x.calls >= 1 for x in found)
