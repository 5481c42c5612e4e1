"""A checkpoint's `quantization_config`: the kernel families for its layers, and the modules that stay in 16 bits.

Ignored modules are names, endings, globs and `re:` patterns, matched with a model's module names.
"""

import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.sources.model.linear import ConfigJson, Linear

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.")
_TIMEOUT_S = 5.0
_MATCH_PROGRAM = """
import json, re, sys
expressions, names = json.load(sys.stdin)
compiled = [re.compile(each) for each in expressions]
json.dump([name for name in names if any(e.match(name) or e.match("model." + name) for e in compiled)], sys.stdout)
"""


def ignored_layers(linears: Sequence[Linear], patterns: Sequence[str]) -> list[frozenset[int]]:
    """For each linear the layers in which a pattern matches one of its matrices.

    Raises UserError for an invalid pattern, and for patterns that take too long.
    """
    words = frozenset(_without_prefix(pattern) for pattern in patterns if not _is_expression(pattern))
    expressions = tuple(_expression(pattern) for pattern in patterns if pattern.startswith("re:"))
    globs = tuple(_expression(pattern) for pattern in patterns if "*" in pattern and not pattern.startswith("re:"))
    names_by_layer = [
        {layer_id: [_full_name(linear, layer_id, module) for module in linear.modules] for layer_id in linear.layer_ids}
        for linear in linears
    ]
    full_names = {name for layer_ids in names_by_layer for names in layer_ids.values() for name in names}
    # A glob may name the module or one of its parents. Engines match an expression with the module alone: one that
    # excludes (`re:^(?!.*mlp).*$`) matches the parents of all modules.
    holders = {holder for name in full_names for holder in _starts(name)}
    matched = _match_in_process(expressions, tuple(sorted(full_names))) if expressions else frozenset()
    matched |= _match_in_process(globs, tuple(sorted(holders))) if globs else frozenset()
    return [
        frozenset(
            layer_id for layer_id, names in layer_ids.items() if any(_is_named(name, words, matched) for name in names)
        )
        for layer_ids in names_by_layer
    ]


def _is_named(name: str, words: frozenset[str], matched: frozenset[str]) -> bool:
    starts = _starts(name)
    return not (words.isdisjoint(starts) and matched.isdisjoint(starts) and words.isdisjoint(_ends(name)))


def _is_expression(pattern: str) -> bool:
    return pattern.startswith("re:") or "*" in pattern


def _without_prefix(pattern: str) -> str:
    """The name without prefixes such as `model.`."""
    return next((pattern.removeprefix(each) for each in _PREFIXES if pattern.startswith(each)), pattern)


def _expression(pattern: str) -> str:
    if not pattern.startswith("re:"):
        return fnmatch.translate(_without_prefix(pattern))
    try:
        return re.compile(pattern.removeprefix("re:")).pattern
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"quantization_config: ignored module {quoted_repr(pattern)}: {error}") from None


def _full_name(linear: Linear, layer_id: int, module: str) -> str:
    return module if linear.layer == "lm_head" else f"layers.{layer_id}.{module}"


