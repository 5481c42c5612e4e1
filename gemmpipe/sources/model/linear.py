"""The product of one device, an architecture's rule, and a config.json read by that rule.

Also the checks of field names, and of the alignment of shards with block scales: engines refuse to load models with
shards that split a scale block.
"""

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gemmpipe.core.errors import UserError, one_letter_apart, quoted_repr, suggest_or_list
from gemmpipe.family.problem import MAX_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureRule:
    """The differences of an architecture from a plain decoder; a bias is a fixed value or the name of its field."""

    attention: str = "grouped"
    """Kind of full attention: `grouped` or `latent`."""
    mixer: str = ""
    """Kind of the layers without full attention: `delta`, `kda`, `lightning`, `mamba`, `mamba2` or `short_conv`."""
    parallel_mixers: bool = False
    """True if every layer has both."""
    query_gate: bool = False
    """True if every query head has a gate, unless `attn_output_gate` is false."""
    output_gate: bool = False
    """True if a separate product gates the output of attention."""
    by_type: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """A value of `layer_types` -> the own fields of such layers: our name of a field -> the architecture's."""
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = False
    gated: bool = True
    mlp_bias: bool | str = "mlp_bias"
    dense: str = "intermediate_size"
    """The field with the width of its MLPs without experts; empty for an architecture without MLPs."""
    sparse: bool = False
    """True if its MLPs may be mixtures of experts."""
    keeps_dense_mlp: bool = False
    """True if layers with experts have an MLP too."""
    expert_bias: bool = False
    """True if routers and experts have biases."""
    activation: str = "silu"
    """The experts' activation if no field names it."""
    clamps_activation: bool = False
    """True if experts clamp their activations, for any `hidden_act`."""
    weight_first: bool = False
    """True if an expert's input is weighted, not its output."""
    per_layer_embeddings: bool = False
    """True if every layer may have an embedding of its own."""
    head_bias: bool | str = False
    shared_gate: bool = False
    """True if a product with one output weights the shared expert."""
    fused_gate_width: bool = False
    """True if `intermediate_size` is the sum of gate and up."""
    two_thirds_width: bool = False
    """True if MLPs have two thirds of the given width, unless `block_auto_adjust_ff_dim` is false."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our name of a field -> the architecture's own, `outer.inner` for a field of a nested object."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Sizes that published files omit because they are the class's defaults."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Prefix of our module names -> prefix in a checkpoint."""


ConfigJson = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A product of one device: out [M, n] = x [M, k] @ w^T, once in each layer of `layer_ids`."""

    layer: str
    n: int
    k: int
    layer_ids: tuple[int, ...]
    """The decoder layers that have it, from 0; (0,) for a product outside of layers."""
    sharding: str
    """`column` (N over the devices), `row` (K over the devices) or `replicated` (every device has all of it)."""
    modules: tuple[str, ...] = ()
    """The checkpoint's names of the matrices that were merged into it, within their layer."""
    parts: tuple[int, ...] = ()
    """The Ns of these matrices, in order; empty for one."""
    bias: bool = False
    sixteen_bit: bool = False
    """Engines leave it unquantised (lm_head, routers)."""
    experts: int = 0
    """The number of such matrices per device in a grouped product; 0 for a plain one."""
    topk: int = 0
    """The number of experts per token; 0 if unknown."""
    batch: int = 0
    """The number of such products in one batched product; 0 for a plain one."""

    @property
    def calls(self) -> int:
        """The number of calls in a forward pass."""
        return len(self.layer_ids)


