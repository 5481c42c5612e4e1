"""The products of feed-forward layers: MLPs, mixtures of experts with their routers, and the output embedding."""

from collections.abc import Iterator

from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.sources.model.attention import EXPERTS, MLP, layers_with, mlps_are_layers
from gemmpipe.sources.model.linear import Linear, ModelShape, layer_count, unfused_linear

EXPERT_COUNT_FIELDS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""Fields with the number of experts."""
_TOPK = (
    *("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"),
    "top_k_experts",
)
_MAX_WIDTH_RATIO = 1000
_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED_EXPERT_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_DENSE_WIDTHS = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")


def feedforward(shape: ModelShape) -> Iterator[Linear]:
    """The MLP of every layer that has one, or its experts."""
    if shape.rule.sparse and any(shape.has(name) for name in EXPERT_COUNT_FIELDS):
        yield from experts(shape)
    elif shape.rule.dense:
        yield from _mlps(
            shape, layers_with(shape, MLP) if mlps_are_layers(shape) else shape.every_layer, shape.rule.dense
        )


def _mlps(shape: ModelShape, layer_ids: tuple[int, ...], *names: str, prefix: str = "") -> Iterator[Linear]:
    """The MLPs of these layers; Gemma's layers that share keys and values may have MLPs of twice the width."""
    width = _width(shape, *names) if layer_ids else 0
    shared = layer_count(shape, "num_kv_shared_layers") if shape.flag("use_double_wide_mlp") else 0
    for wide in (1, 2):
        some = tuple(i for i in layer_ids if (i >= shape.layers - shared) == (wide == 2))
        if some:
            yield from mlp(shape, wide * width, some, prefix)


def _width(shape: ModelShape, *names: str) -> int:
    """The width of an MLP; four times the hidden size by default in an ungated architecture."""
    default = None if shape.rule.gated else shape.size("expansion_ratio", default=4) * shape.hidden
    width = shape.size(*names, default=default)
    if shape.rule.two_thirds_width and shape.value("block_auto_adjust_ff_dim") in (None, True):
        return _two_thirds_width(shape, width)
    if shape.rule.fused_gate_width and width % 2:
        raise UserError(f"{shape.where}: {names[0]}: {width}, expected gate and up together, an even number")
    return width // 2 if shape.rule.fused_gate_width else width


