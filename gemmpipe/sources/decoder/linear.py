"""What the rules speak of: a product of one device, and a config.json read by an architecture's rule."""

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmpipe.errors import UserError, nearest, one_letter_apart, quoted
from gemmpipe.parsing import MAX_SIZE
from gemmpipe.sources.decoder.rule import Rule

Config = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A product of one device: out [M, n] = x [M, k] @ w^T, once in each layer of `places`."""

    layer: str
    n: int
    k: int
    places: tuple[int, ...]
    """The decoder layers that have it, from 0; (0,) for what a model has once."""
    cut: str
    """`column` (N over the devices), `row` (K over the devices) or `whole` (every device has all of it)."""
    modules: tuple[str, ...] = ()
    """What a checkpoint calls the matrices that were merged into it, within their layer."""
    parts: tuple[int, ...] = ()
    """The Ns of these matrices, in order; empty for one."""
    bias: bool = False
    sixteen_bit: bool = False
    """Engines leave it unquantised (lm_head, routers)."""
    experts: int = 0
    """How many such matrices a device has in a grouped product; 0 for a plain one."""
    topk: int = 0
    """How many of all experts a token goes through; 0 where nothing says."""
    batch: int = 0
    """How many such products run as one batched product; 0 for a plain one."""

    @property
    def calls(self) -> int:
        """How often a forward pass runs it."""
        return len(self.places)


def single(
    name: str,
    n: int,
    k: int,
    cut: str,
    places: tuple[int, ...],
    *,
    bias: bool = False,
    parts: tuple[int, ...] = (),
    sixteen_bit: bool = False,
) -> Linear:
    """A matrix that is merged with no other: the product has the name that a checkpoint gives it."""
    return Linear(
        layer=name,
        n=n,
        k=k,
        places=places,
        cut=cut,
        modules=(name,),
        parts=parts,
        bias=bias,
        sixteen_bit=sixteen_bit,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A config.json with its parallelism; reads fields and divides sizes, or says why it cannot."""

    config: Config
    tp: int
    ep: int
    where: str
    architecture: str
    rule: Rule

    def value(self, name: str) -> object:
        """A field under the architecture's own name for it, or under ours; None where it is not there."""
        found: object = self.config
        for part in self.rule.fields.get(name, name).split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return self.config.get(name) if found is None else found

    def alike(self, places: tuple[int, ...]) -> "list[tuple[Shape, tuple[int, ...]]]":
        """These layers by what they have for themselves: (the configuration with it, the layers it holds for)."""
        apart: dict[tuple[str, str], tuple[Shape, list[int]]] = {}
        listed = self._by_layer()
        for place in places:
            said = listed.get(place, {})
            kind = (self._type(place), repr(sorted(said.items(), key=str)))
            if kind not in apart:
                if len(apart) == _MOST_KINDS:
                    raise UserError(f"{self.where}: layers of more than {_MOST_KINDS:,} kinds, expected fewer")
                apart[kind] = (self._with(self._of_type(kind[0]) | said), [])
            apart[kind][1].append(place)
        return [(one, tuple(held)) for one, held in apart.values()]

    def _with(self, own: Config) -> "Shape":
        """The same with fields of some layers in front."""
        if not own:
            return self
        return replace(self, config=ChainMap(dict(own), dict(self.config)), rule=replace(self.rule, by_type={}))

    def _of_type(self, name: str) -> dict[str, object]:
        """The fields that layers of this type have for themselves."""
        fields = self.rule.by_type.get(name, {})
        said = {ours: (self.value(theirs), self.rule.defaults.get(theirs)) for ours, theirs in fields.items()}
        found = {ours: default if value is None else value for ours, (value, default) in said.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _by_layer(self) -> dict[int, dict[str, object]]:
        """`per_layer_config` of files that transformers 5 wrote: layers to their fields; names that are none left out.

        Raises UserError for more names than layers.
        """
        listed = self.value("per_layer_config")
        if not isinstance(listed, Mapping):
            return {}
        if len(listed) > self.layers:
            names = f"{len(listed):,} names for {self.layers:,} layers"
            raise UserError(f"{self.where}: per_layer_config: {names}, expected at most one a layer")
        found: dict[int, dict[str, object]] = {}
        for name, said in listed.items():
            place = str(name)
            if place.isascii() and place.isdecimal() and len(place) < _LONGEST_PLACE and isinstance(said, Mapping):
                own = {str(field): value for field, value in said.items() if value is not None}
                found.setdefault(int(place), own)
        return found

    def _type(self, place: int) -> str:
        said, sliding = self.value("layer_types"), self.value("hybrid_layer_pattern")
        for listed in (said, sliding):
            if self.rule.by_type and isinstance(listed, list | tuple) and place < len(listed):
                return _BY_NUMBER.get(str(listed[place]), str(listed[place]))
        return ""

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there, a whole number from 1; UserError where there is none."""
        for name in names:
            value = self.value(name)
            if value is None:
                continue
            if isinstance(value, list | tuple) and value and "num_hidden_layers" not in names:
                value = self._everywhere(value)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise UserError(f"{self.where}: {name}: {quoted(value)}, expected a whole number from 1 to {MAX_SIZE}")
            return value
        default = self.rule.defaults.get(names[0], default)
        if default is None:
            raise UserError(f"{self.where}: no field '{names[0]}', which {self.architecture} needs")
        return default

    def _everywhere(self, value: Sequence[object]) -> object:
        """What a list says once a layer, where that is the same everywhere; else the list."""
        same = len(value) == self.layers and all(each == value[0] for each in value)
        return value[0] if same else value

    def says(self, name: str) -> bool:
        """Whether a field tells of something that the model has: a number above 0, also for one layer of a list.

        Nothing, null, 0 and false tell that it has none. Raises UserError for anything else.
        """
        value = self.value(name)
        listed = value if isinstance(value, list | tuple) and len(value) == self.layers else [value]
        for each in listed:
            if not (each is None or isinstance(each, int)):
                raise UserError(f"{self.where}: {name}: {quoted(value)}, expected a whole number")
        return any(listed)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty where the field is not there."""
        value = self.value(name)
        if value is None:
            return ()
        if isinstance(value, str):  # "3,4,5", as Step has it
            value = [int(word) if _PLACE.fullmatch(word.strip()) else word for word in value.split(",")]
        if not isinstance(value, list | tuple) or any(type(each) is not int or each < 0 for each in value):
            raise UserError(f"{self.where}: {name}: {quoted(value)}, expected a list of whole numbers")
        if len(value) > MOST_LAYERS:
            raise UserError(f"{self.where}: {name}: {len(value):,} of them, expected at most {MOST_LAYERS:,}")
        return tuple(value)

    def words(self, name: str, known: Iterable[str]) -> tuple[str, ...]:
        """One word a layer, of these; empty where the field is not there."""
        value, allowed = self.value(name), tuple(known)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(each not in allowed for each in value):
            raise UserError(f"{self.where}: {name}: {quoted(value)}, expected a list of {' and '.join(allowed)}")
        if len(value) != self.layers:
            raise UserError(f"{self.where}: {name}: {len(value)} of them, expected one a layer ({self.layers})")
        return tuple(value)

    def flag(self, word: bool | str) -> bool:
        """A fixed answer, or what the field of this name says."""
        if not isinstance(word, str):
            return word
        value = self.value(word)
        if value not in (None, False, True):
            raise UserError(f"{self.where}: {word}: {quoted(value)}, expected true or false")
        return bool(value)

    def split(self, value: int, what: str) -> int:
        """`value` over the devices; UserError where it does not divide."""
        if value % self.tp:
            raise UserError(f"{self.where}: {what} {value} does not divide by shapes.tp={self.tp}")
        return value // self.tp

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        """How many decoder layers."""
        listed = self.value("layers_block_type")  # Nemotron-H's file as transformers 5 writes it counts no further
        layers = self.size("num_hidden_layers", default=len(listed) or None if isinstance(listed, list) else None)
        if layers > MOST_LAYERS:
            raise UserError(f"{self.where}: num_hidden_layers: {layers}, expected at most {MOST_LAYERS}")
        return layers

    @property
    def every_layer(self) -> tuple[int, ...]:
        """All decoder layers."""
        return tuple(range(self.layers))


def from_zero(shape: Shape, *names: str, default: int = 0) -> int:
    """The first of these fields that is there, a number of layers from 0; UserError for any other value."""
    for name in names:
        value = shape.value(name)
        if value is None or (name.endswith("end_index") and value == -1):  # Ernie: -1 is the last
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{shape.where}: {name}: {quoted(value)}, expected 0 to {shape.layers} layers")
        if value > shape.layers and not name.endswith("end_index"):
            raise UserError(f"{shape.where}: {name}: {quoted(value)}, expected 0 to {shape.layers} layers")
        return value
    return shape.rule.defaults.get(names[0], default)


_PLACE = re.compile(r"[0-9]{1,9}")
_LONGEST_PLACE = 10
_MOST_KINDS = 256
"""Of layers, by their sizes; each kind has products of its own."""
_MOST_FIELDS = 2_000
_BY_NUMBER = {"0": "full_attention", "1": "sliding_attention"}
"""MiMo's `hybrid_layer_pattern`."""
MOST_LAYERS = 10_000
"""Far beyond any model; a file that says more is not one."""

_READ = (
    *("architectures", "model_type", "text_config", "quantization_config", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "attention_bias"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq"),
    *("shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "index_n_heads", "index_head_dim", "layer_types", "mlp_layer_types", "interleave_moe_layer_step"),
    *("intermediate_size_mlp", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "mlp_bias"),
)
"""Fields whose loss would change products in silence."""


def check_names(config: Config, where: str) -> None:
    """Raises UserError for a field one letter away from one that is read, which is not there itself."""
    if len(config) > _MOST_FIELDS:
        raise UserError(f"{where}: {len(config):,} fields, expected at most {_MOST_FIELDS:,}, as a model has")
    for name in config:
        close = [each for each in _READ if each not in config and one_letter_apart(str(name), each)]
        if close and name not in _READ:
            raise UserError(f"{where}: no such field '{name}'{nearest(str(name), close)}")
