"""Rules of decoders that mix in more ways than one: state spaces, delta rules, convolutions, heads that differ."""

from collections.abc import Mapping
from dataclasses import replace

from gemmpipe.sources.decoder.rule import Rule

_MAMBA = Rule(
    between="mamba",
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
_MAMBA2 = Rule(
    between="mamba2",
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
_NEMOTRON_H = Rule(
    between="mamba2",
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
_GRANITE4 = Rule(
    between="mamba2",
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
_LFM2 = Rule(
    between="short_conv",
    qkv_bias=False,
    mlp_bias=False,
    two_thirds=True,
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
_KIMI_LINEAR = Rule(
    attention="latent",
    between="kda",
    mlp_bias=False,
    sparse=True,
    fields={"linear_num_heads": "linear_attn_config.num_heads", "linear_head_dim": "linear_attn_config.head_dim"},
    names={"mlp.gate": "block_sparse_moe.gate"},
)
_MIMO2 = Rule(
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
_GEMMA4 = Rule(
    o_bias="attention_bias",
    mlp_bias=False,
    sparse=True,
    beside=True,
    activation="gelu_pytorch_tanh",
    inputs_of_layers=True,
    by_type={
        "full_attention": {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    },
    defaults={"global_head_dim": 512, "head_dim": 256, "vocab_size": 262144},
)

HYBRIDS: Mapping[str, Rule] = {
    "Mamba": _MAMBA,
    "FalconMamba": _MAMBA,
    "Mamba2": _MAMBA2,
    "NemotronH": _NEMOTRON_H,
    "GraniteMoeHybrid": _GRANITE4,
    "Bamba": Rule(between="mamba2", o_bias="attention_bias", names={"mlp.": "feed_forward."}),
    "FalconH1": Rule(between="mamba2", side_by_side=True, o_bias="attention_bias", names={"mlp.": "feed_forward."}),
    "Lfm2": _LFM2,
    "Lfm2Moe": replace(_LFM2, sparse=True, two_thirds=False),
    "KimiLinear": _KIMI_LINEAR,
    "MiMoV2Flash": _MIMO2,
    "Gemma4": _GEMMA4,
    "Afmoe": Rule(output_gate=True, o_bias="attention_bias", mlp_bias=False, sparse=True),
}
"""The name without ForCausalLM -> how engines cut it."""
