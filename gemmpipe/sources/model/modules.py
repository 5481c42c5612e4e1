"""A model's modules as engines run them: siblings merged into one product, then sharded over the devices."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.sources.model.linear import Linear

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.([0-9]+)\.(.+)$")
_IN_ROUTER = re.compile(r"(?<=router)\.(?:layer|gate|proj|classifier)$")
_MERGED: Mapping[tuple[str, ...], str] = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("query", "key", "value"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("w1", "w3"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
    ("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
    ("in_proj_b", "in_proj_a"): "in_proj_ba",
}
"""Siblings with the same input, which engines merge -> the product's name."""
_QKV = ("qkv_proj", "query_key_value", "qkv", "wqkv", "Wqkv", "c_attn", "W_pack")
_UNITS = {"qkv_proj": "num_key_value_heads", "in_proj": "heads and groups of its state space"}
_HEAD = ("lm_head", "embed_out", "output")
_COLUMN = (
    *("q_proj", "k_proj", "v_proj", "gate_up_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_ba", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "output_gate", *_QKV, *_HEAD),
    *("in_proj", "in_proj_xz", "dt_proj", "input_linear", "f_b_proj", "g_b_proj", "b_proj"),
    "per_layer_model_projection",
)
_ROW = (
    *("o_proj", "down_proj", "out_proj", "dense", "fc2", "fc_out", "dense_4h_to_h", "c_proj", "wo", "w2", "x_proj"),
    "output_linear",
)
_REPLICATED = (
    *("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "gate", "router", "shared_expert_gate"),
    *("wq_b", "wk", "weights_proj", "gate_weight", "f_a_proj", "g_a_proj", "fc1_latent_proj", "fc2_latent_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
)
_PARALLEL_STYLES = {"colwise": "column", "rowwise": "row"}
_SIXTEEN_BIT = ("lm_head", "gate", "router", "shared_expert_gate", "weights_proj", "in_proj_ba", "embed_out", "b_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMatrix:
    """A matrix of a model: `name` in full, out [M, n] = x [M, k] @ w^T; `experts`: how many are stacked, 0 for one."""

    name: str
    n: int
    k: int
    bias: bool
    experts: int = 0
    parts: tuple[int, ...] = ()
    """The Ns of parts that are sharded separately; empty for one."""
    units: tuple[int, ...] = ()
    """The number of indivisible heads or groups in each part; 0 if it may be split anywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionHeads:
    """Attention's heads, which determine how keys and values are sharded."""

    query: int
    kv: int
    width: int


def sharded_products(
    modules: Iterable[WeightMatrix],
    heads: AttentionHeads,
    plan: Mapping[str, str],
    tp: int,
    ep: int,
    topk: int,
    where: str,
) -> list[Linear]:
    """Every product of one device, equal ones of several layers as one.

    `plan` is a model's own tensor-parallel plan, by the last part of a name, used where our rules have no entry. Raises
    UserError for a module that cannot be sharded or has no rule.
    """
    if heads.query % tp:
        raise UserError(f"{where}: num_attention_heads {heads.query} does not divide by shapes.tp={tp}")
    unsharded: dict[tuple[object, ...], _UnshardedLinear] = {}
    for each in _fuse_siblings(modules):
        linear = each.linear
        key = (linear.layer, linear.n, linear.k, linear.bias, linear.experts, linear.parts, each.units)
        old = unsharded.get(key)
        layer_ids = old.linear.layer_ids + linear.layer_ids if old else linear.layer_ids
        unsharded[key] = replace(each, linear=replace(linear, layer_ids=layer_ids))
    sharder = _Sharder(heads=heads, plan=plan, tp=tp, ep=ep, where=where)
    return [replace(sharder.shard(each), topk=topk if each.linear.experts else 0) for each in unsharded.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnshardedLinear:
    linear: Linear
    units: tuple[int, ...]
    """The units of each part, as in `WeightMatrix`."""


def _fuse_siblings(modules: Iterable[WeightMatrix]) -> list[_UnshardedLinear]:
    """Siblings of one parent merged as engines merge them, in the order of the model."""
    by_parent: dict[tuple[int, str], dict[str, WeightMatrix]] = {}
    for module in modules:
        layer_id, inner = _layer_and_name(module.name)
        parent, _, leaf = inner.rpartition(".")
        by_parent.setdefault((layer_id, parent), {})[leaf] = module
    found: list[_UnshardedLinear] = []
    for (layer_id, parent), children in by_parent.items():
        left = dict(children)
        if "x_proj" in left and "in_proj" in left:  # a state space with an in_proj of two halves
            left["in_proj_xz"] = left.pop("in_proj")
        if parent == "self_attn" and {"q_proj", "k_proj"} <= set(left) and "v_proj" not in left:
            left["v_proj"] = left["k_proj"]  # Gemma 4's values may be its keys: engines load the matrix twice
        for leaves, merged in _MERGED.items():
            parts = [left[leaf] for leaf in leaves if leaf in left and not left[leaf].experts]
            if len(parts) == len(leaves) and len({part.k for part in parts}) == 1:
                found.append(_linear(layer_id, parent, merged, leaves, parts))
                left = {leaf: module for leaf, module in left.items() if leaf not in leaves}
        found += [_linear(layer_id, parent, leaf, (leaf,), [module]) for leaf, module in left.items()]
    return found


def _layer_and_name(name: str) -> tuple[int, str]:
    """(layer, the name within it); layer 0 and the last part of the name outside of layers."""
    match = _LAYER.search(name)
    return (int(match[1]), _IN_ROUTER.sub("", match[2])) if match else (0, name.rpartition(".")[2])


def _linear(
    layer_id: int, parent: str, leaf: str, leaves: Sequence[str], parts: Sequence[WeightMatrix]
) -> _UnshardedLinear:
    at = f"{parent}." if parent else ""
    within = [(n, unit) for part in parts for n, unit in zip(part.parts or (part.n,), part.units or (0,), strict=True)]
    linear = Linear(
        layer=f"{at}{leaf}",
        n=sum(part.n for part in parts),
        k=parts[0].k,
        layer_ids=(layer_id,),
        sharding="",
        modules=tuple(f"{at}{each}" for each in leaves),
        parts=tuple(n for n, _ in within),
        bias=any(part.bias for part in parts),
        sixteen_bit=leaf in _SIXTEEN_BIT,
        experts=parts[0].experts,
    )
    return _UnshardedLinear(linear=linear, units=tuple(unit for _, unit in within))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharder:
    heads: AttentionHeads
    plan: Mapping[str, str]
    tp: int
    ep: int
    where: str

    def shard(self, unsharded: _UnshardedLinear) -> Linear:
        """The share of one device."""
        linear = unsharded.linear
        leaf = linear.layer.rpartition(".")[2]
        sharding = self._sharding_of(leaf, linear)
        if linear.experts and self.ep > 1:
            return replace(
                linear, sharding="replicated", experts=self._split_evenly(linear.experts, self.ep, linear.layer, "ep")
            )
        if sharding == "row":
            return replace(linear, sharding=sharding, k=self._per_device(linear.k, linear.layer))
        parts = linear.parts
        if sharding == "column":
            parts = tuple(self._part(leaf, part, unit, linear) for part, unit in self._parts(leaf, unsharded))
        return replace(linear, sharding=sharding, n=sum(parts), parts=parts)

    def _sharding_of(self, leaf: str, linear: Linear) -> str:
        for names, sharding in ((_COLUMN, "column"), (_ROW, "row"), (_REPLICATED, "replicated")):
            if leaf in names:
                return sharding
        planned = next((sharding for word, sharding in _PARALLEL_STYLES.items() if word in self.plan.get(leaf, "")), "")
        if planned or self.tp == 1:
            return planned or "replicated"
        raise UserError(
            f"{self.where}: no rule to shard '{linear.layer}' over tp {self.tp}{suggest_or_list(leaf, _COLUMN)}"
        )

    def _parts(self, leaf: str, unsharded: _UnshardedLinear) -> list[tuple[int, int]]:
        """(N, units) of the parts that are sharded separately, also within a matrix that is stored as one."""
        linear, heads = unsharded.linear, self.heads
        if len(linear.parts) == 1 and leaf in _QKV:
            query, kv = heads.query * heads.width, heads.kv * heads.width
            if linear.n == query + 2 * kv:
                return [(query, 0), (kv, heads.kv), (kv, heads.kv)]
        if len(linear.parts) == 1 and leaf in ("gate_up_proj", "input_linear"):
            return [(linear.n // 2, 0)] * 2
        return list(zip(linear.parts, unsharded.units, strict=True))

    def _part(self, leaf: str, part: int, units: int, linear: Linear) -> int:
        if leaf in _HEAD:
            return self._per_device(-(-part // 64) * 64, linear.layer)
        if not units:
            return self._per_device(part, linear.layer)
        if units >= self.tp or leaf not in _QKV:
            # A state space's group is replicated only if it is the only one.
            units_per_device = (
                1 if units == 1 else self._split_evenly(units, self.tp, _UNITS.get(leaf, linear.layer), "tp")
            )
            return units_per_device * (part // units)
        if self.tp % units:
            why = f"tp {self.tp} is not a multiple of the {units} KV heads, to replicate them"
            raise UserError(f"{self.where}: {why}")
        return part // units

    def _per_device(self, size: int, layer: str) -> int:
        return self._split_evenly(size, self.tp, layer, "tp")

    def _split_evenly(self, size: int, by: int, layer: str, what: str) -> int:
        if size % by:
            raise UserError(f"{self.where}: {layer}: {size} does not divide by shapes.{what}={by}")
        return size // by
