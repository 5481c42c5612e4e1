"""The products of hybrid decoders' layers without full attention, and the rules of these architectures.

Delta rules, state spaces and convolutions; also decoders with different heads in different layers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from gemmpipe.core.errors import UserError
from gemmpipe.sources.model.linear import ArchitectureRule, Linear, ModelShape, unfused_linear

LayerIds = tuple[int, ...]


def recurrent(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """The products of these layers, by the architecture's kind of layer without full attention."""
    yield from _RECURRENT_KINDS[shape.rule.mixer](shape, layer_ids)


def delta(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """Gated delta networks (Qwen3-Next, Qwen3.5)."""
    key_heads = shape.split(shape.size("linear_num_key_heads"), "linear_num_key_heads")
    value_heads = shape.split(shape.size("linear_num_value_heads"), "linear_num_value_heads")
    keys = key_heads * shape.size("linear_key_head_dim")
    values = value_heads * shape.size("linear_value_head_dim")
    at, hidden = "linear_attn.in_proj_", shape.hidden
    yield Linear(
        layer=f"{at}qkvz",
        n=2 * keys + 2 * values,
        k=hidden,
        layer_ids=layer_ids,
        sharding="column",
        modules=(f"{at}qkvz", f"{at}qkv", f"{at}z"),
        parts=(keys, keys, values, values),
    )
    yield Linear(
        layer=f"{at}ba",
        n=2 * value_heads,
        k=hidden,
        layer_ids=layer_ids,
        sharding="column",
        modules=(f"{at}ba", f"{at}b", f"{at}a"),
        parts=(value_heads, value_heads),
        sixteen_bit=True,  # one value per head: smaller than a scale block
    )
    yield unfused_linear("linear_attn.out_proj", hidden, values, "row", layer_ids)


def kda(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """Delta attention with a low-rank gate per channel (Kimi-Linear)."""
    heads, width = shape.size("linear_num_heads"), shape.size("linear_head_dim")
    own, hidden = shape.split(heads, "linear_num_heads"), shape.hidden
    inner, at = own * width, "self_attn."
    yield Linear(
        layer=f"{at}qkv_proj",
        n=3 * inner,
        k=hidden,
        layer_ids=layer_ids,
        sharding="column",
        modules=tuple(f"{at}{x}_proj" for x in "qkv"),
        parts=(inner,) * 3,
    )
    for gate in "fg":
        yield unfused_linear(f"{at}{gate}_a_proj", width, hidden, "replicated", layer_ids)
        yield unfused_linear(f"{at}{gate}_b_proj", inner, width, "column", layer_ids)
    # One value per head: smaller than a scale block.
    yield unfused_linear(f"{at}b_proj", own, hidden, "column", layer_ids, sixteen_bit=True)
    yield unfused_linear(f"{at}o_proj", hidden, inner, "row", layer_ids)


def lightning(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """Lightning attention (MiniMax-Text-01, M1)."""
    heads, hidden = shape.size("num_attention_heads"), shape.hidden
    width = shape.size("head_dim", default=max(1, hidden // heads))
    inner = shape.split(heads, "num_attention_heads") * width
    at = "linear_attn."
    yield unfused_linear(f"{at}qkv_proj", 3 * inner, hidden, "column", layer_ids, parts=(inner,) * 3)
    yield unfused_linear(f"{at}output_gate", inner, hidden, "column", layer_ids)
    yield unfused_linear(f"{at}out_proj", hidden, inner, "row", layer_ids)


def mamba(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """State spaces of the first kind (Jamba, Mamba, Falcon-Mamba)."""
    hidden, at = shape.hidden, "mamba."
    inner = shape.split(_inner(shape), "the state space's width")
    automatic = shape.value("mamba_dt_rank") == "auto"
    rank = -(-hidden // 16) if automatic else shape.size("mamba_dt_rank")
    bias = shape.flag("mamba_proj_bias")
    yield unfused_linear(f"{at}in_proj", 2 * inner, hidden, "column", layer_ids, bias=bias, parts=(inner, inner))
    yield unfused_linear(f"{at}x_proj", rank + 2 * shape.size("mamba_d_state"), inner, "row", layer_ids)
    yield unfused_linear(f"{at}dt_proj", inner, rank, "column", layer_ids, bias=True)
    yield unfused_linear(f"{at}out_proj", hidden, inner, "row", layer_ids, bias=bias)


def mamba2(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """State spaces with heads (Mamba-2, Granite 4, Nemotron-H, Falcon-H1, Bamba).

    One product computes gate, input, B, C and time step; a single group of B and C is replicated on every device.
    """
    heads, groups, hidden = shape.size("mamba_n_heads"), shape.size("mamba_n_groups"), shape.hidden
    width = shape.value("mamba_d_head")
    inner = _inner(shape) if width in (None, "auto") else heads * shape.size("mamba_d_head")
    own = shape.split(heads, "mamba_n_heads")
    if inner % heads:
        raise UserError(f"{shape.where}: the state space's width {inner} does not divide by mamba_n_heads {heads}")
    if groups > 1 and groups % shape.tp:
        raise UserError(f"{shape.where}: mamba_n_groups {groups} does not divide by shapes.tp={shape.tp}, and is not 1")
    states = max(1, groups // shape.tp) * shape.size("mamba_d_state")
    channels = inner // shape.tp
    parts = (channels, channels, states, states, own)
    at, bias = "mamba.", shape.flag("mamba_proj_bias")
    out_bias = shape.flag("projectors_bias") if shape.value("projectors_bias") is not None else bias
    yield unfused_linear(f"{at}in_proj", sum(parts), hidden, "column", layer_ids, bias=bias, parts=parts)
    yield unfused_linear(f"{at}out_proj", hidden, channels, "row", layer_ids, bias=out_bias)


def _inner(shape: ModelShape) -> int:
    if shape.value("mamba_d_ssm") is not None:
        return shape.size("mamba_d_ssm")
    return shape.size("mamba_expand") * shape.hidden


def short_conv(shape: ModelShape, layer_ids: LayerIds) -> Iterator[Linear]:
    """Gated short convolutions (LFM2)."""
    hidden, bias = shape.hidden, shape.flag("conv_bias")
    own = shape.split(hidden, "hidden_size")
    yield unfused_linear("conv.in_proj", 3 * own, hidden, "column", layer_ids, bias=bias, parts=(own,) * 3)
    yield unfused_linear("conv.out_proj", hidden, own, "row", layer_ids, bias=bias)


_RECURRENT_KINDS: Mapping[str, Callable[[ModelShape, LayerIds], Iterator[Linear]]] = {
    "delta": delta,
    "kda": kda,
    "lightning": lightning,
    "mamba": mamba,
    "mamba2": mamba2,
    "short_conv": short_conv,
}


_MAMBA = ArchitectureRule(
    mixer="mamba",
    dense="",
    names={"mamba.": "mixer."},
    fields={
        "mamba_d_ssm": "intermediate_size",
        "mamba_expand": "expand",
        "mamba_d_state": "state_size",
        "mamba_dt_rank": "time_step_rank",
        "mamba_proj_bias": "use_bias",
    },
)
_MAMBA2 = ArchitectureRule(
    mixer="mamba2",
    dense="",
    names={"mamba.": "mixer."},
    fields={
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "state_size",
        "mamba_expand": "expand",
        "mamba_proj_bias": "use_bias",
    },
)
_NEMOTRON_H = ArchitectureRule(
    mixer="mamba2",
    qkv_bias=False,
    gated=False,
    sparse=True,
    names={"mamba.": "mixer.", "self_attn.": "mixer.", "mlp.": "mixer."},
    fields={
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_proj_bias": "use_bias",
    },
)
_GRANITE4 = ArchitectureRule(
    mixer="mamba2",
    o_bias="attention_bias",
    mlp_bias=False,
    dense="shared_intermediate_size",
    sparse=True,
    names={
        "mlp.shared_experts.gate_proj": "shared_mlp.input_linear",
        "mlp.shared_experts.up_proj": "shared_mlp.input_linear",
        "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
        "mlp.gate_proj": "shared_mlp.input_linear",
        "mlp.up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    },
)
_LFM2 = ArchitectureRule(
    mixer="short_conv",
    qkv_bias=False,
    mlp_bias=False,
    two_thirds_width=True,
    fields={"attn_layer_indices": "full_attn_idxs", "intermediate_size": "block_ff_dim"},
    names={
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.": "feed_forward.",
    },
    defaults={"full_attention_interval": 1},
)
_KIMI_LINEAR = ArchitectureRule(
    attention="latent",
    mixer="kda",
    mlp_bias=False,
    sparse=True,
    fields={"linear_num_heads": "linear_attn_config.num_heads", "linear_head_dim": "linear_attn_config.head_dim"},
    names={"mlp.gate": "block_sparse_moe.gate"},
)
_MIMO2 = ArchitectureRule(
    o_bias=False,
    mlp_bias=False,
    sparse=True,
    by_type={
        "sliding_attention": {
            "num_attention_heads": "swa_num_attention_heads",
            "num_key_value_heads": "swa_num_key_value_heads",
            "head_dim": "swa_head_dim",
            "v_head_dim": "swa_v_head_dim",
        }
    },
    defaults={"swa_num_key_value_heads": 8},
)
_GEMMA4 = ArchitectureRule(
    o_bias="attention_bias",
    mlp_bias=False,
    sparse=True,
    keeps_dense_mlp=True,
    activation="gelu_pytorch_tanh",
    per_layer_embeddings=True,
    by_type={
        "full_attention": {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    },
    defaults={"global_head_dim": 512, "head_dim": 256, "vocab_size": 262144},
)

HYBRIDS: Mapping[str, ArchitectureRule] = {
    "Mamba": _MAMBA,
    "FalconMamba": _MAMBA,
    "Mamba2": _MAMBA2,
    "NemotronH": _NEMOTRON_H,
    "GraniteMoeHybrid": _GRANITE4,
    "Bamba": ArchitectureRule(mixer="mamba2", o_bias="attention_bias", names={"mlp.": "feed_forward."}),
    "FalconH1": ArchitectureRule(
        mixer="mamba2", parallel_mixers=True, o_bias="attention_bias", names={"mlp.": "feed_forward."}
    ),
    "Lfm2": _LFM2,
    "Lfm2Moe": replace(_LFM2, sparse=True, two_thirds_width=False),
    "KimiLinear": _KIMI_LINEAR,
    "MiMoV2Flash": _MIMO2,
    "Gemma4": _GEMMA4,
    "Afmoe": ArchitectureRule(output_gate=True, o_bias="attention_bias", mlp_bias=False, sparse=True),
}
"""The name without ForCausalLM -> its rule."""