def _two_thirds_width(shape: ModelShape, width: int) -> int:
    """LFM2: the gated MLP with the weights of an ungated one of this width, up to a multiplier and a multiple."""
    multiplier, multiple = shape.value("block_ffn_dim_multiplier"), shape.size("block_multiple_of", default=256)
    known = multiplier is None or (isinstance(multiplier, int | float) and 0 < multiplier <= _MAX_WIDTH_RATIO)
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float | None) or not known:
        expected = f"expected a number above 0, at most {_MAX_WIDTH_RATIO}"
        raise UserError(f"{shape.where}: block_ffn_dim_multiplier: {quoted_repr(multiplier)}, {expected}")
    return -(-int((multiplier or 1) * int(2 * width / 3)) // multiple) * multiple


def mlp(shape: ModelShape, width: int, layer_ids: tuple[int, ...], prefix: str = "") -> Iterator[Linear]:
    """A gated MLP of this width, fused gate_up and down; an ungated one has up alone."""
    shared = prefix.startswith("shared")
    own = shape.split(width, "shared experts' intermediate_size" if shared else "intermediate_size")
    bias, hidden = shape.flag(shape.rule.mlp_bias), shape.hidden
    at = f"mlp.{prefix.removeprefix('mlp.')}"
    names = ("gate_proj", "up_proj") if shape.rule.gated else ("up_proj",)
    yield Linear(
        layer=f"{prefix}{'gate_up_proj' if shape.rule.gated else 'up_proj'}",
        n=len(names) * own,
        k=hidden,
        layer_ids=layer_ids,
        sharding="column",
        modules=tuple(f"{at}{name}" for name in names),
        parts=(own,) * len(names),
        bias=bias,
    )
    down = (f"{at}down_proj",)
    yield Linear(
        layer=f"{prefix}down_proj", n=hidden, k=own, layer_ids=layer_ids, sharding="row", modules=down, bias=bias
    )


def experts(shape: ModelShape) -> Iterator[Linear]:
    """A mixture of experts: dense layers in between, shared experts, the router and the grouped products."""
    dense, sparse = _layers(shape)
    # One width for both in Mixtral and gpt-oss, whose MLPs are all experts.
    width = shape.size(*_WIDTHS, "intermediate_size")
    yield from _mlps(shape, shape.every_layer if shape.rule.keeps_dense_mlp else dense, *_DENSE_WIDTHS, prefix="mlp.")
    shared = _shared_width(shape, width)
    if shared:
        yield from mlp(shape, shared, sparse, "shared_experts.")
    count, hidden = shape.size(*EXPERT_COUNT_FIELDS), shape.hidden
    gate = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router", "feed_forward.router")
    yield Linear(
        layer="router(gate)",
        n=count,
        k=hidden,
        layer_ids=sparse,
        sharding="replicated",
        modules=gate,
        bias=shape.rule.expert_bias,
        sixteen_bit=True,
    )
    if shared and shape.rule.shared_gate:
        one = ("mlp.shared_expert_gate",)
        yield Linear(
            layer="shared_expert_gate",
            n=1,
            k=hidden,
            layer_ids=sparse,
            sharding="replicated",
            modules=one,
            sixteen_bit=True,
        )
    inner = shape.size("moe_latent_size", default=hidden)  # Nemotron-H's experts may be narrower than the model
    if inner != hidden:
        bias = shape.flag(shape.rule.mlp_bias)
        yield unfused_linear("mlp.fc1_latent_proj", inner, hidden, "replicated", sparse, bias=bias)
        yield unfused_linear("mlp.fc2_latent_proj", hidden, inner, "replicated", sparse, bias=bias)
    yield from _grouped(shape, count, width, inner, sparse)


def _grouped(shape: ModelShape, count: int, width: int, hidden: int, layer_ids: tuple[int, ...]) -> Iterator[Linear]:
    """The experts' products: sharded over tp, or whole experts distributed over ep."""
    topk = shape.size(*_TOPK) if any(shape.value(name) is not None for name in _TOPK) else 0
    if topk > count:
        raise UserError(f"{shape.where}: {_TOPK[0]} {topk}, expected at most {count}, the number of experts")
    if count % shape.ep:
        raise UserError(f"{shape.where}: {count} experts do not divide by shapes.ep={shape.ep}")
    own = width if shape.ep > 1 else shape.split(width, "moe_intermediate_size")
    per_device = count // shape.ep
    fused, whole = (2 if shape.rule.gated else 1), shape.ep > 1
    modules = ("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts")
    yield Linear(
        layer="experts.w13 (grouped)",
        n=fused * own,
        k=hidden,
        layer_ids=layer_ids,
        sharding="replicated" if whole else "column",
        modules=modules,
        parts=(own,) * fused,
        bias=shape.rule.expert_bias,
        experts=per_device,
        topk=topk,
    )
    yield Linear(
        layer="experts.w2 (grouped)",
        n=hidden,
        k=own,
        layer_ids=layer_ids,
        sharding="replicated" if whole else "row",
        modules=modules,
        bias=shape.rule.expert_bias,
        experts=per_device,
        topk=topk,
    )


def _shared_width(shape: ModelShape, width: int) -> int:
    """The total width of all shared experts; 0 for none."""
    if shape.architecture.startswith("Llama4"):  # one in addition to the routed ones, without a field for it
        return width
    for name in _SHARED_WIDTHS:
        if shape.has(name):
            return shape.size(name)
    return next((width * shape.size(name) for name in _SHARED_EXPERT_FIELDS if shape.has(name)), 0)


def _layers(shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers with a plain MLP, layers with experts). Raises UserError for fields that contradict each other."""
    if mlps_are_layers(shape):
        return layers_with(shape, MLP), layers_with(shape, EXPERTS)
    kinds = shape.values_per_layer("mlp_layer_types", ("dense", "sparse"))
    named = shape.numbers("moe_layers") or shape.numbers("moe_layers_enum")
    per_layer = shape.value("moe_layer_freq")
    if kinds:
        sparse = [i for i in shape.every_layer if kinds[i] == "sparse"]
    elif named:
        sparse = sorted({*named} & {*shape.every_layer})
    elif isinstance(per_layer, list | tuple):
        flags = shape.numbers("moe_layer_freq")
        if len(flags) != shape.layers:
            raise UserError(f"{shape.where}: moe_layer_freq: {len(flags)} values, expected {shape.layers}")
        sparse = [i for i in shape.every_layer if flags[i]]
    else:
        sparse = _sparse_layers(shape)
    dense = sorted({*shape.every_layer} - {*sparse})
    return tuple(dense), tuple(sparse)


def _sparse_layers(shape: ModelShape) -> list[int]:
    """The layers with experts, if no list names them (DeepSeek, Qwen, Llama 4, Ernie, Jamba).

    Fields give the first and the last of them, and their period.
    """
    step = shape.size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    period = shape.size("expert_layer_period", default=1)
    first = layer_count(shape, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    last = layer_count(shape, "moe_layer_end_index", default=shape.layers - 1)
    plain, offset = frozenset(shape.numbers("mlp_only_layers")), layer_count(shape, "expert_layer_offset") % period
    frequency = shape.size("moe_layer_freq", default=1)
    return [
        layer
        for layer in shape.every_layer
        if first <= layer <= last
        and layer not in plain
        and layer % period == offset
        and (layer + 1) % step == 0
        and layer % frequency == 0
    ]


def per_layer_embeddings(shape: ModelShape) -> Iterator[Linear]:
    """Gemma's per-layer embeddings: computed once for all layers, gated and projected in each."""
    if not shape.has("hidden_size_per_layer_input"):
        return
    width = shape.size("hidden_size_per_layer_input")
    made = shape.split(shape.layers * width, "num_hidden_layers times hidden_size_per_layer_input")
    yield unfused_linear("per_layer_model_projection", made, shape.hidden, "column", (0,))
    yield unfused_linear("per_layer_input_gate", width, shape.hidden, "replicated", shape.every_layer)
    yield unfused_linear("per_layer_projection", shape.hidden, width, "replicated", shape.every_layer)


def lm_head(shape: ModelShape) -> Linear:
    """The output embedding, its vocabulary padded to a multiple of 64 as engines pad it."""
    padded = -(-shape.size("vocab_size") // 64) * 64
    n = shape.split(padded, "vocab_size, padded to 64,")
    return Linear(
        layer="lm_head",
        n=n,
        k=shape.hidden,
        layer_ids=(0,),
        sharding="column",
        modules=("lm_head",),
        bias=shape.flag(shape.rule.head_bias),
        sixteen_bit=True,
    )
