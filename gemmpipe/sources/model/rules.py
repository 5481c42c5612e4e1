"""The rules of all architectures, found by config.json's `architectures` or `model_type`, and a model's products.

The products follow engines' merging and sharding of layers, from config.json and the degrees of parallelism.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gemmpipe.core.errors import UserError, quoted_repr, shortened, suggest_or_list
from gemmpipe.sources.model.attention import attention
from gemmpipe.sources.model.feedforward import EXPERT_COUNT_FIELDS, feedforward, lm_head, per_layer_embeddings
from gemmpipe.sources.model.linear import ArchitectureRule, ConfigJson, Linear, ModelShape, check_field_names
from gemmpipe.sources.model.recurrent import HYBRIDS

_PLAIN = ArchitectureRule(qkv_bias=False, mlp_bias=False)
_BIASED_QKV = ArchitectureRule(qkv_bias=True, mlp_bias=False)
_BY_FIELD = ArchitectureRule(mlp_bias=False)
_LLAMA = ArchitectureRule(o_bias="attention_bias")
_SPARSE = ArchitectureRule(mlp_bias=False, sparse=True)
_LATENT = ArchitectureRule(attention="latent", mlp_bias=False, sparse=True)
_EVERY_FOURTH = {"full_attention_interval": 4}
_DELTA = ArchitectureRule(
    mixer="delta", query_gate=True, mlp_bias=False, sparse=True, shared_gate=True, defaults=_EVERY_FOURTH
)
_LIGHTNING = ArchitectureRule(mixer="lightning", qkv_bias=False, mlp_bias=False, sparse=True, defaults=_EVERY_FOURTH)
_UNGATED = ArchitectureRule(o_bias="attention_bias", gated=False)
_FALCON = ArchitectureRule(
    qkv_bias="bias",
    o_bias="bias",
    mlp_bias="bias",
    gated=False,
    fields={"intermediate_size": "ffn_hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)
_GPT = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}
_MPT = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "num_key_value_heads": "attn_config.kv_n_heads",
}
_DBRX = {
    **_MPT,
    "moe_intermediate_size": "ffn_config.ffn_hidden_size",
    "num_experts": "ffn_config.moe_num_experts",
    "num_experts_per_tok": "ffn_config.moe_top_k",
    "hidden_act": "ffn_config.ffn_act_fn.name",
}
_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_CHATGLM = {
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "multi_query_group_num",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "padded_vocab_size",
}

RULES: Mapping[str, ArchitectureRule] = {
    "Llama": _LLAMA,
    "Mistral": _PLAIN,
    "Ministral": _PLAIN,
    "Ministral3": _PLAIN,
    "Mixtral": ArchitectureRule(qkv_bias=False, mlp_bias=False, sparse=True),
    "MistralLarge3": _LATENT,
    "Mistral4": _LATENT,
    "Qwen2": _BIASED_QKV,
    "Qwen2Moe": ArchitectureRule(qkv_bias=True, mlp_bias=False, sparse=True, shared_gate=True),
    "Qwen3": _BY_FIELD,
    "Qwen3Moe": _SPARSE,
    "Qwen3Next": _DELTA,
    "Qwen3_5": _DELTA,
    "Qwen3_5Moe": _DELTA,
    "QWenLMHead": ArchitectureRule(
        qkv_bias=True, mlp_bias=False, fused_gate_width=True, fields={"intermediate_size": "ffn_hidden_size"}
    ),
    "Gemma": _BY_FIELD,
    "Gemma2": _BY_FIELD,
    "Gemma3": ArchitectureRule(mlp_bias=False, defaults=_GEMMA3),
    "Phi": ArchitectureRule(qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True, gated=False),
    "Phi3": _PLAIN,
    "Phi3Small": ArchitectureRule(
        qkv_bias=True, o_bias=True, mlp_bias=True, fields={"intermediate_size": "ff_intermediate_size"}
    ),
    "PhiMoE": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, head_bias="lm_head_bias", sparse=True),
    "Glm": _BY_FIELD,
    "Glm4": _BY_FIELD,
    "Glm4v": _BIASED_QKV,
    "Glm4Moe": _SPARSE,
    "Glm4MoeLite": _LATENT,
    "GlmMoeDsa": _LATENT,
    "ChatGLM": ArchitectureRule(qkv_bias="add_qkv_bias", mlp_bias="add_bias_linear", fields=_CHATGLM),
    "GptOss": ArchitectureRule(
        o_bias="attention_bias", mlp_bias=False, sparse=True, expert_bias=True, clamps_activation=True
    ),
    "Deepseek": _SPARSE,
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "DeepseekV32": _LATENT,
    "KimiK2": _LATENT,
    "Dots1": _SPARSE,
    "Llama4": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, sparse=True, weight_first=True),
    "Cohere": ArchitectureRule(o_bias="attention_bias", mlp_bias=False),
    "Cohere2": ArchitectureRule(o_bias="attention_bias", mlp_bias=False),
    "Olmo": ArchitectureRule(o_bias="attention_bias", mlp_bias=False),
    "Olmo2": ArchitectureRule(o_bias="attention_bias", mlp_bias=False),
    "Olmo3": ArchitectureRule(o_bias="attention_bias", mlp_bias=False),
    "Olmoe": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Granite": _LLAMA,
    "GraniteMoe": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "GraniteMoeShared": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Falcon": _FALCON,
    "RW": _FALCON,
    "MiniMax": _LIGHTNING,
    "MiniMaxText01": _LIGHTNING,
    "MiniMaxM1": _LIGHTNING,
    "MiniMaxM2": ArchitectureRule(qkv_bias=False, mlp_bias=False, sparse=True),
    "SmolLM3": _LLAMA,
    "SeedOss": ArchitectureRule(o_bias="attention_out_bias"),
    "InternLM": ArchitectureRule(qkv_bias="bias", o_bias="bias", mlp_bias=False),
    "InternLM2": ArchitectureRule(qkv_bias="bias", o_bias="bias", mlp_bias=False),
    "InternLM3": ArchitectureRule(qkv_bias="qkv_bias", o_bias="bias", mlp_bias="bias"),
    "Xverse": _PLAIN,
    "Orion": _PLAIN,
    "Aquila": _PLAIN,
    "Baichuan": _PLAIN,
    "BaiChuan": _PLAIN,
    "MiMo": _BIASED_QKV,
    "Ernie4_5": ArchitectureRule(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    "Ernie4_5_Moe": ArchitectureRule(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", sparse=True),
    "HunYuanDenseV1": ArchitectureRule(o_bias="attention_bias"),
    "HunYuanMoEV1": ArchitectureRule(o_bias="attention_bias", sparse=True),
    "BailingMoe": ArchitectureRule(qkv_bias="use_qkv_bias", o_bias="use_bias", mlp_bias="use_bias", sparse=True),
    "BailingMoeV2": ArchitectureRule(qkv_bias="use_qkv_bias", o_bias="use_bias", mlp_bias="use_bias", sparse=True),
    "Exaone": ArchitectureRule(qkv_bias=False, mlp_bias=False, fields={"num_hidden_layers": "num_layers"}),
    "Exaone4": _PLAIN,
    "Solar": _LLAMA,
    "Arcee": _UNGATED,
    "Apertus": _UNGATED,
    "Nemotron": _UNGATED,
    "StableLm": ArchitectureRule(qkv_bias="use_qkv_bias", mlp_bias=False),
    "StableLMEpoch": ArchitectureRule(qkv_bias="use_qkv_bias", mlp_bias=False),
    "Starcoder2": ArchitectureRule(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", gated=False),
    "GPTBigCode": ArchitectureRule(qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, fields=_GPT),
    "GPT2LMHead": ArchitectureRule(qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, fields=_GPT),
    "GPTJ": ArchitectureRule(qkv_bias=False, mlp_bias=True, head_bias=True, gated=False, fields=_GPT),
    "MPT": ArchitectureRule(qkv_bias=False, mlp_bias=False, gated=False, fields=_MPT),
    "Dbrx": ArchitectureRule(qkv_bias=False, mlp_bias=False, sparse=True, fields=_DBRX),
    "Jamba": ArchitectureRule(
        mixer="mamba",
        qkv_bias=False,
        mlp_bias=False,
        sparse=True,
        names={"mlp.": "feed_forward."},
        defaults={"attn_layer_period": 8, "attn_layer_offset": 4},
    ),
    "GPTNeoX": ArchitectureRule(o_bias="attention_bias", mlp_bias=True, gated=False),
    "OPT": ArchitectureRule(
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        mlp_bias="enable_bias",
        gated=False,
        fields={"intermediate_size": "ffn_dim"},
    ),
    "Bloom": ArchitectureRule(
        qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, fields={**_GPT, "hidden_size": "n_embed"}
    ),
    "AXK1": _LATENT,
    "Cohere2Moe": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Cwm": _PLAIN,
    "ExaoneMoe": ArchitectureRule(qkv_bias=False, mlp_bias=False, sparse=True),
    "FlexOlmo": ArchitectureRule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Helium": _BY_FIELD,
    "HYV3": ArchitectureRule(qkv_bias=False, mlp_bias=False, sparse=True),
    "HYV4": replace(_LATENT, output_gate=True),
    "IQuestCoder": _LLAMA,
    "Jais2": ArchitectureRule(o_bias="attention_bias", gated=False),
    "Mellum": ArchitectureRule(qkv_bias=False, mlp_bias=False, sparse=True),
    "MiniCPM": _BY_FIELD,
    "MiniCPM3": _LATENT,
    "NanoChat": ArchitectureRule(qkv_bias=False, mlp_bias=False, gated=False),
    "Phi4MM": _PLAIN,
    "SolarOpen": _SPARSE,
    "VaultGemma": _BY_FIELD,
    "Youtu": _LATENT,
    **HYBRIDS,
}
"""The name without ForCausalLM -> its rule. Other architectures are refused: they may fuse differently."""

_MAX_NAME = 60  # characters of a name in a message
_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "Model")
_SYNONYMS = {
    "qwen2vl": "qwen2",
    "qwen25vl": "qwen2",
    "qwen25omni": "qwen2",
    "qwen25omnithinker": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "qwen3omnimoe": "qwen3moe",
    "qwen3omnimoethinker": "qwen3moe",
    "glm4vmoe": "glm4moe",
    "kimivl": "deepseekv3",
    "kimik25": "deepseekv3",
    "gptneoxlmhead": "gptneox",
    "gpt2": "gpt2lmhead",
    "qwen": "qwenlmhead",
    "internvl": "qwen2",
    "mistral3": "mistral",
    "voxtral": "llama",
    "pixtral": "mistral",
    "phi3v": "phi3",
    "gritlm": "mistral",
    "fairseq2llama": "llama",
    "gemma4unified": "gemma4",
}
"""Multi-modal and other variants -> the plain name of their language model."""
NESTED = ("text_config", "llm_config", "language_config")
"""Fields of multi-modal models that hold the language model's configuration."""


