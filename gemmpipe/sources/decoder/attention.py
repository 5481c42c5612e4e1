"""The products of attention: grouped-query, latent with its indexer, the linear ones, and state spaces."""

from collections.abc import Callable, Iterator, Mapping

from gemmpipe.errors import UserError
from gemmpipe.sources.decoder.linear import Linear, Shape, from_zero

_FULL = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_LINEAR = ("linear_attention",)


def attention(shape: Shape) -> Iterator[Linear]:
    """The products of every layer's attention, of whichever kind the architecture has."""
    yield from _KINDS[shape.rule.attention](shape)


def grouped(shape: Shape) -> Iterator[Linear]:
    """Grouped-query attention in every layer."""
    yield from _grouped(shape, shape.every_layer)


def _grouped(shape: Shape, places: tuple[int, ...], *, query_gate: bool = False) -> Iterator[Linear]:
    """Fused qkv with KV heads replicated where there are fewer than devices, and o.

    With `query_gate` every query head has a gate of its own width beside it.
    """
    heads, kv_heads, head = _heads(shape)
    own = shape.split(heads, "num_attention_heads")
    kv = _kv_heads_of_one(shape, kv_heads)
    parts = (own * head * (2 if query_gate else 1), kv * head, kv * head)
    yield Linear(
        layer="qkv_proj",
        n=sum(parts),
        k=shape.hidden,
        places=places,
        cut="column",
        modules=tuple(f"self_attn.{x}_proj" for x in "qkv"),
        parts=parts,
        bias=shape.flag(shape.rule.qkv_bias),
    )
    yield Linear(
        layer="o_proj",
        n=shape.hidden,
        k=own * head,
        places=places,
        cut="row",
        modules=("self_attn.o_proj",),
        bias=shape.flag(shape.rule.o_bias),
    )


