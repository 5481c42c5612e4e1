"""How engines cut a decoder's layers into products, by its config.json and the degree of tensor parallelism."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gemmpipe.errors import UserError, nearest

Config = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A product of one device: out [M, n] = x [M, k] @ w^T, run `calls` times a forward pass."""

    layer: str
    n: int
    k: int
    calls: int
    cut: str
    """`column` (N over the devices), `row` (K over the devices) or `whole` (every device has all of it)."""
    parts: tuple[int, ...] = ()
    """The Ns of the matrices that were merged into it, in order; empty for one."""
    bias: bool = False
    sixteen_bit: bool = False
    """Engines leave it unquantised (lm_head, routers)."""
    experts: int = 0
    """How many such matrices a grouped product has; 0 for a plain one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A config.json with its tensor parallelism; reads fields and divides sizes, or says why it cannot."""

    config: Config
    tp: int
    where: str
    architecture: str

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there, a whole number from 1; UserError where there is none."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise UserError(f"{self.where}: {name}: {value!r}, expected a whole number from 1")
            return value
        if default is None:
            raise UserError(f"{self.where}: no field '{names[0]}', which {self.architecture} needs")
        return default

    def split(self, value: int, what: str) -> int:
        """`value` over the devices; UserError where it does not divide."""
        if value % self.tp:
            raise UserError(f"{self.where}: {what} {value} does not divide by tp {self.tp}")
        return value // self.tp

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        """How many decoder layers."""
        return self.size("num_hidden_layers")


