"""The products of attention, grouped-query or latent with its indexer, and the kind of each decoder layer.

Hybrids have recurrent layers in place of attention in some layers; several fields can name the kinds.
"""

from collections.abc import Callable, Iterator, Mapping

from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.sources.model.linear import Linear, ModelShape, layer_count, unfused_linear
from gemmpipe.sources.model.recurrent import recurrent

FULL, RECURRENT, BOTH = "full", "other", "both"
MLP, EXPERTS = "mlp", "moe"
"""Kinds of layers that consist of an MLP or of experts alone (Nemotron-H)."""
_KIND_OF = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention", "attention"), FULL),
    **dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), FULL),
    **dict.fromkeys(("linear_attention", "mamba", "conv"), RECURRENT),
    "hybrid": BOTH,
    "mlp": MLP,
    "moe": EXPERTS,
}
_LETTERS = {"*": FULL, "M": RECURRENT, "-": MLP, "E": EXPERTS}


def layers_with(shape: ModelShape, *kinds: str) -> tuple[int, ...]:
    """The layers of these kinds, in order."""
    return tuple(i for i, kind in enumerate(_kinds(shape)) if kind in kinds)


def mlps_are_layers(shape: ModelShape) -> bool:
    """True if MLPs are layers of their own."""
    return bool(layers_with(shape, MLP, EXPERTS))


def _kinds(shape: ModelShape) -> tuple[str, ...]:
    """The kind of each layer. Raises UserError for fields that contradict each other."""
    if not shape.rule.mixer:
        return (FULL,) * shape.layers
    if shape.rule.parallel_mixers:
        return (BOTH,) * shape.layers
    names = shape.values_per_layer("layer_types", _KIND_OF) or shape.values_per_layer("layers_block_type", _KIND_OF)
    if names:
        return tuple(_KIND_OF[name] for name in names)
    pattern = shape.value("hybrid_override_pattern")
    if pattern is not None:
        return _parse_pattern(shape, pattern)
    full = _full_attention_layers(shape)
    return tuple(FULL if i in full else RECURRENT for i in shape.every_layer)