def _starts(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _ends(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


@lru_cache(maxsize=4)
def _match_in_process(expressions: tuple[str, ...], names: tuple[str, ...]) -> frozenset[str]:
    """The names that an expression matches, in a killable process: a short pattern can take unbounded time."""
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-c", _MATCH_PROGRAM],
            input=json.dumps([expressions, names]),
            capture_output=True,
            check=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):  # the latter: out of memory
        most = max(expressions, key=len)
        raise UserError(
            f"quantization_config: ignored modules such as 're:{most[:60]}' cannot be matched within "
            f"{_TIMEOUT_S:g} s, expected simple patterns"
        ) from None
    return frozenset(json.loads(found.stdout))


_BLOCK_FAMILIES = ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "linear_fp8_blockscale")
_EIGHT_FAMILIES = ("a8w8", "a8w8_bpreshuffle")
_LINEAR_FP8_FAMILIES = ("linear_fp8_row",)
_FOUR_FAMILIES = ("a4w4_blockscale",)
_IGNORED_FIELDS = ("modules_to_not_convert", "ignore", "exclude_modules", "exclude", "ignored_layers")
_MAX_PATTERNS, _MAX_PATTERN_LENGTH = 20_000, 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The storage of a checkpoint's matrices, except for the ignored ones."""

    what: str
    """Text for messages: `fp8 in blocks of 128x128`."""
    families: tuple[str, ...]
    """The kernel families that compute such a layer; empty if we have no kernel."""
    experts: str
    """aiter's name of the experts' quantisation: `per_1x128`, `per_Token`, `per_Tensor`, `per_1x32`."""
    weight: str
    """The weight's dtype: `fp8` (the chip's own), `int8`, `fp4x2`; empty if no kernel of ours reads it."""
    block: tuple[int, int] | None = None
    granularity: str = ""
    """`row` or `tensor` for scales that span K."""
    ignored: tuple[str, ...] = ()
    """Modules that stay in 16 bits: names, endings, globs, `re:` patterns."""

    def columns(self, names: frozenset[str]) -> dict[str, Scalar]:
        """The values for these key columns of a plain product's family."""
        entry: dict[str, Scalar] = {"granularity": self.granularity}
        if self.weight == "int8":
            entry["q_dtype_w"] = "int8"
        return {name: value for name, value in entry.items() if value and name in names}


def quantization_of(config: ConfigJson, where: str) -> Quantization | None:
    """The file's quantisation, at its top level or in its language model; None for a checkpoint in 16 bits.

    Raises UserError for an entry of the wrong type.
    """
    for fields in _quantization_configs(config):
        entry = next((fields[name] for name in ("quantization_config", "compression_config") if fields.get(name)), None)
        if entry is None:
            continue
        if not isinstance(entry, Mapping):
            raise UserError(f"{where}: quantization_config: {quoted_repr(entry)}, expected an object")
        found = _read(entry, where)
        return None if found is None else replace(found, ignored=_patterns(entry, where))
    return None


def split_by_quantization(
    linears: Sequence[Linear], quantization: Quantization | None
) -> Iterator[tuple[Linear, bool]]:
    """Each product in the layers in which it is quantised (True), then in those in which it stays in 16 bits.

    Without a quantization_config a product counts as quantised, unless engines never quantise it.
    """
    ignored = ignored_layers(linears, quantization.ignored) if quantization else [frozenset[int]()] * len(linears)
    for linear, left in zip(linears, ignored, strict=True):
        if linear.sixteen_bit or not left:
            yield linear, not linear.sixteen_bit
            continue
        for quantised in (True, False):
            layer_ids = tuple(layer_id for layer_id in linear.layer_ids if (layer_id not in left) is quantised)
            if layer_ids:
                yield replace(linear, layer_ids=layer_ids), quantised


def _quantization_configs(config: ConfigJson) -> Iterator[ConfigJson]:
    from gemmpipe.sources.model.rules import language_model

    yield config
    yield language_model(config)


def _read(entry: Mapping[str, object], where: str) -> Quantization | None:
    method = str(entry.get("quant_method") or entry.get("quant_algo") or "").lower()
    algo = str(entry.get("quant_algo") or "").lower()
    if method == "fp8" and entry.get("weight_block_size"):
        return _blocks(entry["weight_block_size"], where)
    if method in ("fp8", "fbgemm_fp8") or algo == "fp8":
        return _eight_bit_families("fp8", "row" if method == "fbgemm_fp8" else "tensor")
    if algo in ("fp8_pb_wo", "fp8_block_scales", "fp8_pb"):
        return _blocks([128, 128], where)
    if algo == "fp8_per_channel_per_token":
        return _eight_bit_families("fp8", "row")
    if method in ("mxfp4", "mxfp4_moe") or algo == "mxfp4":
        return _four_bit_families(activations=False)
    if method == "compressed-tensors":
        return _groups(entry, where)
    if method == "quark":
        return _quark(entry)
    if not method:
        return None
    return Quantization(what=algo or method, families=(), experts="", weight="")