def attention(shape: Shape) -> Iterator[Linear]:
    """Grouped-query attention: fused qkv with KV heads replicated where there are fewer than devices, and o."""
    heads = shape.size("num_attention_heads")
    kv_heads = shape.size("num_key_value_heads", default=heads)
    if shape.config.get("head_dim") is None and shape.hidden % heads:
        raise UserError(f"{shape.where}: hidden_size {shape.hidden} does not divide by num_attention_heads {heads}")
    head = shape.size("head_dim", default=max(1, shape.hidden // heads))
    own = shape.split(heads, "num_attention_heads")
    if kv_heads >= shape.tp:
        kv = shape.split(kv_heads, "num_key_value_heads")
    elif shape.tp % kv_heads:
        raise UserError(
            f"{shape.where}: tp {shape.tp} is no multiple of num_key_value_heads {kv_heads}, so they cannot be repeated"
        )
    else:
        kv = 1
    parts = (own * head, kv * head, kv * head)
    biased = bool(shape.config.get("attention_bias"))
    yield Linear(
        layer="qkv_proj",
        n=sum(parts),
        k=shape.hidden,
        calls=shape.layers,
        cut="column",
        parts=parts,
        bias=biased or shape.architecture.startswith(_QKV_BIASED),
    )
    yield Linear(
        layer="o_proj",
        n=shape.hidden,
        k=own * head,
        calls=shape.layers,
        cut="row",
        bias=biased and shape.architecture.startswith(_O_BIASED),
    )


_QKV_BIASED = ("Qwen2",)
"""Architectures whose qkv has a bias without saying so in config.json."""
_O_BIASED = ("Llama", "GptOss", "Granite")
"""Architectures whose `attention_bias` means o_proj too."""


def latent_attention(shape: Shape) -> Iterator[Linear]:
    """Multi-head latent attention (DeepSeek, Kimi); kv_b is a product in prefill, absorbed in decode."""
    heads = shape.split(shape.size("num_attention_heads"), "num_attention_heads")
    kv_rank, rope = shape.size("kv_lora_rank"), shape.size("qk_rope_head_dim")
    nope, value = shape.size("qk_nope_head_dim"), shape.size("v_head_dim")
    hidden, layers = shape.hidden, shape.layers
    if shape.config.get("q_lora_rank") is None:
        yield Linear(layer="q_proj", n=heads * (nope + rope), k=hidden, calls=layers, cut="column")
        yield Linear(layer="kv_a_proj", n=kv_rank + rope, k=hidden, calls=layers, cut="whole")
    else:
        q_rank = shape.size("q_lora_rank")
        parts = (q_rank, kv_rank + rope)
        yield Linear(layer="fused_qkv_a_proj", n=sum(parts), k=hidden, calls=layers, cut="whole", parts=parts)
        yield Linear(layer="q_b_proj", n=heads * (nope + rope), k=q_rank, calls=layers, cut="column")
    yield Linear(layer="kv_b_proj", n=heads * (nope + value), k=kv_rank, calls=layers, cut="column")
    yield Linear(layer="o_proj", n=hidden, k=heads * value, calls=layers, cut="row")


def mlp(shape: Shape, width: int, layers: int, prefix: str = "") -> Iterator[Linear]:
    """A gated MLP of this width: fused gate_up and down."""
    own = shape.split(width, "moe_intermediate_size" if prefix.startswith("shared") else "intermediate_size")
    bias = bool(shape.config.get("mlp_bias"))
    hidden = shape.hidden
    merged = (own, own)
    gate_up = f"{prefix}gate_up_proj"
    yield Linear(layer=gate_up, n=2 * own, k=hidden, calls=layers, cut="column", parts=merged, bias=bias)
    yield Linear(layer=f"{prefix}down_proj", n=hidden, k=own, calls=layers, cut="row", bias=bias)


def experts(shape: Shape) -> Iterator[Linear]:
    """A mixture of experts: first dense layers, shared experts, the router and the grouped products."""
    count = shape.size("n_routed_experts", "num_local_experts", "num_experts")
    # One width for both in Mixtral and gpt-oss, whose MLPs are all experts.
    width = shape.size("moe_intermediate_size", default=shape.size("intermediate_size"))
    dense = shape.config.get("first_k_dense_replace") or 0
    only_dense = shape.config.get("mlp_only_layers") or ()
    step = shape.config.get("decoder_sparse_step", shape.config.get("moe_layer_freq", 1))
    if not isinstance(dense, int) or not 0 <= dense <= shape.layers:
        raise UserError(f"{shape.where}: first_k_dense_replace: {dense!r}, expected 0 to {shape.layers} layers")
    if only_dense or step not in (None, 1):
        raise UserError(f"{shape.where}: {shape.architecture} with dense layers in between: no rule for it yet")
    sparse = shape.layers - dense
    if dense:
        yield from mlp(shape, shape.size("intermediate_size"), dense, "mlp.")
    if shape.config.get("n_shared_experts"):
        yield from mlp(shape, width * shape.size("n_shared_experts"), sparse, "shared_experts.")
    own, hidden = shape.split(width, "moe_intermediate_size"), shape.hidden
    bias = shape.architecture.startswith("GptOss")
    yield Linear(layer="router(gate)", n=count, k=hidden, calls=sparse, cut="whole", bias=bias, sixteen_bit=True)
    w13 = "experts.w13 (grouped)"
    yield Linear(layer=w13, n=2 * own, k=hidden, calls=sparse, cut="column", parts=(own, own), experts=count)
    yield Linear(layer="experts.w2 (grouped)", n=hidden, k=own, calls=sparse, cut="row", experts=count)


def lm_head(shape: Shape) -> Linear:
    """The output embedding, its vocabulary padded to a multiple of 64 as engines pad it."""
    padded = -(-shape.size("vocab_size") // 64) * 64
    n = shape.split(padded, "vocab_size, padded to 64,")
    return Linear(layer="lm_head", n=n, k=shape.hidden, calls=1, cut="column", sixteen_bit=True)


def _dense(shape: Shape) -> Iterator[Linear]:
    yield from attention(shape)
    yield from mlp(shape, shape.size("intermediate_size"), shape.layers)


def _sparse(shape: Shape) -> Iterator[Linear]:
    yield from attention(shape)
    yield from experts(shape)


def _latent(shape: Shape) -> Iterator[Linear]:
    yield from latent_attention(shape)
    if any(shape.config.get(name) for name in _EXPERTS):
        yield from experts(shape)
    else:
        yield from mlp(shape, shape.size("intermediate_size"), shape.layers)


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_DENSE = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Phi3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Granite",
    "Olmo2",
    "SmolLM3",
    "InternLM3",
    "SeedOss",
    "Glm4",
    "Ministral",
]
_SPARSE = ("Mixtral", "Qwen3Moe", "GptOss", "Glm4Moe")
_LATENT = ("DeepseekV2", "DeepseekV3", "KimiK2")

RULES: dict[str, Callable[[Shape], Iterator[Linear]]] = {
    **{f"{name}ForCausalLM": _dense for name in _DENSE},
    **{f"{name}ForConditionalGeneration": _dense for name in ("Gemma3", "Mistral3")},
    **{f"{name}ForCausalLM": _sparse for name in _SPARSE},
    **{f"{name}ForCausalLM": _latent for name in _LATENT},
}
"""Architecture -> its rule; what is not here is refused, because other models fuse and shard differently."""


def linears(config: Config, tp: int, where: str, *, sixteen_bit: bool) -> list[Linear]:
    """Every product of the language model, those that engines leave in 16 bits (lm_head, routers) where asked for.

    Raises UserError: which field, and why it cannot be.
    """
    architecture = _architecture(config, where)
    nested = config.get("text_config")
    fields = nested if isinstance(nested, Mapping) else config
    shape = Shape(config=fields, tp=tp, where=where, architecture=architecture)
    if RULES[architecture] is _dense and any(fields.get(name) for name in (*_EXPERTS, "kv_lora_rank")):
        raise UserError(f"{where}: {architecture} with experts or latent attention: no rule for it")
    found = [linear for linear in RULES[architecture](shape) if sixteen_bit or not linear.sixteen_bit]
    return [*found, lm_head(shape)] if sixteen_bit else found


def _architecture(config: Config, where: str) -> str:
    """The name of the rule: `architectures`, else by `model_type`; a bare list of sizes is a Llama."""
    named = config.get("architectures")
    names = [named] if isinstance(named, str) else named
    if isinstance(names, list | tuple) and names and isinstance(names[0], str):
        word = names[0]
    elif config.get("model_type") is not None:
        kind = f"{config['model_type']}ForCausalLM".replace("_", "").lower()
        word = next((name for name in RULES if name.lower() == kind), str(config["model_type"]))
    elif named is None:
        return "LlamaForCausalLM"
    else:
        raise UserError(f"{where}: architectures: {named!r}, expected [LlamaForCausalLM] or the like")
    if word not in RULES:
        raise UserError(f"{where}: no rule for architecture '{word}'{nearest(word, RULES)}")
    return word
