"""What a checkpoint's `quantization_config` says: which kernel families compute its layers, and which stay 16-bit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmpipe.data import Scalar
from gemmpipe.errors import UserError, quoted
from gemmpipe.sources.decoder.ignored import ignored_places
from gemmpipe.sources.decoder.linear import Config, Linear

_BLOCK_FAMILIES = ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle")
_EIGHT_FAMILIES = ("a8w8", "a8w8_bpreshuffle")
_FOUR_FAMILIES = ("a4w4_blockscale",)
_IGNORED = ("modules_to_not_convert", "ignore", "exclude_modules", "exclude", "ignored_layers")
_MOST_PATTERNS, _LONGEST = 20_000, 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How a checkpoint's matrices are stored, except for those that it names."""

    what: str
    """For the reader: `fp8 in blocks of 128x128`."""
    families: tuple[str, ...]
    """The kernel families that compute such a layer; none for what we have no kernel for."""
    experts: str
    """The quantisation of experts as aiter's fused MoE calls it: `per_1x128`, `per_Token`, `per_Tensor`, `per_1x32`."""
    weight: str
    """The weight's dtype: `fp8` (the chip's own), `int8`, `fp4x2`; empty where no kernel of ours reads it."""
    block: tuple[int, int] | None = None
    granularity: str = ""
    """`row` or `tensor` for scales that span K."""
    ignored: tuple[str, ...] = ()
    """Modules that stay in 16 bits: names, endings, globs, `re:` patterns."""

    def columns(self, names: frozenset[str]) -> dict[str, Scalar]:
        """What it says about those key columns of a plain product's family."""
        said: dict[str, Scalar] = {"granularity": self.granularity}
        if self.weight == "int8":
            said["q_dtype_w"] = "int8"
        return {name: value for name, value in said.items() if value and name in names}


def quantization_of(config: Config, where: str) -> Quantization | None:
    """What the file says, at its top or in its language model; None for a checkpoint in 16 bits.

    Raises UserError for an entry of the wrong kind.
    """
    for fields in _places(config):
        said = next((fields[name] for name in ("quantization_config", "compression_config") if fields.get(name)), None)
        if said is None:
            continue
        if not isinstance(said, Mapping):
            raise UserError(f"{where}: quantization_config: {quoted(said)}, expected an object")
        found = _read(said, where)
        return None if found is None else replace(found, ignored=_patterns(said, where))
    return None


def apart(linears: Sequence[Linear], quantization: Quantization | None) -> Iterator[tuple[Linear, bool]]:
    """Each product in the layers in which it is quantised (True), then in those in which it stays in 16 bits.

    Where nothing is said it may be quantised, unless engines never do.
    """
    ignored = ignored_places(linears, quantization.ignored) if quantization else [frozenset[int]()] * len(linears)
    for linear, left in zip(linears, ignored, strict=True):
        if linear.sixteen_bit or not left:
            yield linear, not linear.sixteen_bit
            continue
        for quantised in (True, False):
            places = tuple(place for place in linear.places if (place not in left) is quantised)
            if places:
                yield replace(linear, places=places), quantised


def _places(config: Config) -> Iterator[Config]:
    from gemmpipe.sources.decoder.rules import language_model

    yield config
    yield language_model(config)


def _read(said: Mapping[str, object], where: str) -> Quantization | None:
    method = str(said.get("quant_method") or said.get("quant_algo") or "").lower()
    algo = str(said.get("quant_algo") or "").lower()
    if method == "fp8" and said.get("weight_block_size"):
        return _blocks(said["weight_block_size"], where)
    if method in ("fp8", "fbgemm_fp8") or algo == "fp8":
        return _eight("fp8", "row" if method == "fbgemm_fp8" else "tensor")
    if algo in ("fp8_pb_wo", "fp8_block_scales", "fp8_pb"):
        return _blocks([128, 128], where)
    if algo == "fp8_per_channel_per_token":
        return _eight("fp8", "row")
    if method in ("mxfp4", "mxfp4_moe") or algo == "mxfp4":
        return _four(activations=False)
    if method == "compressed-tensors":
        return _groups(said, where)
    if method == "quark":
        return _quark(said)
    if not method:
        return None
    return Quantization(what=algo or method, families=(), experts="", weight="")


