"""What each layer of a decoder does (attention, its substitute, an MLP), from whichever field says it."""

from gemmpipe.errors import UserError, quoted
from gemmpipe.sources.decoder.linear import Shape, from_zero

FULL, OTHER, BOTH = "full", "other", "both"
MLP, EXPERTS = "mlp", "moe"
"""Layers that do nothing else (Nemotron-H)."""
_WORDS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention", "attention"), FULL),
    **dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), FULL),
    **dict.fromkeys(("linear_attention", "mamba", "conv"), OTHER),
    "hybrid": BOTH,
    "mlp": MLP,
    "moe": EXPERTS,
}
_LETTERS = {"*": FULL, "M": OTHER, "-": MLP, "E": EXPERTS}


def layers_with(shape: Shape, *kinds: str) -> tuple[int, ...]:
    """The layers that do one of these, in order."""
    return tuple(i for i, kind in enumerate(_kinds(shape)) if kind in kinds)


def apart(shape: Shape) -> bool:
    """Whether MLPs are layers of their own."""
    return bool(layers_with(shape, MLP, EXPERTS))


def _kinds(shape: Shape) -> tuple[str, ...]:
    """One word a layer. Raises UserError for fields that contradict each other."""
    if not shape.rule.between:
        return (FULL,) * shape.layers
    if shape.rule.side_by_side:
        return (BOTH,) * shape.layers
    said = shape.words("layer_types", _WORDS) or shape.words("layers_block_type", _WORDS)
    if said:
        return tuple(_WORDS[word] for word in said)
    pattern = shape.value("hybrid_override_pattern")
    if pattern is not None:
        return _spelt(shape, pattern)
    full = _full(shape)
    return tuple(FULL if i in full else OTHER for i in shape.every_layer)


def _spelt(shape: Shape, pattern: object) -> tuple[str, ...]:
    if not isinstance(pattern, str) or set(pattern) - set(_LETTERS) or len(pattern) != shape.layers:
        expected = f"expected {shape.layers} of {' '.join(_LETTERS)}"
        raise UserError(f"{shape.where}: hybrid_override_pattern: {quoted(pattern)}, {expected}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _full(shape: Shape) -> frozenset[int]:
    """The layers with full attention: by a number for each, by their own numbers, or every so many."""
    by_number = shape.numbers("attn_type_list")  # MiniMax: 1 is full
    if by_number:
        if len(by_number) != shape.layers:
            raise UserError(f"{shape.where}: attn_type_list: {len(by_number)} of them, expected {shape.layers}")
        return frozenset(i for i in shape.every_layer if by_number[i] == 1)
    from_one = shape.numbers("linear_attn_config.full_attn_layers")  # Kimi
    listed = shape.numbers("attn_layer_indices") or tuple(i - 1 for i in from_one)
    if listed:
        if not all(0 <= i < shape.layers for i in listed):
            raise UserError(f"{shape.where}: attention in layers {list(listed)}, expected 0 to {shape.layers - 1}")
        return frozenset(listed)
    period = shape.size("attn_layer_period", default=0)
    if period:
        return frozenset(range(from_zero(shape, "attn_layer_offset") % period, shape.layers, period))
    step = shape.size("full_attention_interval", default=0)
    return frozenset(range(step - 1, shape.layers, step)) if step else frozenset()
