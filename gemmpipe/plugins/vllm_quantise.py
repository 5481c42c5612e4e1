"""vLLM's quantisers of activations: our operators in place of two that its fusion passes put into compiled graphs.

The passes build their patterns from tables of fused operators when a model is compiled. For scales of 1 x 128 the
entries become our operators, which have the schemas of vLLM's: all that a pass or torch derives from an operator, it
derives from ours alike. vLLM's pass that removes copies of mutated operands knows neither operator by name; torch's
own does that for both.
"""

from importlib import import_module
from typing import Any

import torch

from gemmpipe.core.data import Device
from gemmpipe.plugins.quantise_operators import (
    NORM,
    OLDEST_ARCH,
    SILU,
    has_kernels,
    register_quantise_operators,
    schema_difference,
)
from gemmpipe.plugins.vllm_notice import current_config

_PASSES = "vllm.compilation.passes"
_PASS_FLAGS = {"fuse_norm_quant": "RMS norm", "fuse_act_quant": "SiLU"}
"""vLLM's switches of the passes (`pass_config`), and what is quantised with them."""
_FIX = "fix_functionalization"


def install() -> None:
    """Put our operators in place. Raises an error that says what this version of vLLM lacks."""
    norms, activations = (import_module(f"{_PASSES}.fusion.{name}_quant_fusion") for name in ("rms", "act"))
    quantised = import_module("vllm.model_executor.layers.quantization.utils.quant_utils").kFp8Dynamic128Sym
    engine = {name: getattr(torch.ops._C, name).default for name in (NORM, SILU)}
    for name, operator in engine.items():
        if difference := schema_difference(name, operator):
            raise RuntimeError(difference)
        if reason := named_by_fix_pass(name):
            raise RuntimeError(reason)
    norm_keys = [key for key, found in norms.FUSED_OPS.items() if key.quant == quantised and _is(found, NORM)]
    if not norm_keys or not _is(activations.FUSED_OPS.get(quantised), SILU):
        raise RuntimeError(f"FUSED_OPS has no {NORM} or {SILU} for {quantised}")
    register_quantise_operators(engine)
    for key in norm_keys:
        norms.FUSED_OPS[key] = getattr(torch.ops.gemmpipe, NORM).default
    activations.FUSED_OPS[quantised] = getattr(torch.ops.gemmpipe, SILU).default


def _is(operator: Any, name: str) -> bool:
    """True for vLLM's operator of this name, and for ours."""
    return any(operator is getattr(getattr(torch.ops, place), name).default for place in places(name))


def places(name: str) -> list[str]:
    """The namespaces that have an operator of this name."""
    return [place for place in ("_C", "gemmpipe") if hasattr(getattr(torch.ops, place), name)]


def named_by_fix_pass(name: str) -> str:
    """The reason if vLLM's pass against copies treats its own operator by name, and would not treat ours alike."""
    function = import_module(f"{_PASSES}.utility.{_FIX}").FixFunctionalizationPass.__call__
    named = name in _names(function)
    return f"{_FIX} treats {name} by name" if named else ""


def _names(function: Any) -> set[str]:
    """The names in a function and in what it wraps."""
    found: set[str] = set()
    while function is not None:
        found |= set(function.__code__.co_names)
        function = getattr(function, "__wrapped__", None)
    return found


def takeover(device: Device) -> tuple[str, str]:
    """(what is quantised by our kernels, or the reason why nothing is), known when the first layer is built."""
    if not has_kernels(device):
        return "", f"{device.gfx} is older than sm_{OLDEST_ARCH}" if device.kind == "cuda" else f"no GPU, {device.kind}"
    compilation = getattr(current_config(), "compilation_config", None)
    if int(getattr(compilation, "mode", None) or 0) == 0 and compilation is not None:
        return "", "nothing is compiled"
    passes = getattr(compilation, "pass_config", None)
    on = [text for flag, text in _PASS_FLAGS.items() if getattr(passes, flag, None)]
    return (" and ".join(on), "") if on else ("", f"{' and '.join(_PASS_FLAGS)} are off")
