"""The products of attention: grouped-query, or latent with its indexer; and what hybrids have in its place."""

from collections.abc import Callable, Iterator, Mapping

from gemmpipe.errors import UserError
from gemmpipe.sources.decoder.linear import Linear, Shape, single
from gemmpipe.sources.decoder.mixing import BOTH, FULL, OTHER, layers_with
from gemmpipe.sources.decoder.recurrent import recurrent


def attention(shape: Shape) -> Iterator[Linear]:
    """The products of every layer's attention, of whichever kinds the architecture has."""
    full, other = layers_with(shape, FULL, BOTH), layers_with(shape, OTHER, BOTH)
    if full:
        yield from _KINDS[shape.rule.attention](shape, full)
    if other:
        yield from recurrent(shape, other)


def grouped(shape: Shape, places: tuple[int, ...]) -> Iterator[Linear]:
    """Grouped-query attention: layers of one kind may have other heads than those of another."""
    for one, alike in shape.alike(places):
        yield from _grouped(one, alike)


def _grouped(shape: Shape, places: tuple[int, ...]) -> Iterator[Linear]:
    """Fused qkv with KV heads replicated where there are fewer than devices, and o; values may be narrower."""
    heads, kv_heads, head = _heads(shape)
    own = shape.split(heads, "num_attention_heads")
    kv, value = _kv_heads_of_one(shape, kv_heads), shape.size("v_head_dim", default=head)
    gated = shape.rule.query_gate and shape.value("attn_output_gate") in (None, True)
    parts = (own * head * (2 if gated else 1), kv * head, kv * value)
    bias, out_bias = shape.flag(shape.rule.qkv_bias), shape.flag(shape.rule.o_bias)
    yield Linear(
        layer="qkv_proj",
        n=sum(parts),
        k=shape.hidden,
        places=places,
        cut="column",
        modules=tuple(f"self_attn.{x}_proj" for x in "qkv"),
        parts=parts,
        bias=bias,
    )
    if shape.rule.output_gate:
        yield single("self_attn.gate_proj", own * value, shape.hidden, "column", places)
    yield Linear(
        layer="o_proj",
        n=shape.hidden,
        k=own * value,
        places=places,
        cut="row",
        modules=("self_attn.o_proj",),
        bias=out_bias,
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


def latent(shape: Shape, places: tuple[int, ...]) -> Iterator[Linear]:
    """Multi-head latent attention (DeepSeek, Kimi, GLM-5).

    kv_b is a product in prefill; decode absorbs it as two batched products in 16 bits, one matrix a head.
    """
    heads = shape.split(shape.size("num_attention_heads"), "num_attention_heads")
    kv_rank, rope = shape.size("kv_lora_rank"), shape.size("qk_rope_head_dim")
    nope, value = shape.size("qk_nope_head_dim"), shape.size("v_head_dim")
    hidden = shape.hidden
    kv_a = "self_attn.kv_a_proj_with_mqa"
    if shape.value("q_lora_rank") is None:
        q = ("self_attn.q_proj",)
        yield Linear(layer="q_proj", n=heads * (nope + rope), k=hidden, places=places, cut="column", modules=q)
        yield Linear(layer="kv_a_proj", n=kv_rank + rope, k=hidden, places=places, cut="whole", modules=(kv_a,))
    else:
        q_rank = shape.size("q_lora_rank")
        yield Linear(
            layer="fused_qkv_a_proj",
            n=q_rank + kv_rank + rope,
            k=hidden,
            places=places,
            cut="whole",
            modules=("self_attn.q_a_proj", kv_a),
            parts=(q_rank, kv_rank + rope),
        )
        q = ("self_attn.q_b_proj",)
        yield Linear(layer="q_b_proj", n=heads * (nope + rope), k=q_rank, places=places, cut="column", modules=q)
        yield from _indexer(shape, places, q_rank)
    b = ("self_attn.kv_b_proj",)
    yield Linear(layer="kv_b_proj", n=heads * (nope + value), k=kv_rank, places=places, cut="column", modules=b)
    for layer, n, k in (("kv_b_proj.k (absorbed)", kv_rank, nope), ("kv_b_proj.v (absorbed)", value, kv_rank)):
        yield Linear(layer=layer, n=n, k=k, places=places, cut="whole", modules=b, batch=heads, sixteen_bit=True)
    if shape.rule.output_gate:
        yield single("self_attn.gate_proj", heads * value, hidden, "column", places)
    yield Linear(layer="o_proj", n=hidden, k=heads * value, places=places, cut="row", modules=("self_attn.o_proj",))


def _indexer(shape: Shape, places: tuple[int, ...], q_rank: int) -> Iterator[Linear]:
    """The indexer of sparse attention (DeepSeek-V3.2, GLM-5), the same on every device; weights_proj stays 16-bit."""
    if shape.value("index_n_heads") is None:
        return
    heads, head, hidden = shape.size("index_n_heads"), shape.size("index_head_dim"), shape.hidden
    kinds = shape.words("indexer_types", ("full", "shared"))
    places = tuple(i for i in places if not kinds or kinds[i] == "full")
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


_KINDS: Mapping[str, Callable[[Shape, tuple[int, ...]], Iterator[Linear]]] = {"grouped": grouped, "latent": latent}
