"""vLLM's quantisers of activations: our operators in place of those that its fusion passes put into compiled graphs.

The passes build their patterns from tables of fused operators when a model is compiled. For scales of 1 x 128 the
entries become our operators, which have the schemas of vLLM's: all that a pass or torch derives from an operator, it
derives from ours alike. vLLM's pass that removes copies of mutated operands knows neither operator by name; torch's
own does that for both, but for a residual that is an input of the graph, which it copies: vLLM compiles a graph per
layer, and each would have one kernel more. After vLLM's pass a norm with a residual therefore writes the sum to a
tensor of its own. Quantisers with which nothing was fused become ours after all passes. Where vLLM's kernel takes
activations in 16 bits (FlashInfer's with DeepGEMM), no graph shows the quantiser: the function that it calls becomes
ours.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from gemmpipe.core.errors import one_line
from gemmpipe.plugins.quantise_operators import (
    GROUPS,
    NORM,
    NORM_OUT,
    SCHEMAS,
    SILU,
    quantise_groups,
    register_quantise_operators,
)
from gemmpipe.plugins.vllm_notice import NOTICE, PASS_FLAGS
from gemmpipe.templates.fused_quantise import GROUP

_LOG = logging.getLogger("vllm.gemmpipe")
_PASSES = "vllm.compilation.passes"
_FIX = "fix_functionalization"
_REWRITTEN = "gemmpipe_rewritten"
_CALLER, _CALLED = "vllm.model_executor.kernels.linear.scaled_mm.flashinfer", "per_token_group_quant_fp8"
"""vLLM's module with the kernel that quantises itself, and the function that it calls."""
_EAGER = "eager_input_vals"
"""torch's note at a node: its operands before compilation."""


def install() -> None:
    """Put our operators in place. Raises an error that names what this version of vLLM lacks."""
    norms, activations = (import_module(f"{_PASSES}.fusion.{name}_quant_fusion") for name in ("rms", "act"))
    quantised = import_module("vllm.model_executor.layers.quantization.utils.quant_utils").kFp8Dynamic128Sym
    engine = {name: getattr(torch.ops._C, name).default for name in (NORM, SILU)}
    for name, operator in engine.items():
        if difference := schema_difference(name, operator):
            raise RuntimeError(difference)
        if reason := _named_by_fix_pass(name):
            raise RuntimeError(reason)
    norm_keys = [key for key, found in norms.FUSED_OPS.items() if key.quant == quantised and _is(found, NORM)]
    if not norm_keys or not _is(activations.FUSED_OPS.get(quantised), SILU):
        raise RuntimeError(f"FUSED_OPS has no {NORM} or {SILU} for {quantised}")
    alone = getattr(torch.ops._C, GROUPS).default if hasattr(torch.ops._C, GROUPS) else None
    if alone is not None and not schema_difference(GROUPS, alone) and not _named_by_fix_pass(GROUPS):
        engine[GROUPS] = alone
    register_quantise_operators(engine, NOTICE.announce)
    for key in norm_keys:
        norms.FUSED_OPS[key] = getattr(torch.ops.gemmpipe, NORM).default
    _extend(norms.RMSNormQuantFusionPass, residuals_apart, first=False)
    if GROUPS in engine:
        _extend(_fix_pass(), quantisers_alone, first=True)
        with suppress(ImportError):
            replace_called(import_module(_CALLER))
    activations.FUSED_OPS[quantised] = getattr(torch.ops.gemmpipe, SILU).default


def _extend(fusion: Any, rewrite: Callable[[torch.fx.Graph], object], *, first: bool) -> None:
    """Let `rewrite` come before or after a pass of vLLM where quantisers are fused; a second call does nothing."""
    call = fusion.__call__
    if hasattr(call, _REWRITTEN):
        return

    @wraps(call)
    def extended(self: Any, graph: torch.fx.Graph) -> None:
        if not first:
            call(self, graph)
        passes = getattr(self, "pass_config", None)
        try:
            if any(getattr(passes, flag, None) for flag in PASS_FLAGS):
                rewrite(graph)
        except Exception as error:  # noqa: BLE001 - the graph is right without it
            _LOG.warning("gemmpipe: left to the engine: %s: %s", rewrite.__name__, one_line(error))
        if first:
            call(self, graph)

    setattr(extended, _REWRITTEN, True)
    fusion.__call__ = extended


