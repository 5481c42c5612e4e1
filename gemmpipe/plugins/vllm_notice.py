"""Reports of the plug-in in a vLLM process: the start line, layers that are left to the engine, the user's backends."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from gemmpipe.core.data import Device
from gemmpipe.core.errors import one_line
from gemmpipe.launch.replays import no_dependent_launch_reason
from gemmpipe.plugins.quantise_operators import OLDEST_ARCH, has_kernels
from gemmpipe.plugins.scope import (
    BF16,
    EXPERTS,
    FP8_BLOCKS,
    FP8_ROWS,
    GRAPHS,
    LINEAR,
    MOE,
    QUANTISE,
    REPLAYS,
    Scope,
    Takeover,
    start_line,
)
from gemmpipe.plugins.tuned_products import no_rows_reason, rows_text
from gemmpipe.runtime.cache import process_device

_LOG = logging.getLogger("vllm.gemmpipe")
PRODUCTS: Mapping[str, tuple[str, str]] = {
    BF16: (LINEAR, "a16w16"),
    FP8_BLOCKS: (LINEAR, "a8w8_blockscale"),
    FP8_ROWS: (LINEAR, "a8w8"),
    EXPERTS: (MOE, "fmoe"),
}
"""The products of vLLM's layers: name -> (kind in the scope, family)."""
QUANTISERS = "quantisers"
PASS_FLAGS = {"fuse_norm_quant": "RMS norm", "fuse_act_quant": "SiLU"}
"""vLLM's switches (`pass_config`) of the passes that fuse quantisers, and with what."""


def current_config() -> Any:
    """vLLM's configuration while it builds or loads a model; None at other times."""
    return import_module("vllm.config").get_current_vllm_config_or_none()


def forced_linear_backend(quantization: str = "") -> str:
    """The user's own choice of a linear backend, as `linear_backend=cutlass`; empty if vLLM chooses.

    `quantization`: vLLM's name of a scheme, which may have a choice of its own (`fp8_w8a8`, `fp8_block_w8a8`).
    """
    settings = getattr(current_config(), "kernel_config", None)
    per_scheme = getattr(settings, "linear_backend_per_quant", None) or {}
    if quantization and per_scheme.get(quantization):
        return f"linear_backend_per_quant={quantization}:{per_scheme[quantization]}"
    backend = getattr(settings, "linear_backend", "auto")
    return "" if backend == "auto" else f"linear_backend={backend}"


def fused_communication() -> str:
    """The reason if vLLM fuses its own products with communication, which it finds by their operators."""
    compilation = getattr(current_config(), "compilation_config", None)
    passes = getattr(compilation, "pass_config", None)
    return "fuse_gemm_comms looks for the engine's operators" if getattr(passes, "fuse_gemm_comms", False) else ""


def forced_moe_backend() -> str:
    """The user's own choice of a backend for experts; empty if vLLM chooses."""
    backend = getattr(getattr(current_config(), "kernel_config", None), "moe_backend", "auto")
    return "" if backend == "auto" else f"moe_backend={backend}"


def fused_quantisers(device: Device) -> tuple[str, str]:
    """(what our quantisers are fused with, ""), or ("", the reason why none is in the compiled graphs)."""
    if not has_kernels(device):
        return "", f"{device.gfx} is older than sm_{OLDEST_ARCH}" if device.kind == "cuda" else f"no GPU, {device.kind}"
    compilation = getattr(current_config(), "compilation_config", None)
    if compilation is None:  # one of them is called
        return " and ".join(PASS_FLAGS.values()), ""
    if not getattr(compilation, "mode", None):
        return "", "nothing is compiled"
    passes = getattr(compilation, "pass_config", None)
    on = [text for flag, text in PASS_FLAGS.items() if getattr(passes, flag, None)]
    return (" and ".join(on), "") if on else ("", f"{' and '.join(PASS_FLAGS)} are off")


@dataclass(kw_only=True)
class Notice:
    """The state of the plug-in in this process; `reasons` has the kinds that are not installed."""

    engine: str = "vLLM"
    scope: Scope = field(default_factory=lambda: Scope(variable="", kinds=()))
    reasons: dict[str, str] = field(default_factory=dict)
    moe_backend: str = ""
    """The user's choice of a backend for experts, known once a layer is built."""
    _announced: bool = False
    _left: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, engine: str, scope: Scope) -> None:
        """A new process of the engine."""
        self.engine, self.scope, self.moe_backend = engine, scope, ""
        self.reasons.clear()
        self._left.clear()
        self._announced = False

    def attempt(self, kind: str, module: str, function: str = "install") -> bool:
        """Call a module's function if the scope has the kind; a failure is the kind's reason."""
        reason = self.scope.reason(kind)
        if not reason:
            try:
                install: Callable[[], None] = getattr(import_module(module), function)
                install()
            except Exception as error:  # noqa: BLE001 - another version of vLLM: its own kernels stay
                reason = f"{kind}: {one_line(error)}"
                _LOG.warning("gemmpipe: left to the engine: %s", reason)
        if reason:
            self.reasons[kind] = reason
        return not reason

    def announce(self) -> None:
        """The start line, once per process and node: when the first layer is built, or activations are quantised."""
        with self._lock:
            if self._announced:
                return
            self._announced = True
        self.moe_backend = forced_moe_backend()
        device = process_device()
        takeovers = [*(self._takeover(name, device) for name in PRODUCTS), self._quantisers(device)]
        takeovers.append(Takeover(name=GRAPHS, reason=self.reasons.get(REPLAYS) or no_dependent_launch_reason(device)))
        if _is_first_of_node():
            _LOG.info("%s", start_line(self.engine, device.name, takeovers, self.scope.errors))

    def leave(self, product: str, reason: str) -> None:
        """Log once why a layer that has rows is left to the engine."""
        text = f"{product}: {reason}"
        if text in self._left:
            return
        self._left.add(text)
        if _is_first_of_node():
            _LOG.info("gemmpipe: left to the engine: %s", text)

    def _takeover(self, name: str, device: Device) -> Takeover:
        kind, family = PRODUCTS[name]
        reason = self.reasons.get(kind) or (forced_linear_backend() or fused_communication() if kind == LINEAR else "")
        if kind == MOE and not reason:
            reason = self.moe_backend
        text = "" if reason else rows_text(family, device)
        return Takeover(name=name, detail=text, reason=reason or ("" if text else no_rows_reason(device)))

    def _quantisers(self, device: Device) -> Takeover:
        detail, reason = fused_quantisers(device)
        return Takeover(name=QUANTISERS, detail=detail, reason=self.reasons.get(QUANTISE) or reason)


def _is_first_of_node() -> bool:
    """True in the worker that logs for its node; True if that is unknown."""
    try:
        return bool(import_module("vllm.distributed.parallel_state").is_local_first_rank())
    except Exception:  # noqa: BLE001 - only decides who logs
        return True


NOTICE = Notice()
