"""Problems of a Hugging Face model, enumerated from its modules on torch's `meta` device, without weights."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.sources.model.linear import MAX_LAYERS, ConfigJson, Linear
from gemmpipe.sources.model.modules import AttentionHeads, WeightMatrix, sharded_products
from gemmpipe.sources.model.rules import language_model
from gemmpipe.sources.model.source import ModelShapes

_ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types -> transformers' names of them."""
_CODE = re.compile(r"quantization_config|auto_map|_?(attn|experts)_implementation\w*|num_labels|id2label|label2id")
"""Fields that name code, or that do not affect products."""
_COUNTS = re.compile(r"layer|expert|head|group|codebook|predict")
_SIZES = re.compile(r"_(size|dim|rank)(_|$)")
_MAX_EXPERTS = 200_000
_ROUTERS = re.compile(r"(?:^|\.)(?:gate|router)(?:\.layer|\.classifier)?$")


@dataclass(frozen=True, kw_only=True)
class MetaModelShapes(ModelShapes):
    """As `ModelShapes`, with the products of the modules that transformers builds instead of those of our rules.

    Siblings with the same input are merged as engines merge them. Needs the extra `hf`; never runs a model's own code.
    """

    def linears(self, config: ConfigJson, where: str, *, batched: bool) -> list[Linear]:
        """Every product of one device. Raises UserError for what transformers refuses and what cannot be sharded."""
        if batched:
            raise UserError("shapes=meta: batched products are not modules; expected shapes=model")
        model, built = _build_model(language_model(config), where)
        heads = _heads(built, where)
        plan = {name.rpartition(".")[2]: str(way) for name, way in (getattr(model, "tp_plan", None) or {}).items()}
        topk = int(getattr(built, "num_experts_per_tok", None) or getattr(built, "moe_k", None) or 0)
        return sharded_products(weight_matrices(model, built), heads, plan, self.tp, self.ep, topk, where)


def _build_model(config: ConfigJson, where: str) -> tuple[Any, Any]:
    """(the model without weights, its configuration)."""
    try:
        import transformers
    except ImportError:
        raise UserError("shapes=meta needs transformers: pip install 'gemmpipe[hf]'") from None
    import torch

    _check_counts(config, where)
    fields = {name: value for name, value in config.items() if not _CODE.fullmatch(name)}
    kind = str(fields.pop("model_type", "") or "")
    if not kind:
        raise UserError(f"{where}: no field 'model_type', which transformers needs; shapes=model works without it")
    known = list(transformers.CONFIG_MAPPING)
    kind = _ALIASES.get(kind, kind)
    if kind not in known:
        version = transformers.__version__
        raise UserError(f"{where}: model_type: transformers {version} has no '{kind}'{suggest_or_list(kind, known)}")
    try:
        built = transformers.AutoConfig.for_model(kind, **fields)
        headed = type(built) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        maker: Any = transformers.AutoModelForCausalLM if headed else transformers.AutoModel
        with torch.device("meta"):
            # Set here, since a file's `org/name` would be a kernel that is downloaded and run.
            model = maker.from_config(built, trust_remote_code=False, attn_implementation="eager")
            if not headed:  # the language model of a multi-modal one, without its head
                model.lm_head = torch.nn.Linear(built.hidden_size, built.vocab_size, bias=False)
        built.allow_global_per_layer_attribute_access = (
            True  # heads may differ by layer; the modules have the real sizes
        )
    except Exception as error:  # noqa: BLE001  any exception of transformers' constructors for these fields
        raise UserError(f"{where}: transformers cannot build the model: {' '.join(str(error).split())[:200]}") from None
    return model, built


def _check_counts(config: ConfigJson, where: str) -> None:
    """Refuse implausible counts of modules: each module is built, although without weights."""
    counts = {n: v for n, v in config.items() if isinstance(v, int) and _COUNTS.search(n) and not _SIZES.search(n)}
    for name, count in counts.items():
        if count > MAX_LAYERS:
            raise UserError(f"{where}: {name}: {count}, expected at most {MAX_LAYERS}")
    layers = max((count for name, count in counts.items() if "layer" in name), default=0)
    experts = max((count for name, count in counts.items() if "expert" in name), default=0)
    if layers * experts > _MAX_EXPERTS:
        raise UserError(f"{where}: {experts} experts in {layers} layers, expected at most {_MAX_EXPERTS:,} of them")


def _heads(built: Any, where: str) -> AttentionHeads:
    query = getattr(built, "num_attention_heads", None)
    hidden = getattr(built, "hidden_size", None)
    if not isinstance(hidden, int):
        raise UserError(f"{where}: {type(built).__name__} has no hidden_size")
    if not isinstance(query, int):  # state spaces alone
        return AttentionHeads(query=0, kv=0, width=0)
    kv = getattr(built, "num_key_value_heads", None)
    return AttentionHeads(query=query, kv=kv or query, width=getattr(built, "head_dim", None) or hidden // query)


def weight_matrices(model: Any, built: Any) -> Iterator[WeightMatrix]:
    """Every matrix that multiplies activations: linear layers, routers, experts, but not embeddings."""
    from torch import nn

    modules = dict(model.named_modules())
    for name, module in modules.items():
        weights: Mapping[str, Any] = dict(module.named_parameters(recurse=False))
        weight = weights.get("weight")
        if isinstance(module, nn.Linear):
            holder, _, leaf = name.rpartition(".")
            n, k, bias = module.out_features, module.in_features, module.bias is not None
            parts, units = _parts_and_units(leaf, modules[holder], n)
            yield WeightMatrix(name=name, n=n, k=k, bias=bias, parts=parts, units=units)
        elif type(module).__name__ == "Conv1D" and weight is not None:  # GPT-2's linear layer, stored as [K, N]
            yield WeightMatrix(name=name, n=weight.shape[1], k=weight.shape[0], bias=True)
        elif _ROUTERS.search(name) and weight is not None and weight.dim() == 2:
            yield WeightMatrix(name=name, n=weight.shape[0], k=weight.shape[1], bias="bias" in weights)
        else:
            yield from _experts(name, weights, int(built.hidden_size))


def _parts_and_units(leaf: str, holder: Any, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(parts, units) of a matrix as in `WeightMatrix`, from its module: KV heads, a state space's groups."""
    if leaf == "in_proj" and hasattr(holder, "n_groups"):
        heads, groups = holder.num_heads, holder.n_groups
        states = groups * holder.ssm_state_size
        inner = (n - heads - 2 * states) // 2
        return (inner, inner, states, states, heads), (heads, heads, groups, groups, heads)
    width = getattr(holder, "head_dim", None)
    if leaf == "v_proj":
        width = getattr(holder, "v_head_dim", None) or width
    if leaf not in ("k_proj", "v_proj") or not isinstance(width, int) or n % width:
        return (), ()
    return (n,), (n // width,)


def _experts(name: str, weights: Mapping[str, Any], hidden: int) -> Iterator[WeightMatrix]:
    """Stacked matrices [E, N, K], or transposed: the side of the residual stream has the hidden size."""
    for leaf, k_is_hidden in (("gate_up_proj", True), ("up_proj", True), ("down_proj", False)):
        weight = weights.get(leaf)
        if weight is None or weight.dim() != 3:
            continue
        count, rows, columns = weight.shape
        ends, others = (columns, rows) if k_is_hidden else (rows, columns)
        straight = ends == hidden or others != hidden  # experts behind a narrower projection have neither width
        n, k = (rows, columns) if straight else (columns, rows)
        yield WeightMatrix(name=f"{name}.{leaf}", n=n, k=k, bias=f"{leaf}_bias" in weights, experts=count)
