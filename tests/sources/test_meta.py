"""Hugging Face models without weights: their modules compared with our rules for the same architectures."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.sources.meta import MetaModelShapes, _check_counts
from gemmpipe.sources.model.linear import Linear
from gemmpipe.sources.model.modules import AttentionHeads, WeightMatrix, sharded_products
from gemmpipe.sources.model.rules import linears

transformers = pytest.importorskip("transformers")

KINDS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text"),
    *("qwen3_5_moe_text", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "glm", "glm4", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v32", "llama4_text", "cohere", "cohere2"),
    *("olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "falcon", "minimax", "minimax_m2", "smollm3"),
    *("seed_oss", "internlm3", "ernie4_5", "ernie4_5_moe", "exaone4", "arcee", "apertus", "stablelm", "starcoder2"),
    *("gpt_neox", "opt", "minicpm3", "exaone_moe", "solar_open", "hy_v3", "gptj", "mpt", "jamba", "bloom", "gpt2"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text"),
    *("mamba", "falcon_mamba", "mamba2", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "lfm2", "lfm2_moe"),
    *("kimi_linear", "mimo_v2_flash", "gemma4_text", "afmoe", "mistral4", "hy_v4"),
)
LAYERS = 8
MIXED: Mapping[str, Mapping[str, object]] = {
    "granitemoehybrid": {"layer_types": [*["mamba"] * 5, "attention", "mamba", "attention"]},
    "bamba": {"attn_layer_indices": [3, 6]},
    "lfm2": {"layer_types": None, "full_attn_idxs": [2, 5], "conv_bias": True},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "nemotron_h": {"layers_block_type": None, "hybrid_override_pattern": "MEM*EM-E", "moe_latent_size": 1024},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "per_layer_config": {f"0{i}": {"head_dim": 512, "num_key_value_heads": 2} for i in (1, 3, 5, 7)},
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
"""Architectures with only one kind of layer in the class's default fields, or in their first layers."""


def published(kind: str) -> dict[str, object]:
    """The fields of a config.json of this kind with the class's own sizes, and few layers."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    fields = {name: value for name, value in transformers.CONFIG_MAPPING[kind]().to_dict().items() if value is not None}
    for name in ("layer_types", "mlp_layer_types", "indexer_types", "attn_type_list"):
        if isinstance(fields.get(name), list):
            fields[name] = fields[name][:LAYERS]
    dropped = ("architectures", "dtype", "quantization_config", "n_layer", "n_layers")
    fields = {**fields, **MIXED.get(kind, {})}
    fields = {name: value for name, value in fields.items() if value is not None and name not in dropped}
    return {**fields, "model_type": kind, "num_hidden_layers": LAYERS}


def source(config: Mapping[str, object], tp: int = 1, ep: int = 1) -> MetaModelShapes:
    return MetaModelShapes(path=None, config=config, tp=tp, ep=ep, nsets=[1], quantization="config")


def total(found: list[Linear]) -> Counter[tuple[object, ...]]:
    counted: Counter[tuple[object, ...]] = Counter()
    for linear in found:
        counted[linear.n, linear.k, linear.bias, linear.experts, linear.sixteen_bit] += linear.calls
    return counted


@pytest.mark.parametrize("kind", KINDS)
def test_our_rules_are_what_transformers_builds(kind: str) -> None:
    config = published(kind)
    for tp, ep in ((1, 1), (2, 1), (8, 1), (8, 2)):
        ours = found(lambda tp=tp, ep=ep: linears(config, tp, kind, sixteen_bit=True, ep=ep))
        theirs = found(lambda tp=tp, ep=ep: source(config, tp, ep).linears(config, kind, batched=False))
        assert theirs == ours, (tp, ep)
        assert ours or tp > 1


def found(cut: Callable[[], list[Linear]]) -> Counter[tuple[object, ...]] | None:
    """The sharded products, or None if a size does not divide."""
    try:
        return total(cut())
    except UserError:
        return None


@pytest.mark.parametrize("kind", ["phi3", "qwen3"])
def test_kv_heads_that_do_not_divide_are_refused_alike(kind: str) -> None:
    config = {**published(kind), "num_attention_heads": 40, "num_key_value_heads": 10, "hidden_size": 5120}
    for cut in (
        lambda: linears(config, 8, kind, sixteen_bit=True),
        lambda: source(config, 8).linears(config, kind, batched=False),
    ):
        with pytest.raises(UserError, match=r"num_key_value_heads.* 10 does not divide by shapes.tp=8"):
            cut()


def test_as_problems(sixteen: Family, no_words: KernelDefaults) -> None:
    made = source(published("qwen3"), tp=2).problems(sixteen, no_words, "sm_90")
    assert {p.layer for p in made} == {
        *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "lm_head")
    }


def test_no_published_size_is_taken_for_a_count() -> None:
    for kind in ("gemma4_text", "gemma3n_text", "deepseek_v3", "kimi_linear", "nemotron_h"):
        if kind in transformers.CONFIG_MAPPING:
            _check_counts(transformers.CONFIG_MAPPING[kind]().to_dict(), kind)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_type": None}, "no field 'model_type'"),
        ({"model_type": "lama"}, "has no 'lama'; did you mean"),
        ({"hidden_size": "wide"}, "transformers cannot build the model"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000, expected at most 10000"),
        ({"n_layers": 10**9}, "n_layers: 1000000000, expected at most 10000"),
        ({"num_local_experts": 10**9}, "num_local_experts: 1000000000, expected at most 10000"),
        ({"num_experts": 10**4, "num_hidden_layers": 10**4}, "10000 experts in 10000 layers"),
    ],
)
def test_errors_are_one_line(
    change: Mapping[str, object], line: str, sixteen: Family, no_words: KernelDefaults
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        source({**published("llama"), **change}).problems(sixteen, no_words, "sm_90")
    assert "\n" not in str(caught.value)


def test_a_module_without_a_sharding_rule_is_refused() -> None:
    heads = AttentionHeads(query=8, kv=8, width=64)
    odd = [WeightMatrix(name="model.layers.0.mixer.mystery", n=64, k=64, bias=False)]
    assert sharded_products(odd, heads, {}, 1, 1, 0, "here")[0].sharding == "replicated"
    assert sharded_products(odd, heads, {"mystery": "colwise"}, 2, 1, 0, "here")[0].n == 32
    with pytest.raises(UserError, match=r"no rule to shard 'mixer.mystery' over tp 2"):
        sharded_products(odd, heads, {}, 2, 1, 0, "here")


@pytest.mark.parametrize(
    "field",
    [
        *({name: "org/kernel"} for name in ("attn_implementation", "_attn_implementation", "experts_implementation")),
        {"_attn_implementation_internal": "org/kernel"},
        {"attn_implementation": {"": "org/kernel"}},
        {"num_labels": 10**9},
        {"auto_map": {"AutoModelForCausalLM": "org/code--modeling.Model"}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_config_fetches_no_code_and_takes_no_memory(field: Mapping[str, object]) -> None:
    """`org/kernel` would be downloaded from a hub and run; each label is a string."""
    plain = source(published("llama")).linears(published("llama"), "x", batched=False)
    config = {**published("llama"), **field}
    assert source(config).linears(config, "x", batched=False) == plain