def _blocks(size: object, where: str) -> Quantization:
    block = tuple(size) if isinstance(size, list | tuple) else ()
    if len(block) != 2 or any(type(each) is not int or each < 1 for each in block):
        raise UserError(f"{where}: weight_block_size: {quoted(size)}, expected two whole numbers such as [128, 128]")
    return Quantization(
        what=f"fp8 in blocks of {block[0]}x{block[1]}",
        families=_BLOCK_FAMILIES if block == (128, 128) else (),
        experts="per_1x128" if block == (128, 128) else "",
        weight="fp8",
        block=(block[0], block[1]),
    )


def _eight(weight: str, granularity: str) -> Quantization:
    experts = "per_Token" if granularity == "row" else "per_Tensor"
    what = f"{weight} with a scale {'for each channel' if granularity == 'row' else 'for each tensor'}"
    # A scale for each tensor is no pre-shuffled kernel's: those scale by row.
    families = _EIGHT_FAMILIES if granularity == "row" else _EIGHT_FAMILIES[:1]
    return Quantization(what=what, families=families, experts=experts, weight=weight, granularity=granularity)


def _four(*, activations: bool) -> Quantization:
    families = _FOUR_FAMILIES if activations else ()
    what = "MXFP4" if activations else "MXFP4 weights"
    return Quantization(what=what, families=families, experts="per_1x32", weight="fp4x2")


def _groups(said: Mapping[str, object], where: str) -> Quantization | None:
    """compressed-tensors: the first group of layers speaks for all; weight-only ones have no kernel here."""
    groups = said.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(first, Mapping):
        raise UserError(f"{where}: quantization_config.config_groups: no group with weights, expected one")
    kind, bits, strategy = (str(weights.get(name)) for name in ("type", "num_bits", "strategy"))
    both = isinstance(first.get("input_activations"), Mapping)
    if both and (kind, bits) == ("float", "8") and strategy == "block":
        return _blocks(weights.get("block_structure"), where)
    if both and bits == "8" and strategy in ("channel", "tensor"):
        return _eight("fp8" if kind == "float" else "int8", "row" if strategy == "channel" else "tensor")
    if both and (kind, bits, str(weights.get("group_size"))) == ("float", "4", "32"):
        return _four(activations=True)
    what = f"{kind} {bits} bits by {strategy}" + ("" if both else ", weights alone")
    return Quantization(what=what, families=(), experts="", weight="")


def _quark(said: Mapping[str, object]) -> Quantization:
    """AMD's Quark: the global scheme."""
    overall = said.get("global_quant_config")
    weight = overall.get("weight") if isinstance(overall, Mapping) else None
    scheme = weight if isinstance(weight, Mapping) else {}
    kind, by = str(scheme.get("dtype")), str(scheme.get("qscheme"))
    if kind == "fp4":
        return _four(activations=isinstance(overall, Mapping) and bool(overall.get("input_tensors")))
    if kind in ("fp8_e4m3", "int8") and by in ("per_channel", "per_tensor"):
        return _eight("int8" if kind == "int8" else "fp8", "row" if by == "per_channel" else "tensor")
    return Quantization(what=f"Quark {kind} {by}", families=(), experts="", weight="")


def _patterns(said: Mapping[str, object], where: str) -> tuple[str, ...]:
    found = next((said[name] for name in _IGNORED if said.get(name)), ())
    if not isinstance(found, list | tuple) or any(not isinstance(word, str) for word in found):
        raise UserError(f"{where}: quantization_config: {quoted(found)}, expected a list of module names")
    if len(found) > _MOST_PATTERNS:
        raise UserError(
            f"{where}: quantization_config: {len(found)} ignored modules, expected at most {_MOST_PATTERNS}"
        )
    for word in found:
        if len(word) > _LONGEST:
            raise UserError(f"{where}: quantization_config: ignored module {word[:60]!r}, expected a shorter pattern")
    return tuple(found)