def language_model(config: ConfigJson) -> ConfigJson:
    """The language model's own fields: those of a nested configuration if there is one."""
    inner = config.get("thinker_config")  # in Qwen's omni models
    found = inner if isinstance(inner, Mapping) else config
    return next((value for name in NESTED if isinstance(value := found.get(name), Mapping)), found)


def rule_of(config: ConfigJson, where: str) -> tuple[str, ArchitectureRule]:
    """(the architecture's full name, its rule), from `architectures` or `model_type` of the language model.

    Without a name there the outer configuration's counts; sizes without any name are a Llama. Raises UserError with
    the nearest known name.
    """
    name = _name(language_model(config), where) or _name(config, where) or "Llama"
    known = _rule_key(name)
    if known is None:
        name = shortened(name, _MAX_NAME)
        near = suggest_or_list(name, [f"{each}ForCausalLM" for each in RULES])
        raise UserError(f"{where}: no rule for architecture '{name}'{near}; shapes=meta has transformers build it")
    return f"{known}ForCausalLM", RULES[known]


def _name(config: ConfigJson, where: str) -> str | None:
    named, kind = config.get("architectures"), config.get("model_type")
    if named is None:
        return None if kind is None else str(kind)
    listed = [named] if isinstance(named, str) else named
    if not isinstance(listed, list | tuple) or not listed or not isinstance(listed[0], str):
        raise UserError(f"{where}: architectures: {quoted_repr(named)}, expected for example [LlamaForCausalLM]")
    return listed[0]


