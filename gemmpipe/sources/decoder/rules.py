"""Which rule an architecture follows: named as config.json's `architectures` and `model_type` name it."""

from collections.abc import Mapping
from dataclasses import replace

from gemmpipe.errors import UserError, nearest, quoted, shortened
from gemmpipe.sources.decoder.hybrids import HYBRIDS
from gemmpipe.sources.decoder.linear import Config
from gemmpipe.sources.decoder.rule import Rule

_PLAIN = Rule(qkv_bias=False, mlp_bias=False)
_BIASED_QKV = Rule(qkv_bias=True, mlp_bias=False)
_BY_FIELD = Rule(mlp_bias=False)
_LLAMA = Rule(o_bias="attention_bias")
_SPARSE = Rule(mlp_bias=False, sparse=True)
_LATENT = Rule(attention="latent", mlp_bias=False, sparse=True)
_EVERY_FOURTH = {"full_attention_interval": 4}
_DELTA = Rule(between="delta", query_gate=True, mlp_bias=False, sparse=True, shared_gate=True, defaults=_EVERY_FOURTH)
_LIGHTNING = Rule(between="lightning", qkv_bias=False, mlp_bias=False, sparse=True, defaults=_EVERY_FOURTH)
_UNGATED = Rule(o_bias="attention_bias", gated=False)
_FALCON = Rule(
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

RULES: Mapping[str, Rule] = {
    "Llama": _LLAMA,
    "Mistral": _PLAIN,
    "Ministral": _PLAIN,
    "Ministral3": _PLAIN,
    "Mixtral": Rule(qkv_bias=False, mlp_bias=False, sparse=True),
    "MistralLarge3": _LATENT,
    "Mistral4": _LATENT,
    "Qwen2": _BIASED_QKV,
    "Qwen2Moe": Rule(qkv_bias=True, mlp_bias=False, sparse=True, shared_gate=True),
    "Qwen3": _BY_FIELD,
    "Qwen3Moe": _SPARSE,
    "Qwen3Next": _DELTA,
    "Qwen3_5": _DELTA,
    "Qwen3_5Moe": _DELTA,
    "QWenLMHead": Rule(qkv_bias=True, mlp_bias=False, halved=True, fields={"intermediate_size": "ffn_hidden_size"}),
    "Gemma": _BY_FIELD,
    "Gemma2": _BY_FIELD,
    "Gemma3": Rule(mlp_bias=False, defaults=_GEMMA3),
    "Phi": Rule(qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True, gated=False),
    "Phi3": _PLAIN,
    "Phi3Small": Rule(qkv_bias=True, o_bias=True, mlp_bias=True, fields={"intermediate_size": "ff_intermediate_size"}),
    "PhiMoE": Rule(o_bias="attention_bias", mlp_bias=False, head_bias="lm_head_bias", sparse=True),
    "Glm": _BY_FIELD,
    "Glm4": _BY_FIELD,
    "Glm4v": _BIASED_QKV,
    "Glm4Moe": _SPARSE,
    "Glm4MoeLite": _LATENT,
    "GlmMoeDsa": _LATENT,
    "ChatGLM": Rule(qkv_bias="add_qkv_bias", mlp_bias="add_bias_linear", fields=_CHATGLM),
    "GptOss": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True, expert_bias=True, clamped=True),
    "Deepseek": _SPARSE,
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "DeepseekV32": _LATENT,
    "KimiK2": _LATENT,
    "Dots1": _SPARSE,
    "Llama4": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True, weight_first=True),
    "Cohere": Rule(o_bias="attention_bias", mlp_bias=False),
    "Cohere2": Rule(o_bias="attention_bias", mlp_bias=False),
    "Olmo": Rule(o_bias="attention_bias", mlp_bias=False),
    "Olmo2": Rule(o_bias="attention_bias", mlp_bias=False),
    "Olmo3": Rule(o_bias="attention_bias", mlp_bias=False),
    "Olmoe": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Granite": _LLAMA,
    "GraniteMoe": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "GraniteMoeShared": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Falcon": _FALCON,
    "RW": _FALCON,
    "MiniMax": _LIGHTNING,
    "MiniMaxText01": _LIGHTNING,
    "MiniMaxM1": _LIGHTNING,
    "MiniMaxM2": Rule(qkv_bias=False, mlp_bias=False, sparse=True),
    "SmolLM3": _LLAMA,
    "SeedOss": Rule(o_bias="attention_out_bias"),
    "InternLM": Rule(qkv_bias="bias", o_bias="bias", mlp_bias=False),
    "InternLM2": Rule(qkv_bias="bias", o_bias="bias", mlp_bias=False),
    "InternLM3": Rule(qkv_bias="qkv_bias", o_bias="bias", mlp_bias="bias"),
    "Xverse": _PLAIN,
    "Orion": _PLAIN,
    "Aquila": _PLAIN,
    "Baichuan": _PLAIN,
    "BaiChuan": _PLAIN,
    "MiMo": _BIASED_QKV,
    "Ernie4_5": Rule(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    "Ernie4_5_Moe": Rule(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", sparse=True),
    "HunYuanDenseV1": Rule(o_bias="attention_bias"),
    "HunYuanMoEV1": Rule(o_bias="attention_bias", sparse=True),
    "BailingMoe": Rule(qkv_bias="use_qkv_bias", o_bias="use_bias", mlp_bias="use_bias", sparse=True),
    "BailingMoeV2": Rule(qkv_bias="use_qkv_bias", o_bias="use_bias", mlp_bias="use_bias", sparse=True),
    "Exaone": Rule(qkv_bias=False, mlp_bias=False, fields={"num_hidden_layers": "num_layers"}),
    "Exaone4": _PLAIN,
    "Solar": _LLAMA,
    "Arcee": _UNGATED,
    "Apertus": _UNGATED,
    "Nemotron": _UNGATED,
    "StableLm": Rule(qkv_bias="use_qkv_bias", mlp_bias=False),
    "StableLMEpoch": Rule(qkv_bias="use_qkv_bias", mlp_bias=False),
    "Starcoder2": Rule(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", gated=False),
    "GPTBigCode": Rule(qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, fields=_GPT),
    "GPT2LMHead": Rule(qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, fields=_GPT),
    "GPTJ": Rule(qkv_bias=False, mlp_bias=True, head_bias=True, gated=False, fields=_GPT),
    "MPT": Rule(qkv_bias=False, mlp_bias=False, gated=False, fields=_MPT),
    "Dbrx": Rule(qkv_bias=False, mlp_bias=False, sparse=True, fields=_DBRX),
    "Jamba": Rule(
        between="mamba",
        qkv_bias=False,
        mlp_bias=False,
        sparse=True,
        names={"mlp.": "feed_forward."},
        defaults={"attn_layer_period": 8, "attn_layer_offset": 4},
    ),
    "GPTNeoX": Rule(o_bias="attention_bias", mlp_bias=True, gated=False),
    "OPT": Rule(
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        mlp_bias="enable_bias",
        gated=False,
        fields={"intermediate_size": "ffn_dim"},
    ),
    "Bloom": Rule(qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, fields={**_GPT, "hidden_size": "n_embed"}),
    "AXK1": _LATENT,
    "Cohere2Moe": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Cwm": _PLAIN,
    "ExaoneMoe": Rule(qkv_bias=False, mlp_bias=False, sparse=True),
    "FlexOlmo": Rule(o_bias="attention_bias", mlp_bias=False, sparse=True),
    "Helium": _BY_FIELD,
    "HYV3": Rule(qkv_bias=False, mlp_bias=False, sparse=True),
    "HYV4": replace(_LATENT, output_gate=True),
    "IQuestCoder": _LLAMA,
    "Jais2": Rule(o_bias="attention_bias", gated=False),
    "Mellum": Rule(qkv_bias=False, mlp_bias=False, sparse=True),
    "MiniCPM": _BY_FIELD,
    "MiniCPM3": _LATENT,
    "NanoChat": Rule(qkv_bias=False, mlp_bias=False, gated=False),
    "Phi4MM": _PLAIN,
    "SolarOpen": _SPARSE,
    "VaultGemma": _BY_FIELD,
    "Youtu": _LATENT,
    **HYBRIDS,
}
"""The name without ForCausalLM -> how engines cut it. What is not here is refused: other models fuse differently."""

_LONGEST_NAME = 60  # characters of it in a message
_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "Model")
_SAME = {
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
"""Names of other things whose language model is one of these."""
NESTED = ("text_config", "llm_config", "language_config")
"""Where files of multi-modal models keep the language model's fields."""


def language_model(config: Config) -> Config:
    """The language model's own fields: those of a nested configuration where there is one."""
    inner = config.get("thinker_config")  # of Qwen's omni models
    found = inner if isinstance(inner, Mapping) else config
    return next((value for name in NESTED if isinstance(value := found.get(name), Mapping)), found)


def rule_of(config: Config, where: str) -> tuple[str, Rule]:
    """(the architecture's full name, its rule), as the language model's fields name it: `architectures`, `model_type`.

    Where a nested configuration names nothing the outer one does; a bare list of sizes is a Llama. Raises UserError
    with the nearest known name.
    """
    name = _name(language_model(config), where) or _name(config, where) or "Llama"
    known = _known(name)
    if known is None:
        name = shortened(name, _LONGEST_NAME)
        near = nearest(name, [f"{each}ForCausalLM" for each in RULES])
        raise UserError(f"{where}: no rule for architecture '{name}'{near}; shapes=meta has transformers build it")
    return f"{known}ForCausalLM", RULES[known]


def _name(config: Config, where: str) -> str | None:
    named, kind = config.get("architectures"), config.get("model_type")
    if named is None:
        return None if kind is None else str(kind)
    listed = [named] if isinstance(named, str) else named
    if not isinstance(listed, list | tuple) or not listed or not isinstance(listed[0], str):
        raise UserError(f"{where}: architectures: {quoted(named)}, expected [LlamaForCausalLM] or the like")
    return listed[0]


def _known(name: str) -> str | None:
    """The key of RULES that a name means."""
    word = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
    plain = _plain(word).removesuffix("text")
    return _BY_PLAIN.get(_SAME.get(plain, plain))


def _plain(name: str) -> str:
    return name.replace("_", "").replace(".", "").lower()


_BY_PLAIN = {_plain(name): name for name in RULES}
