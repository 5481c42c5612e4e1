"""The products of what hybrid decoders have in place of full attention: delta rules, state spaces, convolutions."""

from collections.abc import Callable, Iterator, Mapping

from gemmpipe.errors import UserError
from gemmpipe.sources.decoder.linear import Linear, Shape, single

Places = tuple[int, ...]


def recurrent(shape: Shape, places: Places) -> Iterator[Linear]:
    """The products of these layers, of whichever kind the architecture has between those with full attention."""
    yield from _KINDS[shape.rule.between](shape, places)


def delta(shape: Shape, places: Places) -> Iterator[Linear]:
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
        places=places,
        cut="column",
        modules=(f"{at}qkvz", f"{at}qkv", f"{at}z"),
        parts=(keys, keys, values, values),
    )
    yield Linear(
        layer=f"{at}ba",
        n=2 * value_heads,
        k=hidden,
        places=places,
        cut="column",
        modules=(f"{at}ba", f"{at}b", f"{at}a"),
        parts=(value_heads, value_heads),
        sixteen_bit=True,  # one number a head: no block of scales fits
    )
    yield single("linear_attn.out_proj", hidden, values, "row", places)


def kda(shape: Shape, places: Places) -> Iterator[Linear]:
    """Delta attention with a gate for each channel, the gates of low rank (Kimi-Linear)."""
    heads, width = shape.size("linear_num_heads"), shape.size("linear_head_dim")
    own, hidden = shape.split(heads, "linear_num_heads"), shape.hidden
    inner, at = own * width, "self_attn."
    yield Linear(
        layer=f"{at}qkv_proj",
        n=3 * inner,
        k=hidden,
        places=places,
        cut="column",
        modules=tuple(f"{at}{x}_proj" for x in "qkv"),
        parts=(inner,) * 3,
    )
    for gate in "fg":
        yield single(f"{at}{gate}_a_proj", width, hidden, "whole", places)
        yield single(f"{at}{gate}_b_proj", inner, width, "column", places)
    # One number a head: no block of scales fits.
    yield single(f"{at}b_proj", own, hidden, "column", places, sixteen_bit=True)
    yield single(f"{at}o_proj", hidden, inner, "row", places)


def lightning(shape: Shape, places: Places) -> Iterator[Linear]:
    """Lightning attention (MiniMax-Text-01, M1)."""
    heads, hidden = shape.size("num_attention_heads"), shape.hidden
    width = shape.size("head_dim", default=max(1, hidden // heads))
    inner = shape.split(heads, "num_attention_heads") * width
    at = "linear_attn."
    yield single(f"{at}qkv_proj", 3 * inner, hidden, "column", places, parts=(inner,) * 3)
    yield single(f"{at}output_gate", inner, hidden, "column", places)
    yield single(f"{at}out_proj", hidden, inner, "row", places)


def mamba(shape: Shape, places: Places) -> Iterator[Linear]:
    """State spaces of the first kind (Jamba, Mamba, Falcon-Mamba)."""
    hidden, at = shape.hidden, "mamba."
    inner = shape.split(_inner(shape), "the state space's width")
    automatic = shape.value("mamba_dt_rank") == "auto"
    rank = -(-hidden // 16) if automatic else shape.size("mamba_dt_rank")
    bias = shape.flag("mamba_proj_bias")
    yield single(f"{at}in_proj", 2 * inner, hidden, "column", places, bias=bias, parts=(inner, inner))
    yield single(f"{at}x_proj", rank + 2 * shape.size("mamba_d_state"), inner, "row", places)
    yield single(f"{at}dt_proj", inner, rank, "column", places, bias=True)
    yield single(f"{at}out_proj", hidden, inner, "row", places, bias=bias)


def mamba2(shape: Shape, places: Places) -> Iterator[Linear]:
    """State spaces with heads (Mamba-2, Granite 4, Nemotron-H, Falcon-H1, Bamba).

    One product makes gate, input, B, C and time step; a single group of B and C is repeated on every device.
    """
    heads, groups, hidden = shape.size("mamba_n_heads"), shape.size("mamba_n_groups"), shape.hidden
    width = shape.value("mamba_d_head")
    inner = _inner(shape) if width in (None, "auto") else heads * shape.size("mamba_d_head")
    own = shape.split(heads, "mamba_n_heads")
    if inner % heads:
        raise UserError(f"{shape.where}: the state space's width {inner} does not divide by mamba_n_heads {heads}")
    if groups > 1 and groups % shape.tp:
        raise UserError(
            f"{shape.where}: mamba_n_groups {groups} does not divide by shapes.tp={shape.tp}; one is repeated"
        )
    held = max(1, groups // shape.tp) * shape.size("mamba_d_state")
    channels = inner // shape.tp
    parts = (channels, channels, held, held, own)
    at, bias = "mamba.", shape.flag("mamba_proj_bias")
    out_bias = shape.flag("projectors_bias") if shape.value("projectors_bias") is not None else bias
    yield single(f"{at}in_proj", sum(parts), hidden, "column", places, bias=bias, parts=parts)
    yield single(f"{at}out_proj", hidden, channels, "row", places, bias=out_bias)


def _inner(shape: Shape) -> int:
    if shape.value("mamba_d_ssm") is not None:
        return shape.size("mamba_d_ssm")
    return shape.size("mamba_expand") * shape.hidden


def short_conv(shape: Shape, places: Places) -> Iterator[Linear]:
    """Gated short convolutions (LFM2)."""
    hidden, bias = shape.hidden, shape.flag("conv_bias")
    own = shape.split(hidden, "hidden_size")
    yield single("conv.in_proj", 3 * own, hidden, "column", places, bias=bias, parts=(own,) * 3)
    yield single("conv.out_proj", hidden, own, "row", places, bias=bias)


_KINDS: Mapping[str, Callable[[Shape, Places], Iterator[Linear]]] = {
    "delta": delta,
    "kda": kda,
    "lightning": lightning,
    "mamba": mamba,
    "mamba2": mamba2,
    "short_conv": short_conv,
}