def _blocks(size: object, where: str) -> Quantization:
    block = tuple(size) if isinstance(size, list | tuple) else ()
    if len(block) != 2 or any(type(each) is not int or each < 1 for each in block):
        raise UserError(
            f"{where}: weight_block_size: {quoted_repr(size)}, expected two whole numbers such as [128, 128]"
        )
    return Quantization(
        what=f"fp8 in blocks of {block[0]}x{block[1]}",
        families=_BLOCK_FAMILIES if block == (128, 128) else (),
        experts="per_1x128" if block == (128, 128) else "",
        weight="fp8",
        block=(block[0], block[1]),
    )


def _eight_bit_families(weight: str, granularity: str) -> Quantization:
    experts = "per_Token" if granularity == "row" else "per_Tensor"
    what = f"{weight} with a scale {'for each channel' if granularity == 'row' else 'for each tensor'}"
    # Pre-shuffled kernels have scales by row only, not by tensor.
    families = _EIGHT_FAMILIES if granularity == "row" else _EIGHT_FAMILIES[:1]
    if (weight, granularity) == ("fp8", "row"):
        families = (*families, *_LINEAR_FP8_FAMILIES)
    return Quantization(what=what, families=families, experts=experts, weight=weight, granularity=granularity)


def _four_bit_families(*, activations: bool) -> Quantization:
    families = _FOUR_FAMILIES if activations else ()
    what = "MXFP4" if activations else "MXFP4 weights"
    return Quantization(what=what, families=families, experts="per_1x32", weight="fp4x2")


def _groups(entry: Mapping[str, object], where: str) -> Quantization | None:
    """compressed-tensors: the first group of layers counts for all; weight-only groups have no kernel here."""
    groups = entry.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(first, Mapping):
        raise UserError(f"{where}: quantization_config.config_groups: no group with weights, expected one")
    kind, bits, strategy = (str(weights.get(name)) for name in ("type", "num_bits", "strategy"))
    both = isinstance(first.get("input_activations"), Mapping)
    if both and (kind, bits) == ("float", "8") and strategy == "block":
        return _blocks(weights.get("block_structure"), where)
    if both and bits == "8" and strategy in ("channel", "tensor"):
        return _eight_bit_families("fp8" if kind == "float" else "int8", "row" if strategy == "channel" else "tensor")
    if both and (kind, bits, str(weights.get("group_size"))) == ("float", "4", "32"):
        return _four_bit_families(activations=True)
    what = f"{kind} {bits} bits by {strategy}" + ("" if both else ", weights alone")
    return Quantization(what=what, families=(), experts="", weight="")


def _quark(entry: Mapping[str, object]) -> Quantization:
    """AMD's Quark: the global scheme."""
    overall = entry.get("global_quant_config")
    weight = overall.get("weight") if isinstance(overall, Mapping) else None
    scheme = weight if isinstance(weight, Mapping) else {}
    kind, by = str(scheme.get("dtype")), str(scheme.get("qscheme"))
    if kind == "fp4":
        return _four_bit_families(activations=isinstance(overall, Mapping) and bool(overall.get("input_tensors")))
    if kind in ("fp8_e4m3", "int8") and by in ("per_channel", "per_tensor"):
        return _eight_bit_families("int8" if kind == "int8" else "fp8", "row" if by == "per_channel" else "tensor")
    return Quantization(what=f"Quark {kind} {by}", families=(), experts="", weight="")


def _patterns(entry: Mapping[str, object], where: str) -> tuple[str, ...]:
    found = next((entry[name] for name in _IGNORED_FIELDS if entry.get(name)), ())
    if not isinstance(found, list | tuple) or any(not isinstance(word, str) for word in found):
        raise UserError(f"{where}: quantization_config: {quoted_repr(found)}, expected a list of module names")
    if len(found) > _MAX_PATTERNS:
        raise UserError(f"{where}: quantization_config: {len(found)} ignored modules, expected at most {_MAX_PATTERNS}")
    for word in found:
        if len(word) > _MAX_PATTERN_LENGTH:
            raise UserError(f"{where}: quantization_config: ignored module {word[:60]!r}, expected a shorter pattern")
    return tuple(found)
