"""What a rule says of an architecture: how it differs from a plain decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How an architecture differs from a plain decoder; a bias is a fixed answer or the field that tells."""

    attention: str = "grouped"
    """How layers with full attention compute it: `grouped` or `latent`."""
    between: str = ""
    """What other layers have in its place: `delta`, `kda`, `lightning`, `mamba`, `mamba2` or `short_conv`."""
    side_by_side: bool = False
    """Whether every layer has both."""
    query_gate: bool = False
    """Whether every query head has a gate beside it, unless `attn_output_gate` says no."""
    output_gate: bool = False
    """Whether a product of its own gates what attention gives."""
    by_type: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """A word of `layer_types` -> what such layers have for themselves: our name of a field -> the architecture's."""
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = False
    gated: bool = True
    mlp_bias: bool | str = "mlp_bias"
    dense: str = "intermediate_size"
    """The field with the width of its MLPs where there are no experts; empty for an architecture without MLPs."""
    sparse: bool = False
    """Whether its MLPs may be mixtures of experts."""
    beside: bool = False
    """Whether layers with experts have their MLP too."""
    expert_bias: bool = False
    """Whether routers and experts have biases."""
    activation: str = "silu"
    """What experts compute where no field says."""
    clamped: bool = False
    """Whether experts clamp what they activate, whatever `hidden_act` says."""
    weight_first: bool = False
    """Whether an expert's input is weighed, not what it gives."""
    inputs_of_layers: bool = False
    """Whether every layer may have an embedding of its own."""
    head_bias: bool | str = False
    shared_gate: bool = False
    """Whether a product with one output weighs the shared expert."""
    halved: bool = False
    """Whether `intermediate_size` counts gate and up together."""
    two_thirds: bool = False
    """Whether MLPs have two thirds of the width that is said, unless `block_auto_adjust_ff_dim` says no."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our name of a field -> the architecture's own, `outer.inner` for one of a nested object."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Sizes that published files leave out where they are the class's own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """How names of our modules begin -> how a checkpoint's do."""