def _rule_key(name: str) -> str | None:
    """The key of RULES for a name."""
    word = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
    plain = _plain(word).removesuffix("text")
    return _BY_PLAIN.get(_SYNONYMS.get(plain, plain))


def _plain(name: str) -> str:
    return name.replace("_", "").replace(".", "").lower()


_BY_PLAIN = {_plain(name): name for name in RULES}


def linears(
    config: ConfigJson, tp: int, where: str, *, sixteen_bit: bool, ep: int = 1, batched: bool = False
) -> list[Linear]:
    """Every product of the language model; with `sixteen_bit` also those that engines never quantise (lm_head ...).

    `batched` returns the batched ones instead, which decode uses for latent attention. Raises UserError: the field and
    the reason.
    """
    fields = language_model(config)
    architecture, rule = rule_of(config, where)
    for each in (config, fields):
        check_field_names(each, where)
    shape = ModelShape(config=fields, tp=tp, ep=ep, where=where, architecture=architecture, rule=rule)
    latent = rule.attention != "latent" and shape.has("kv_lora_rank")
    if latent or (not rule.sparse and any(shape.has(name) for name in EXPERT_COUNT_FIELDS)):
        raise UserError(f"{where}: {architecture} with experts or latent attention: no rule for it")
    found = [
        _with_module_names(linear, rule)
        for linear in _all_products(shape)
        if linear.layer_ids and bool(linear.batch) == batched
    ]
    return [linear for linear in found if sixteen_bit or batched or not linear.sixteen_bit]


def _all_products(shape: ModelShape) -> Iterator[Linear]:
    yield from attention(shape)
    yield from feedforward(shape)
    if shape.rule.per_layer_embeddings:
        yield from per_layer_embeddings(shape)
    yield lm_head(shape)


def _with_module_names(linear: Linear, rule: ArchitectureRule) -> Linear:
    """A copy with this architecture's module names."""
    modules = tuple(_renamed(module, rule.names) for module in linear.modules)
    return linear if modules == linear.modules else replace(linear, modules=modules)


def _renamed(module: str, names: Mapping[str, str]) -> str:
    return next((new + module.removeprefix(old) for old, new in names.items() if module.startswith(old)), module)
