"""A model's modules as engines run them: siblings merged into one product, then cut over the devices."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmpipe.errors import UserError, nearest
from gemmpipe.sources.decoder.linear import Linear

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)$")
_MERGED: Mapping[tuple[str, ...], str] = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("query", "key", "value"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("w1", "w3"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
    ("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
    ("in_proj_b", "in_proj_a"): "in_proj_ba",
}
"""Siblings that engines merge, since they multiply the same input -> the product's name."""
_QKV = ("qkv_proj", "query_key_value", "qkv", "wqkv", "Wqkv", "c_attn", "W_pack")
_HEAD = ("lm_head", "embed_out", "output")
_COLUMN = (
    *("q_proj", "k_proj", "v_proj", "gate_up_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_ba", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "output_gate", *_QKV, *_HEAD),
    *("in_proj_xz", "dt_proj"),
)
_ROW = ("o_proj", "down_proj", "out_proj", "dense", "fc2", "fc_out", "dense_4h_to_h", "c_proj", "wo", "w2", "x_proj")
_WHOLE = (
    *("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "gate", "router", "shared_expert_gate"),
    *("wq_b", "wk", "weights_proj", "gate_weight", "router.layer"),
)
_PLAN = {"colwise": "column", "rowwise": "row"}
_SIXTEEN = ("lm_head", "gate", "router", "shared_expert_gate", "weights_proj", "in_proj_ba", "embed_out", "layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A matrix of a model: `name` in full, out [M, n] = x [M, k] @ w^T; `experts` of them side by side, 0 for one."""

    name: str
    n: int
    k: int
    bias: bool
    experts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Attention's heads, which alone tell how keys and values are cut."""

    query: int
    kv: int
    width: int


def products(
    modules: Iterable[Module], heads: Heads, plan: Mapping[str, str], tp: int, ep: int, topk: int, where: str
) -> list[Linear]:
    """Every product of one device, equal ones of several layers as one.

    `plan` is a model's own tensor-parallel plan, by the last part of a name; it speaks where our rules do not. Raises
    UserError: a module that cannot be cut, or that nothing says how to cut.
    """
    if heads.query % tp:
        raise UserError(f"{where}: num_attention_heads {heads.query} does not divide by tp {tp}")
    whole: dict[tuple[object, ...], Linear] = {}
    for linear in _merged(modules):
        key = (linear.layer, linear.n, linear.k, linear.bias, linear.experts, linear.parts)
        old = whole.get(key)
        whole[key] = replace(linear, places=old.places + linear.places) if old else linear
    cutting = _Cutting(heads=heads, plan=plan, tp=tp, ep=ep, where=where)
    return [replace(cutting.cut(each), topk=topk if each.experts else 0) for each in whole.values()]


def _merged(modules: Iterable[Module]) -> list[Linear]:
    """Siblings of one parent as the product that engines make of them, in the order of the model."""
    by_parent: dict[tuple[int, str], dict[str, Module]] = {}
    for module in modules:
        place, inner = _place(module.name)
        parent, _, leaf = inner.rpartition(".")
        by_parent.setdefault((place, parent), {})[leaf] = module
    found: list[Linear] = []
    for (place, parent), children in by_parent.items():
        left = dict(children)
        if "x_proj" in left and "in_proj" in left:  # a state space whose two halves are all that in_proj makes
            left["in_proj_xz"] = left.pop("in_proj")
        for leaves, merged in _MERGED.items():
            parts = [left[leaf] for leaf in leaves if leaf in left and not left[leaf].experts]
            if len(parts) == len(leaves) and len({part.k for part in parts}) == 1:
                found.append(_linear(place, parent, merged, leaves, parts))
                left = {leaf: module for leaf, module in left.items() if leaf not in leaves}
        found += [_linear(place, parent, leaf, (leaf,), [module]) for leaf, module in left.items()]
    return found


def _place(name: str) -> tuple[int, str]:
    """(layer, the name within it); layer 0 and the last part for what a model has once."""
    match = _LAYER.search(name)
    return (int(match[1]), match[2]) if match else (0, name.rpartition(".")[2])


def _linear(place: int, parent: str, leaf: str, leaves: Sequence[str], parts: Sequence[Module]) -> Linear:
    at = f"{parent}." if parent else ""
    return Linear(
        layer=f"{at}{leaf}",
        n=sum(part.n for part in parts),
        k=parts[0].k,
        places=(place,),
        cut="",
        modules=tuple(f"{at}{each}" for each in leaves),
        parts=tuple(part.n for part in parts),
        bias=any(part.bias for part in parts),
        sixteen_bit=leaf in _SIXTEEN,
        experts=parts[0].experts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cutting:
    heads: Heads
    plan: Mapping[str, str]
    tp: int
    ep: int
    where: str

    def cut(self, linear: Linear) -> Linear:
        """The share of one device."""
        leaf = linear.layer.rpartition(".")[2]
        way = self._way(leaf, linear)
        if linear.experts and self.ep > 1:
            return replace(linear, cut="whole", experts=self._divided(linear.experts, self.ep, linear.layer, "ep"))
        if way == "row":
            return replace(linear, cut=way, k=self._share(linear.k, linear.layer))
        parts = linear.parts
        if way == "column":
            parts = tuple(self._part(leaf, place, part, linear) for place, part in enumerate(self._parts(leaf, linear)))
        return replace(linear, cut=way, n=sum(parts), parts=parts)

    def _way(self, leaf: str, linear: Linear) -> str:
        for names, way in ((_COLUMN, "column"), (_ROW, "row"), (_WHOLE, "whole")):
            if leaf in names:
                return way
        planned = next((way for word, way in _PLAN.items() if word in self.plan.get(leaf, "")), "")
        if planned or self.tp == 1:
            return planned or "whole"
        raise UserError(f"{self.where}: no rule how '{linear.layer}' is cut over tp {self.tp}{nearest(leaf, _COLUMN)}")

    def _parts(self, leaf: str, linear: Linear) -> tuple[int, ...]:
        """The Ns of what is cut by itself, also within a matrix that is stored as one."""
        heads = self.heads
        query, kv = heads.query * heads.width, heads.kv * heads.width
        if len(linear.parts) == 1 and leaf in _QKV:
            return (query, kv, kv) if linear.n == query + 2 * kv else linear.parts
        if len(linear.parts) == 1 and leaf == "gate_up_proj":
            return (linear.n // 2,) * 2
        return linear.parts

    def _part(self, leaf: str, place: int, part: int, linear: Linear) -> int:
        if leaf in _HEAD:
            return self._share(-(-part // 64) * 64, linear.layer)
        keys = leaf in ("k_proj", "v_proj") or (leaf in _QKV and place > 0)
        if not keys or part != self.heads.kv * self.heads.width:
            return self._share(part, linear.layer)
        if self.heads.kv >= self.tp:
            return self._divided(self.heads.kv, self.tp, "num_key_value_heads", "tp") * self.heads.width
        if self.tp % self.heads.kv:
            why = f"tp {self.tp} is no multiple of {self.heads.kv} KV heads, so they cannot be repeated"
            raise UserError(f"{self.where}: {why}")
        return self.heads.width

    def _share(self, size: int, layer: str) -> int:
        return self._divided(size, self.tp, layer, "tp")

    def _divided(self, size: int, by: int, layer: str, what: str) -> int:
        if size % by:
            raise UserError(f"{self.where}: {layer}: {size} does not divide by {what} {by}")
        return size // by
