"""The models of vllm_modes.py: checkpoints of two layers with random weights, a LoRA adapter, the products to tune.

Each model has two checkpoints of other values (`a`, `b`), so that weights can be replaced while vLLM serves.
"""

import csv
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm_models import FP8, QWEN

LAYERS, VOCABULARY, RANK = 2, 8192, 8
SIZES = {
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
    "max_window_layers": LAYERS,
    "num_attention_heads": 16,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DENSE: dict[str, Any] = {
    **QWEN,
    **SIZES,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 3072,
}
ROUTERS = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS))]
MIXTURE: dict[str, Any] = {
    **QWEN,
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
SMALL: dict[str, dict[str, Any]] = {
    "dense_fp8": {**DENSE, "quantization_config": FP8},
    "dense_bf16": DENSE,
    "mixture_fp8": {**MIXTURE, "quantization_config": {**FP8, "modules_to_not_convert": ROUTERS}},
}
CHECKPOINTS = {"a": 1, "b": 2}
"""Name -> seed."""
ROWS = (1, 16, 256)
"""Rows of the products of vllm_modes.py: one sequence, 16 sequences, 16 prompts of 16 tokens."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTED_DENSE = (*ADAPTED, "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def linear_sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name in a layer -> (N, K), as in a checkpoint; those of an expert begin with `mlp.experts.`."""
    hidden, d = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    sizes = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden)}
    found = {f"self_attn.{name}": size for name, size in sizes.items()} | {"self_attn.o_proj": (hidden, heads)}
    experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    for place in [f"mlp.experts.{each}" for each in range(experts)] or ["mlp"]:
        found |= {f"{place}.gate_proj": (inner, hidden), f"{place}.up_proj": (inner, hidden)}
        found |= {f"{place}.down_proj": (hidden, inner)}
    return found


def checkpoint(config: dict[str, Any], seed: int) -> Tensors:
    """All tensors of a model: products of unit gain, scales that differ between blocks, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, d = config["hidden_size"], config["head_dim"]

    def normal(*shape: int, gain: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * gain).bfloat16()

    def near_one(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator) * 0.5 + 0.75).bfloat16()

    found: Tensors = {"model.norm.weight": near_one(hidden)}
    found["model.embed_tokens.weight"] = normal(config["vocab_size"], hidden, gain=1.0)
    found["lm_head.weight"] = normal(config["vocab_size"], hidden, gain=hidden**-0.5)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name, size in [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]:
            found[f"{place}.{name}.weight"] = near_one(size)
        for name in ("q_norm", "k_norm"):
            found[f"{place}.self_attn.{name}.weight"] = near_one(d)
        if "num_experts" in config:
            found[f"{place}.mlp.gate.weight"] = normal(config["num_experts"], hidden, gain=hidden**-0.5)
        for name, (n, k) in linear_sizes(config).items():
            if "quantization_config" in config:
                stored = (torch.randn((n, k), generator=generator) * 64).clamp(-448, 448)
                found[f"{place}.{name}.weight"] = stored.to(torch.float8_e4m3fn)
                scale = torch.rand((-(-n // 128), -(-k // 128)), generator=generator) + 0.5
                found[f"{place}.{name}.weight_scale_inv"] = scale / (64 * k**0.5)
            else:
                found[f"{place}.{name}.weight"] = normal(n, k, gain=k**-0.5)
    return found


def adapter(config: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """(adapter_config.json, tensors) of a LoRA adapter whose results are as large as those of the layers."""
    wanted = ADAPTED if "num_experts" in config else ADAPTED_DENSE
    generator = torch.Generator().manual_seed(3)
    found: Tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (n, k) in linear_sizes(config).items():
            if name.rpartition(".")[2] in wanted and "experts" not in name:
                place = f"base_model.model.model.layers.{layer}.{name}"
                found[f"{place}.lora_A.weight"] = (torch.randn((RANK, k), generator=generator) * k**-0.5).bfloat16()
                found[f"{place}.lora_B.weight"] = (torch.randn((n, RANK), generator=generator) * RANK**-0.5).bfloat16()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0}
    return {**settings, "bias": "none", "target_modules": list(wanted), "base_model_name_or_path": ""}, found


def write_small(folder: Path, names: Iterable[str]) -> None:
    """`MODEL/a`, `MODEL/b` and `MODEL/adapter` for each model that the folder does not have, and the products."""
    for name in names:
        if (folder / name / "complete").is_file():
            continue
        from safetensors.torch import save_file

        shutil.rmtree(folder / name, ignore_errors=True)
        config = SMALL[name]
        for part, seed in CHECKPOINTS.items():
            (folder / name / part).mkdir(parents=True)
            (folder / name / part / "config.json").write_text(json.dumps(config, indent=1))
            save_file(checkpoint(config, seed), folder / name / part / "model.safetensors", {"format": "pt"})
        settings, tensors = adapter(config)
        (folder / name / "adapter").mkdir()
        (folder / name / "adapter" / "adapter_config.json").write_text(json.dumps(settings, indent=1))
        save_file(tensors, folder / name / "adapter" / "adapter_model.safetensors", {"format": "pt"})
        (folder / name / "complete").write_text("")
    for family, sizes in product_sizes().items():
        with (folder / f"{family}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("M", "N", "K"), *((m, n, k) for n, k in sizes for m in ROWS)])


def product_sizes() -> dict[str, list[tuple[int, int]]]:
    """Family -> (N, K) of the linear layers of all models, as vLLM fuses them, of one rank of 1 and of 2."""
    return {"a8w8_blockscale": sorted(set(_fused(False))), "a16w16": sorted(set(_fused(True)))}


def _fused(all_16bit: bool) -> Iterator[tuple[int, int]]:
    hidden, d, inner = DENSE["hidden_size"], DENSE["head_dim"], DENSE["intermediate_size"]
    heads, kv_heads = DENSE["num_attention_heads"] * d, DENSE["num_key_value_heads"] * d
    for ranks in (1, 2):
        yield from [((heads + 2 * kv_heads) // ranks, hidden), (hidden, heads // ranks)]
        yield from [(2 * inner // ranks, hidden), (hidden, inner // ranks)]
        if all_16bit:
            yield VOCABULARY // ranks, hidden
    if all_16bit:
        yield MIXTURE["num_experts"], hidden
