"""SGLang's plug-in, found by the entry point `sglang.srt.plugins`: tuned rows in its linear layers and experts.

`register` runs in every process of SGLang, early. It registers hooks only in processes that run a model: SGLang
resolves a hook's target when plug-ins are loaded, and importing layers elsewhere would initialise CUDA there. A hook
has the original function as its first argument, and calls it for everything that no tuned row answers.
"""

import inspect
import logging
import multiprocessing
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from gemmpipe.core.errors import one_line
from gemmpipe.plugins.scope import (
    BF16,
    EXPERTS,
    FP8_BLOCKS,
    FP8_ROWS,
    LINEAR,
    MOE,
    REPLAYS,
    Scope,
    inactive_line,
    read_scope,
    replays_line,
)

VARIABLE = "GEMMPIPE_SGLANG"
"""The environment variable with the scope: `linear`, `moe`, `replays`, or `off`."""
OLDEST, NEWEST = (0, 5, 20), (0, 5, 23)
"""The supported versions of SGLang."""
_MODEL_PROCESS = "sglang.srt.managers.scheduler"
"""The module of a process that runs a model."""
_LOG = logging.getLogger("gemmpipe.sglang")
_DONE: list[bool] = []


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A function of SGLang that is called through ours."""

    product: str
    """The kind of product in words: `linear bf16`."""
    kind: str
    """The kind in the scope."""
    target: str
    """The dotted path of SGLang's function or method."""
    parameters: tuple[str, ...]
    """The names of its first parameters, by which the hook reads its arguments."""
    module: str
    """Our module with the hook."""
    function: str
    """The hook: (SGLang's function, its arguments) -> its result."""


_LAYERS = "sglang.srt.layers"
HOOKS = (
    Hook(
        product=BF16,
        kind=LINEAR,
        target=f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply",
        parameters=("self", "layer", "x", "bias"),
        module="gemmpipe.plugins.sglang_linear",
        function="around_unquantised",
    ),
    Hook(
        product=FP8_BLOCKS,
        kind=LINEAR,
        target=f"{_LAYERS}.quantization.fp8.Fp8LinearMethod.apply",
        parameters=("self", "layer", "x", "bias"),
        module="gemmpipe.plugins.sglang_linear",
        function="around_fp8",
    ),
    Hook(
        product=FP8_ROWS,
        kind=LINEAR,
        target=f"{_LAYERS}.quantization.fp8_utils.apply_fp8_linear",
        parameters=("input", "weight", "weight_scale", "input_scale", "input_scale_ub", "bias"),
        module="gemmpipe.plugins.sglang_linear",
        function="around_fp8_rows",
    ),
    Hook(
        product=EXPERTS,
        kind=MOE,
        target=f"{_LAYERS}.moe.moe_runner.triton_utils.fused_moe.fused_experts",
        parameters=("hidden_states", "w1", "w2", "topk_output", "moe_runner_config", "b1", "b2"),
        module="gemmpipe.plugins.sglang_experts",
        function="around_experts",
    ),
)
"""SGLang's functions: 0.5.20 to 0.5.23."""
FAMILIES: Mapping[str, str] = {
    BF16: "a16w16",
    FP8_BLOCKS: "a8w8_blockscale",
    FP8_ROWS: "a8w8",
    EXPERTS: "fmoe",
}
"""The family of each kind of product."""


def register() -> None:
    """The entry point: register the hooks once per process. It raises nothing: a failure is one warning."""
    if _DONE:
        return
    _DONE.append(True)
    try:
        reason = set_up()
    except Exception as error:  # noqa: BLE001 - the plug-in must not stop an engine
        _LOG.warning("%s", inactive_line("SGLang", f"set-up failed: {one_line(error)}"))
        return
    if reason:
        _LOG.info("%s", reason)


def set_up() -> str:
    """Register what the scope allows; returns the line with the reason if nothing is registered."""
    scope, version = read_scope(VARIABLE, (REPLAYS,)), metadata.version("sglang")
    engine = f"SGLang {version}"
    if not runs_model():
        return ""
    if reason := inactive_reason(scope, version):
        return inactive_line(engine, reason, scope.errors)
    from gemmpipe.launch.replays import shorten_replays
    from gemmpipe.plugins.operators import register_plugin_operators
    from gemmpipe.plugins.sglang_notice import SGLANG_NOTICE

    registry = import_module("sglang.srt.plugins.hook_registry")
    register_plugin_operators()
    reasons = {hook.product: scope.reason(hook.kind) or contract_reason(hook) for hook in HOOKS}
    SGLANG_NOTICE.start(engine, scope, reasons)
    for hook in HOOKS:
        if not reasons[hook.product]:
            registry.HookRegistry.register(hook.target, hook_function(hook), registry.HookType.AROUND)
    if REPLAYS in scope.kinds:
        shorten_replays()
    if all(reasons.values()):
        if REPLAYS in scope.kinds:
            return replays_line(engine, reasons, scope.errors)
        return inactive_line(engine, "; ".join(dict.fromkeys(reasons.values())), scope.errors)
    return ""


def runs_model() -> bool:
    """True in a process that SGLang started to run a model."""
    return multiprocessing.parent_process() is not None and _MODEL_PROCESS in sys.modules


def inactive_reason(scope: Scope, version: str) -> str:
    """Why the plug-in does nothing; empty if it may register hooks."""
    import torch

    if scope.off:
        return scope.reason(LINEAR)
    if reason := unsupported_sglang(version):
        return reason
    return "" if torch.version.cuda else "torch is not built for CUDA"


def unsupported_sglang(version: str) -> str:
    """The reason if this version of SGLang is not supported; empty if it is."""
    expected = f"expected {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return f"version '{version}' is unknown, {expected}"
    if not OLDEST <= (int(found[1]), int(found[2]), int(found[3])) <= NEWEST:
        return f"version {version} is not supported, {expected}"
    return ""


def contract_reason(hook: Hook) -> str:
    """Why a target is left alone: it is missing, or has other parameters than the hook reads."""
    try:
        target = resolve(hook.target)
    except Exception as error:  # noqa: BLE001 - importing layers runs much of SGLang
        return f"{hook.target}: {one_line(error)}"
    found = tuple(inspect.signature(target).parameters)
    if found[: len(hook.parameters)] != hook.parameters:
        return f"{hook.target.rpartition('.')[2]} has the parameters {', '.join(found)}"
    return ""


def resolve(target: str) -> Callable[..., Any]:
    """The function of a dotted path. Raises ImportError, AttributeError."""
    import pkgutil

    found: Callable[..., Any] = pkgutil.resolve_name(target)
    return found


def hook_function(hook: Hook) -> Callable[..., Any]:
    """Our function for a target."""
    found: Callable[..., Any] = getattr(import_module(hook.module), hook.function)
    return found
