"""The models of vllm_plugin.py: configurations of public sizes with random weights, and what their layers multiply."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFILL, PROMPT, BLOCK = 2048, 16, 16
"""Tokens of the long prompt, of each prompt of a batch, and of a block of vLLM's cache."""


@dataclass(frozen=True)
class Decode:
    """How a batch is measured: the time for `long` tokens minus that for `short`, `pairs` times."""

    short: int
    long: int
    pairs: int


DECODES = {1: Decode(16, 144, 2), 16: Decode(16, 144, 2), 64: Decode(16, 144, 2), 256: Decode(8, 48, 3)}
"""Batch -> steps: few for 256, so that the caches of six processes fit into one device."""
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DENSE = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "max_window_layers": 36,
    "num_key_value_heads": 8,
}
MIXTURE = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "max_window_layers": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
ROUTERS = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))]
"""Left in 16 bits, as in the published checkpoint."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_8b_fp8": {**DENSE, "quantization_config": FP8},
    "qwen3_8b_bf16": DENSE,
    "qwen3_30b_fp8": {**MIXTURE, "quantization_config": {**FP8, "modules_to_not_convert": ROUTERS}},
}


def write_models(folder: Path, names: Sequence[str], layers: int | None) -> None:
    """One config.json per model; `layers` replaces their number."""
    for name in names:
        made = {**MODELS[name], **({} if layers is None else {"num_hidden_layers": layers})}
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(made, indent=1))


def cache_bytes(config: dict[str, Any]) -> int:
    """Bytes of vLLM's cache for the largest batch: in 16 bits, one block more per sequence than its tokens fill."""
    blocks = max(batch * (-(-(PROMPT + each.long) // BLOCK) + 1) for batch, each in DECODES.items())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    return (blocks + 64) * BLOCK * per_token


@dataclass(frozen=True)
class Product:
    """A product of a model's step: [M, K] x [K, N], `count` times; dtype: fp8, bf16, or experts (of one layer)."""

    layer: str
    n: int
    k: int
    count: int
    dtype: str


def products(config: dict[str, Any]) -> list[Product]:
    """The products of one step, with the matrices as vLLM fuses them."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    quantised = "quantization_config" in config
    dtype = "fp8" if quantised else "bf16"
    heads = config["num_attention_heads"] * config["head_dim"]
    qkv = heads + 2 * config["num_key_value_heads"] * config["head_dim"]
    found = [Product("qkv_proj", qkv, hidden, layers, dtype), Product("o_proj", hidden, heads, layers, dtype)]
    if "num_experts" in config:
        inner = config["moe_intermediate_size"]
        found.append(Product("gate", config["num_experts"], hidden, layers, "bf16"))
        found.append(Product("experts", 2 * inner, hidden, layers, "experts"))
    else:
        inner = config["intermediate_size"]
        found.append(Product("gate_up_proj", 2 * inner, hidden, layers, dtype))
        found.append(Product("down_proj", hidden, inner, layers, dtype))
    return [*found, Product("lm_head", config["vocab_size"], hidden, 1, "bf16")]