def _parse_pattern(shape: ModelShape, pattern: object) -> tuple[str, ...]:
    if not isinstance(pattern, str) or set(pattern) - set(_LETTERS) or len(pattern) != shape.layers:
        expected = f"expected {shape.layers} of {' '.join(_LETTERS)}"
        raise UserError(f"{shape.where}: hybrid_override_pattern: {quoted_repr(pattern)}, {expected}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _full_attention_layers(shape: ModelShape) -> frozenset[int]:
    """The layers with full attention: from a number per layer, a list of layers, or a period."""
    by_number = shape.numbers("attn_type_list")  # MiniMax: 1 is full
    if by_number:
        if len(by_number) != shape.layers:
            raise UserError(f"{shape.where}: attn_type_list: {len(by_number)} values, expected {shape.layers}")
        return frozenset(i for i in shape.every_layer if by_number[i] == 1)
    from_one = shape.numbers("linear_attn_config.full_attn_layers")  # Kimi
    listed = shape.numbers("attn_layer_indices") or tuple(i - 1 for i in from_one)
    if listed:
        if not all(0 <= i < shape.layers for i in listed):
            raise UserError(f"{shape.where}: attention in layers {list(listed)}, expected 0 to {shape.layers - 1}")
        return frozenset(listed)
    period = shape.size("attn_layer_period", default=0)
    if period:
        return frozenset(range(layer_count(shape, "attn_layer_offset") % period, shape.layers, period))
    step = shape.size("full_attention_interval", default=0)
    return frozenset(range(step - 1, shape.layers, step)) if step else frozenset()


def attention(shape: ModelShape) -> Iterator[Linear]:
    """The products of every layer's attention, or of the recurrent layers in its place."""
    full, other = layers_with(shape, FULL, BOTH), layers_with(shape, RECURRENT, BOTH)
    if full:
        yield from _ATTENTION_KINDS[shape.rule.attention](shape, full)
    if other:
        yield from recurrent(shape, other)


def grouped(shape: ModelShape, layer_ids: tuple[int, ...]) -> Iterator[Linear]:
    """Grouped-query attention; the heads may differ between kinds of layers."""
    for one, alike in shape.layer_groups(layer_ids):
        yield from _grouped(one, alike)


def _grouped(shape: ModelShape, layer_ids: tuple[int, ...]) -> Iterator[Linear]:
    """Fused qkv, KV heads replicated if there are fewer than devices, and o; values may be narrower than keys."""
    heads, kv_heads, head = _heads(shape)
    own = shape.split(heads, "num_attention_heads")
    kv, value = _kv_heads_per_device(shape, kv_heads), shape.size("v_head_dim", default=head)
    gated = shape.rule.query_gate and shape.value("attn_output_gate") in (None, True)
    parts = (own * head * (2 if gated else 1), kv * head, kv * value)
    bias, out_bias = shape.flag(shape.rule.qkv_bias), shape.flag(shape.rule.o_bias)
    yield Linear(
        layer="qkv_proj",
        n=sum(parts),
        k=shape.hidden,
        layer_ids=layer_ids,
        sharding="column",
        modules=tuple(f"self_attn.{x}_proj" for x in "qkv"),
        parts=parts,
        bias=bias,
    )
    if shape.rule.output_gate:
        yield unfused_linear("self_attn.gate_proj", own * value, shape.hidden, "column", layer_ids)
    yield Linear(
        layer="o_proj",
        n=shape.hidden,
        k=own * value,
        layer_ids=layer_ids,
        sharding="row",
        modules=("self_attn.o_proj",),
        bias=out_bias,
    )


def _heads(shape: ModelShape) -> tuple[int, int, int]:
    """(query heads, KV heads, head width)."""
    heads = shape.size("num_attention_heads")
    if shape.value("new_decoder_architecture") is False or shape.value("multi_query") is not None:
        grouped_kv = shape.value("new_decoder_architecture") or not shape.value("multi_query")  # Falcon, GPT BigCode
        kv_heads = shape.size("num_kv_heads", "num_key_value_heads", default=heads) if grouped_kv else 1
    else:
        kv_heads = shape.size("num_key_value_heads", default=heads)
    if shape.value("head_dim") is None and "head_dim" not in shape.rule.defaults and shape.hidden % heads:
        raise UserError(f"{shape.where}: hidden_size {shape.hidden} does not divide by num_attention_heads {heads}")
    return heads, kv_heads, shape.size("head_dim", default=max(1, shape.hidden // heads))


def _kv_heads_per_device(shape: ModelShape, kv_heads: int) -> int:
    """The number of KV heads per device; they are replicated if there are fewer than devices."""
    if kv_heads >= shape.tp:
        return shape.split(kv_heads, "num_key_value_heads")
    if shape.tp % kv_heads:
        raise UserError(
            f"{shape.where}: tp {shape.tp} is not a multiple of num_key_value_heads {kv_heads}, to replicate them"
        )
    return 1


def latent(shape: ModelShape, layer_ids: tuple[int, ...]) -> Iterator[Linear]:
    """Multi-head latent attention (DeepSeek, Kimi, GLM-5).

    kv_b is a product in prefill; decode absorbs it as two batched products in 16 bits, one matrix per head.
    """
    heads = shape.split(shape.size("num_attention_heads"), "num_attention_heads")
    kv_rank, rope = shape.size("kv_lora_rank"), shape.size("qk_rope_head_dim")
    nope, value = shape.size("qk_nope_head_dim"), shape.size("v_head_dim")
    hidden = shape.hidden
    kv_a = "self_attn.kv_a_proj_with_mqa"
    if shape.value("q_lora_rank") is None:
        q = ("self_attn.q_proj",)
        yield Linear(
            layer="q_proj", n=heads * (nope + rope), k=hidden, layer_ids=layer_ids, sharding="column", modules=q
        )
        yield Linear(
            layer="kv_a_proj", n=kv_rank + rope, k=hidden, layer_ids=layer_ids, sharding="replicated", modules=(kv_a,)
        )
    else:
        q_rank = shape.size("q_lora_rank")
        yield Linear(
            layer="fused_qkv_a_proj",
            n=q_rank + kv_rank + rope,
            k=hidden,
            layer_ids=layer_ids,
            sharding="replicated",
            modules=("self_attn.q_a_proj", kv_a),
            parts=(q_rank, kv_rank + rope),
        )
        q = ("self_attn.q_b_proj",)
        yield Linear(
            layer="q_b_proj", n=heads * (nope + rope), k=q_rank, layer_ids=layer_ids, sharding="column", modules=q
        )
        yield from _indexer(shape, layer_ids, q_rank)
    b = ("self_attn.kv_b_proj",)
    yield Linear(
        layer="kv_b_proj", n=heads * (nope + value), k=kv_rank, layer_ids=layer_ids, sharding="column", modules=b
    )
    for layer, n, k in (("kv_b_proj.k (absorbed)", kv_rank, nope), ("kv_b_proj.v (absorbed)", value, kv_rank)):
        yield Linear(
            layer=layer, n=n, k=k, layer_ids=layer_ids, sharding="replicated", modules=b, batch=heads, sixteen_bit=True
        )
    if shape.rule.output_gate:
        yield unfused_linear("self_attn.gate_proj", heads * value, hidden, "column", layer_ids)
    yield Linear(
        layer="o_proj", n=hidden, k=heads * value, layer_ids=layer_ids, sharding="row", modules=("self_attn.o_proj",)
    )


def _indexer(shape: ModelShape, layer_ids: tuple[int, ...], q_rank: int) -> Iterator[Linear]:
    """The indexer of sparse attention (DeepSeek-V3.2, GLM-5), the same on every device; weights_proj stays 16-bit."""
    if shape.value("index_n_heads") is None:
        return
    heads, head, hidden = shape.size("index_n_heads"), shape.size("index_head_dim"), shape.hidden
    kinds = shape.values_per_layer("indexer_types", ("full", "shared"))
    layer_ids = tuple(i for i in layer_ids if not kinds or kinds[i] == "full")
    for name, n, k in (("wq_b", heads * head, q_rank), ("wk", head, hidden), ("weights_proj", heads, hidden)):
        yield Linear(
            layer=f"indexer.{name}",
            n=n,
            k=k,
            layer_ids=layer_ids,
            sharding="replicated",
            modules=(f"self_attn.indexer.{name}",),
            sixteen_bit=name == "weights_proj",
        )


_ATTENTION_KINDS: Mapping[str, Callable[[ModelShape, tuple[int, ...]], Iterator[Linear]]] = {
    "grouped": grouped,
    "latent": latent,
}