def replace_called(module: Any) -> None:
    """Let a module of vLLM call our quantiser by the name of vLLM's; a second call does nothing."""
    engine: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = getattr(module, _CALLED, None)
    if engine is None or hasattr(engine, _REWRITTEN):
        return

    @wraps(engine)
    def quantise(x: torch.Tensor, group_size: int, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        by_columns, power_of_two = named.get("column_major_scales"), named.get("use_ue8m0")
        covered = not rest and named.keys() == {"column_major_scales", "use_ue8m0"} and power_of_two is not None
        if not covered or x.dim() != 2 or not x.is_contiguous() or torch.compiler.is_compiling():
            return engine(x, group_size, *rest, **named)
        return quantise_groups(x, group_size, by_columns=bool(by_columns), power_of_two=bool(power_of_two))

    setattr(quantise, _REWRITTEN, True)
    setattr(module, _CALLED, quantise)


def quantisers_alone(graph: torch.fx.Graph) -> int:
    """Replace vLLM's quantiser with scales of 1 x 128 by ours; returns how many. Both have one schema."""
    theirs, ours = (getattr(getattr(torch.ops, place), GROUPS).default for place in ("_C", "gemmpipe"))
    count = 0
    for node in graph.find_nodes(op="call_function", target=auto_functionalized):
        if node.args[0] is theirs and node.kwargs["group_size"] == GROUP:
            node.args = (ours,)
            count += 1
    return count


def residuals_apart(graph: torch.fx.Graph) -> int:
    """Replace our norms with a residual by those that write the sum to a new tensor; returns how many.

    Results have the same places: what is written has the same order in both schemas.
    """
    inplace, apart = (getattr(torch.ops.gemmpipe, name).default for name in (NORM, NORM_OUT))
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=auto_functionalized)
        if node.args[0] is inplace and node.kwargs["residual"] is not None
    ]
    for node in found:
        residual: Any = node.kwargs["residual"]
        with graph.inserting_before(node):
            total = graph.call_function(torch.ops.aten.empty_like.default, (residual,))
            total.meta["val"] = _like(residual.meta["val"])
            made = graph.call_function(auto_functionalized, (apart,), {**node.kwargs, "total": total})
        made.meta.update(node.meta)
        if _EAGER in node.meta:
            _, given = node.meta[_EAGER]
            made.meta[_EAGER] = (apart,), {**given, "total": _like(given["residual"])}
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return len(found)


def _like(value: Any) -> Any:
    """A fake tensor of the same form, with a storage of its own: torch compares storages to find copies."""
    with value.fake_mode:
        return torch.empty_like(value)


def schema_difference(name: str, operator: Any) -> str:
    """How the schema of vLLM's operator differs from ours; empty if a call fits both."""
    ours = torch._C.parse_schema(f"gemmpipe::{name}{SCHEMAS[name]}")
    for mine, theirs in zip(ours.arguments, operator._schema.arguments, strict=False):
        if _described(mine) != _described(theirs):
            return f"{name}: argument {_described(theirs)}, expected {_described(mine)}"
    counts = len(operator._schema.arguments), len(ours.arguments)
    return "" if counts[0] == counts[1] else f"{name}: {counts[0]} arguments, expected {counts[1]}"


def _described(argument: Any) -> str:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return f"{argument.type}{' (written)' if written else ''} {argument.name}"


def _is(operator: Any, name: str) -> bool:
    """True for vLLM's operator of this name, and for ours."""
    return any(operator is getattr(getattr(torch.ops, place), name).default for place in _places(name))


def _places(name: str) -> list[str]:
    """The namespaces that have an operator of this name."""
    return [place for place in ("_C", "gemmpipe") if hasattr(getattr(torch.ops, place), name)]


def _named_by_fix_pass(name: str) -> str:
    """The reason if vLLM's pass against copies treats its own operator by name, and would not treat ours alike."""
    function = _fix_pass().__call__
    named = name in _names(function)
    return f"{_FIX} treats {name} by name" if named else ""


def _fix_pass() -> Any:
    """vLLM's last pass."""
    return import_module(f"{_PASSES}.utility.{_FIX}").FixFunctionalizationPass


def _names(function: Any) -> set[str]:
    """The names in a function and in what it wraps."""
    found: set[str] = set()
    while function is not None:
        found |= set(function.__code__.co_names)
        function = getattr(function, "__wrapped__", None)
    return found