def unfused_linear(
    name: str,
    n: int,
    k: int,
    sharding: str,
    layer_ids: tuple[int, ...],
    *,
    bias: bool = False,
    parts: tuple[int, ...] = (),
    sixteen_bit: bool = False,
) -> Linear:
    """The product of a matrix that is not merged: it has the name of the checkpoint."""
    return Linear(
        layer=name,
        n=n,
        k=k,
        layer_ids=layer_ids,
        sharding=sharding,
        modules=(name,),
        parts=parts,
        bias=bias,
        sixteen_bit=sixteen_bit,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A config.json with its parallelism; reads fields and shards sizes, or raises UserError with the reason."""

    config: ConfigJson
    tp: int
    ep: int
    where: str
    architecture: str
    rule: ArchitectureRule

    def value(self, name: str) -> object:
        """A field under the architecture's own name for it, or under ours; None if it is absent."""
        found: object = self.config
        for part in self.rule.fields.get(name, name).split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return self.config.get(name) if found is None else found

    def layer_groups(self, layer_ids: tuple[int, ...]) -> "list[tuple[ModelShape, tuple[int, ...]]]":
        """These layers grouped by their own fields: (the configuration with these fields, the layers)."""
        groups: dict[tuple[str, str], tuple[ModelShape, list[int]]] = {}
        listed = self._by_layer()
        for index in layer_ids:
            own = listed.get(index, {})
            kind = (self._type(index), repr(sorted(own.items(), key=str)))
            if kind not in groups:
                if len(groups) == _MAX_KINDS:
                    raise UserError(f"{self.where}: layers of more than {_MAX_KINDS:,} kinds, expected at most that")
                groups[kind] = (self._with(self._of_type(kind[0]) | own), [])
            groups[kind][1].append(index)
        return [(one, tuple(ids)) for one, ids in groups.values()]

    def _with(self, own: ConfigJson) -> "ModelShape":
        """A copy in which the own fields of some layers have precedence."""
        if not own:
            return self
        return replace(self, config=ChainMap(dict(own), dict(self.config)), rule=replace(self.rule, by_type={}))

    def _of_type(self, name: str) -> dict[str, object]:
        """The own fields of layers of this type."""
        fields = self.rule.by_type.get(name, {})
        values = {ours: (self.value(theirs), self.rule.defaults.get(theirs)) for ours, theirs in fields.items()}
        found = {ours: default if value is None else value for ours, (value, default) in values.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _by_layer(self) -> dict[int, dict[str, object]]:
        """`per_layer_config` of files that transformers 5 wrote: layer -> its fields; other names are ignored.

        Raises UserError for more names than layers.
        """
        listed = self.value("per_layer_config")
        if not isinstance(listed, Mapping):
            return {}
        if len(listed) > self.layers:
            names = f"{len(listed):,} names for {self.layers:,} layers"
            raise UserError(f"{self.where}: per_layer_config: {names}, expected at most one per layer")
        found: dict[int, dict[str, object]] = {}
        for name, values in listed.items():
            index = str(name)
            if index.isascii() and index.isdecimal() and len(index) < _MAX_INDEX_DIGITS and isinstance(values, Mapping):
                own = {str(field): value for field, value in values.items() if value is not None}
                found.setdefault(int(index), own)
        return found

    def _type(self, index: int) -> str:
        types, sliding = self.value("layer_types"), self.value("hybrid_layer_pattern")
        for listed in (types, sliding):
            if self.rule.by_type and isinstance(listed, list | tuple) and index < len(listed):
                return _BY_NUMBER.get(str(listed[index]), str(listed[index]))
        return ""

    def size(self, *names: str, default: int | None = None) -> int:
        """The first present one of these fields, a whole number from 1; UserError if there is none."""
        for name in names:
            value = self.value(name)
            if value is None:
                continue
            if isinstance(value, list | tuple) and value and "num_hidden_layers" not in names:
                value = self._everywhere(value)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise UserError(
                    f"{self.where}: {name}: {quoted_repr(value)}, expected a whole number from 1 to {MAX_SIZE}"
                )
            return value
        default = self.rule.defaults.get(names[0], default)
        if default is None:
            raise UserError(f"{self.where}: no field '{names[0]}', which {self.architecture} needs")
        return default

    def _everywhere(self, value: Sequence[object]) -> object:
        """The common value of a list with one value per layer; else the list."""
        same = len(value) == self.layers and all(each == value[0] for each in value)
        return value[0] if same else value

    def has(self, name: str) -> bool:
        """True if a field is a number above 0 or true, or a list with one value per layer that contains such a value.

        False if it is absent, null, 0 or false. Raises UserError for anything else.
        """
        value = self.value(name)
        listed = value if isinstance(value, list | tuple) and len(value) == self.layers else [value]
        for each in listed:
            if not (each is None or isinstance(each, int)):
                raise UserError(f"{self.where}: {name}: {quoted_repr(value)}, expected a whole number")
        return any(listed)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty if the field is absent."""
        value = self.value(name)
        if value is None:
            return ()
        if isinstance(value, str):  # "3,4,5", as in Step's files
            value = [int(word) if _LAYER_INDEX.fullmatch(word.strip()) else word for word in value.split(",")]
        if not isinstance(value, list | tuple) or any(type(each) is not int or each < 0 for each in value):
            raise UserError(f"{self.where}: {name}: {quoted_repr(value)}, expected a list of whole numbers")
        if len(value) > MAX_LAYERS:
            raise UserError(f"{self.where}: {name}: {len(value):,} values, expected at most {MAX_LAYERS:,}")
        return tuple(value)

    def values_per_layer(self, name: str, known: Iterable[str]) -> tuple[str, ...]:
        """The value per layer, one of `known`; empty if the field is absent."""
        value, allowed = self.value(name), tuple(known)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(each not in allowed for each in value):
            raise UserError(f"{self.where}: {name}: {quoted_repr(value)}, expected a list of {' and '.join(allowed)}")
        if len(value) != self.layers:
            raise UserError(f"{self.where}: {name}: {len(value)} values, expected one per layer ({self.layers})")
        return tuple(value)

    def flag(self, word: bool | str) -> bool:
        """A fixed value, or the value of the field of this name."""
        if not isinstance(word, str):
            return word
        value = self.value(word)
        if value not in (None, False, True):
            raise UserError(f"{self.where}: {word}: {quoted_repr(value)}, expected true or false")
        return bool(value)

    def split(self, value: int, what: str) -> int:
        """`value` per device; UserError if tp does not divide it."""
        if value % self.tp:
            raise UserError(f"{self.where}: {what} {value} does not divide by shapes.tp={self.tp}")
        return value // self.tp

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        listed = self.value("layers_block_type")  # Nemotron-H's files of transformers 5 have no other count
        layers = self.size("num_hidden_layers", default=len(listed) or None if isinstance(listed, list) else None)
        if layers > MAX_LAYERS:
            raise UserError(f"{self.where}: num_hidden_layers: {layers}, expected at most {MAX_LAYERS}")
        return layers

    @property
    def every_layer(self) -> tuple[int, ...]:
        """All decoder layers."""
        return tuple(range(self.layers))


def layer_count(shape: ModelShape, *names: str, default: int = 0) -> int:
    """The first present one of these fields, a number of layers from 0; UserError for any other value."""
    for name in names:
        value = shape.value(name)
        if value is None or (name.endswith("end_index") and value == -1):  # Ernie: -1 is the last
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{shape.where}: {name}: {quoted_repr(value)}, expected 0 to {shape.layers} layers")
        if value > shape.layers and not name.endswith("end_index"):
            raise UserError(f"{shape.where}: {name}: {quoted_repr(value)}, expected 0 to {shape.layers} layers")
        return value
    return shape.rule.defaults.get(names[0], default)


_LAYER_INDEX = re.compile(r"[0-9]{1,9}")
_MAX_INDEX_DIGITS = 10
_MAX_KINDS = 256
"""Kinds of layers with different sizes; each kind has products of its own."""
_MAX_FIELDS = 2_000
_BY_NUMBER = {"0": "full_attention", "1": "sliding_attention"}
"""MiMo's `hybrid_layer_pattern`."""
MAX_LAYERS = 10_000
"""Far above any model; a larger number means an invalid file."""

_READ_FIELDS = (
    *("architectures", "model_type", "text_config", "quantization_config", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "attention_bias"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq"),
    *("shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "index_n_heads", "index_head_dim", "layer_types", "mlp_layer_types", "interleave_moe_layer_step"),
    *("intermediate_size_mlp", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "mlp_bias"),
)
"""Fields that would change products silently if they were misspelt."""


def check_field_names(config: ConfigJson, where: str) -> None:
    """Raises UserError for a field one letter away from a known one that is absent."""
    if len(config) > _MAX_FIELDS:
        raise UserError(f"{where}: {len(config):,} fields, expected at most {_MAX_FIELDS:,} in a model's configuration")
    for name in config:
        close = [each for each in _READ_FIELDS if each not in config and one_letter_apart(str(name), each)]
        if close and name not in _READ_FIELDS:
            raise UserError(f"{where}: no such field '{name}'{suggest_or_list(str(name), close)}")


def check_block_alignment(block: tuple[int, int], linear: Linear, tp: int, where: str) -> None:
    """Raises UserError, beginning with `where`, for a size that is not a multiple of the (rows, columns) of a block."""
    hint = (
        "; shapes.ep= distributes whole experts instead" if linear.experts and linear.sharding != "replicated" else ""
    )
    for size, multiple, what in _shard_sizes(linear, tp, *block):
        if size % multiple:
            raise UserError(
                f"{where}: {what} {size} with tp {tp}: engines need a multiple of {multiple} for block scales{hint}"
            )


def _shard_sizes(linear: Linear, tp: int, rows: int, columns: int) -> Iterator[tuple[int, int, str]]:
    if linear.sharding == "row" and tp > 1:
        yield linear.k, columns, "K"
    parts = linear.parts or (linear.n,)
    if linear.sharding == "column" and tp > 1:
        yield from ((part, rows, "N of a part") for part in parts)
    else:
        # Unsharded, all parts but the last must end on a block.
        yield from ((part, rows, "N of a part") for part in parts[:-1])