def _heads(shape: Shape) -> tuple[int, int, int]:
    """(query heads, KV heads, the width of one)."""
    heads = shape.size("num_attention_heads")
    if shape.value("new_decoder_architecture") is False or shape.value("multi_query") is not None:
        many = shape.value("new_decoder_architecture") or not shape.value("multi_query")  # Falcon, GPT BigCode
        kv_heads = shape.size("num_kv_heads", "num_key_value_heads", default=heads) if many else 1
    else:
        kv_heads = shape.size("num_key_value_heads", default=heads)
    if shape.value("head_dim") is None and "head_dim" not in shape.rule.defaults and shape.hidden % heads:
        raise UserError(f"{shape.where}: hidden_size {shape.hidden} does not divide by num_attention_heads {heads}")
    return heads, kv_heads, shape.size("head_dim", default=max(1, shape.hidden // heads))


def _kv_heads_of_one(shape: Shape, kv_heads: int) -> int:
    """How many KV heads one device holds; they are repeated where there are fewer than devices."""
    if kv_heads >= shape.tp:
        return shape.split(kv_heads, "num_key_value_heads")
    if shape.tp % kv_heads:
        raise UserError(
            f"{shape.where}: tp {shape.tp} is no multiple of num_key_value_heads {kv_heads}, so they cannot be repeated"
        )
    return 1


def latent(shape: Shape) -> Iterator[Linear]:
    """Multi-head latent attention (DeepSeek, Kimi, GLM-5).

    kv_b is a product in prefill; decode absorbs it as two batched products in 16 bits, one matrix a head.
    """
    heads = shape.split(shape.size("num_attention_heads"), "num_attention_heads")
    kv_rank, rope = shape.size("kv_lora_rank"), shape.size("qk_rope_head_dim")
    nope, value = shape.size("qk_nope_head_dim"), shape.size("v_head_dim")
    hidden, every = shape.hidden, shape.every_layer
    kv_a = "self_attn.kv_a_proj_with_mqa"
    if shape.value("q_lora_rank") is None:
        q = ("self_attn.q_proj",)
        yield Linear(layer="q_proj", n=heads * (nope + rope), k=hidden, places=every, cut="column", modules=q)
        yield Linear(layer="kv_a_proj", n=kv_rank + rope, k=hidden, places=every, cut="whole", modules=(kv_a,))
    else:
        q_rank = shape.size("q_lora_rank")
        yield Linear(
            layer="fused_qkv_a_proj",
            n=q_rank + kv_rank + rope,
            k=hidden,
            places=every,
            cut="whole",
            modules=("self_attn.q_a_proj", kv_a),
            parts=(q_rank, kv_rank + rope),
        )
        q = ("self_attn.q_b_proj",)
        yield Linear(layer="q_b_proj", n=heads * (nope + rope), k=q_rank, places=every, cut="column", modules=q)
        yield from _indexer(shape, q_rank)
    b = ("self_attn.kv_b_proj",)
    yield Linear(layer="kv_b_proj", n=heads * (nope + value), k=kv_rank, places=every, cut="column", modules=b)
    for layer, n, k in (("kv_b_proj.k (absorbed)", kv_rank, nope), ("kv_b_proj.v (absorbed)", value, kv_rank)):
        yield Linear(layer=layer, n=n, k=k, places=every, cut="whole", modules=b, batch=heads, sixteen_bit=True)
    yield Linear(layer="o_proj", n=hidden, k=heads * value, places=every, cut="row", modules=("self_attn.o_proj",))


def _indexer(shape: Shape, q_rank: int) -> Iterator[Linear]:
    """The indexer of sparse attention (DeepSeek-V3.2, GLM-5), the same on every device; weights_proj stays 16-bit."""
    if shape.value("index_n_heads") is None:
        return
    heads, head, hidden = shape.size("index_n_heads"), shape.size("index_head_dim"), shape.hidden
    kinds = shape.words("indexer_types", ("full", "shared"))
    places = tuple(i for i in shape.every_layer if not kinds or kinds[i] == "full")
    for name, n, k in (("wq_b", heads * head, q_rank), ("wk", head, hidden), ("weights_proj", heads, hidden)):
        yield Linear(
            layer=f"indexer.{name}",
            n=n,
            k=k,
            places=places,
            cut="whole",
            modules=(f"self_attn.indexer.{name}",),
            sixteen_bit=name == "weights_proj",
        )


def delta(shape: Shape) -> Iterator[Linear]:
    """Gated delta networks with a full-attention layer in between (Qwen3-Next, Qwen3.5)."""
    full, linear = _split_layers(shape)
    gate = shape.value("attn_output_gate")
    yield from _grouped(shape, full, query_gate=gate is None or bool(gate))
    key_heads = shape.split(shape.size("linear_num_key_heads"), "linear_num_key_heads")
    value_heads = shape.split(shape.size("linear_num_value_heads"), "linear_num_value_heads")
    keys = key_heads * shape.size("linear_key_head_dim")
    values = value_heads * shape.size("linear_value_head_dim")
    hidden = shape.hidden
    at = "linear_attn.in_proj_"
    yield Linear(
        layer=f"{at}qkvz",
        n=2 * keys + 2 * values,
        k=hidden,
        places=linear,
        cut="column",
        modules=(f"{at}qkvz", f"{at}qkv", f"{at}z"),
        parts=(keys, keys, values, values),
    )
    yield Linear(
        layer=f"{at}ba",
        n=2 * value_heads,
        k=hidden,
        places=linear,
        cut="column",
        modules=(f"{at}ba", f"{at}b", f"{at}a"),
        parts=(value_heads, value_heads),
        sixteen_bit=True,  # one number a head: no block of scales fits
    )
    out = "linear_attn.out_proj"
    yield Linear(layer=out, n=hidden, k=values, places=linear, cut="row", modules=(out,))


def lightning(shape: Shape) -> Iterator[Linear]:
    """Lightning attention with a full-attention layer in between (MiniMax-Text-01, M1)."""
    full, linear = _split_layers(shape)
    yield from _grouped(shape, full)
    heads, _, head = _heads(shape)
    inner = shape.split(heads, "num_attention_heads") * head
    hidden = shape.hidden
    qkv, gate, out = (f"linear_attn.{name}" for name in ("qkv_proj", "output_gate", "out_proj"))
    parts = (inner,) * 3
    at = "self_attn."
    yield Linear(layer=qkv, n=3 * inner, k=hidden, places=linear, cut="column", modules=(f"{at}qkv_proj",), parts=parts)
    yield Linear(layer=gate, n=inner, k=hidden, places=linear, cut="column", modules=(f"{at}output_gate",))
    yield Linear(layer=out, n=hidden, k=inner, places=linear, cut="row", modules=(f"{at}out_proj",))


def mamba(shape: Shape) -> Iterator[Linear]:
    """State spaces with a full-attention layer in between (Jamba)."""
    period, hidden = shape.size("attn_layer_period"), shape.hidden
    offset = from_zero(shape, "attn_layer_offset") % period
    yield from _grouped(shape, tuple(i for i in shape.every_layer if i % period == offset))
    places = tuple(i for i in shape.every_layer if i % period != offset)
    inner = shape.split(shape.size("mamba_expand") * hidden, "mamba_expand times hidden_size")
    automatic = shape.value("mamba_dt_rank") == "auto"
    rank = -(-hidden // 16) if automatic else shape.size("mamba_dt_rank")
    bias = shape.flag("mamba_proj_bias")
    yield _mamba(places, "in_proj", 2 * inner, hidden, "column", bias, parts=(inner, inner))
    yield _mamba(places, "x_proj", rank + 2 * shape.size("mamba_d_state"), inner, "row", False)
    yield _mamba(places, "dt_proj", inner, rank, "column", True)
    yield _mamba(places, "out_proj", hidden, inner, "row", bias)


def _mamba(
    places: tuple[int, ...], name: str, n: int, k: int, cut: str, bias: bool, parts: tuple[int, ...] = ()
) -> Linear:
    at = f"mamba.{name}"
    return Linear(layer=at, n=n, k=k, places=places, cut=cut, modules=(at,), parts=parts, bias=bias)


def _split_layers(shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers with full attention, layers with linear attention)."""
    kinds = shape.words("layer_types", _FULL + _LINEAR)
    by_number = shape.numbers("attn_type_list")  # MiniMax: 1 is full
    step = shape.size("full_attention_interval", default=4)
    if by_number and len(by_number) != shape.layers:
        raise UserError(f"{shape.where}: attn_type_list: {len(by_number)} of them, expected {shape.layers}")
    full = [
        i
        for i in shape.every_layer
        if (kinds[i] in _FULL if kinds else by_number[i] == 1 if by_number else (i + 1) % step == 0)
    ]
    return tuple(full), tuple(i for i in shape.every_layer if i not in full)


_KINDS: Mapping[str, Callable[[Shape], Iterator[Linear]]] = {
    "grouped": grouped,
    "latent": latent,
    "delta": delta,
    "lightning": lightning,
    "mamba": mamba,
}
