"""Reports of the plug-in in an SGLang process: the start line, the server's settings, products that are left alone."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

import torch

from gemmpipe.core.data import Device
from gemmpipe.core.errors import one_line
from gemmpipe.launch.replays import no_dependent_launch_reason
from gemmpipe.plugins.scope import EXPERTS, FP8_BLOCKS, GRAPHS, REPLAYS, Scope, Takeover, start_line
from gemmpipe.plugins.sglang import FAMILIES
from gemmpipe.plugins.tuned_products import no_rows_reason, rows_text
from gemmpipe.runtime.cache import process_device

_LOG = logging.getLogger("gemmpipe.sglang")


def setting(path: str) -> object:
    """A resolved setting of the server, as `deterministic.enable_deterministic_inference`; None if there is none."""
    try:
        found = import_module("sglang.srt.runtime_context").get_exec()
        for name in path.split("."):
            found = getattr(found, name)
    except Exception:  # noqa: BLE001 - SGLang raises various errors before its settings are published
        return None
    return found


def settings_reason(product: str) -> str:
    """Why the server's settings leave a kind of product to the engine; empty if rows may answer."""
    if setting("deterministic.enable_deterministic_inference"):
        return "deterministic inference, and the kernel of a row depends on M"
    if product == FP8_BLOCKS:
        backend = setting("kernel.fp8_gemm_runner_backend")
        return "" if backend in (None, "auto") else f"--fp8-gemm-backend {backend}"
    return experts_padding_reason() if product == EXPERTS else ""


def experts_padding_reason() -> str:
    """Experts -1 mark padding tokens where SGLang counts real tokens: tuned kernels do not read such experts."""
    try:
        info = import_module("sglang.srt.model_executor.forward_batch_info")
        if info.enable_num_token_non_padded():
            return "padding tokens have no experts (expert parallelism or data-parallel attention)"
    except Exception as error:  # noqa: BLE001 - unknown: the engine's experts are safe
        return f"padding tokens are not known: {one_line(error)}"
    backend = setting("graph.cuda_graph_config.prefill.backend")
    return "padding tokens have no experts (full prefill graphs)" if str(backend).endswith("full") else ""


@dataclass(kw_only=True)
class SglangNotice:
    """The state of the plug-in in this process."""

    engine: str = "SGLang"
    scope: Scope = field(default_factory=lambda: Scope(variable="", kinds=()))
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a kind of product is left to the engine; empty texts for those that are taken over."""
    _announced: bool = False
    _left: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, engine: str, scope: Scope, reasons: Mapping[str, str]) -> None:
        """A new process of the engine."""
        self.engine, self.scope, self.reasons = engine, scope, dict(reasons)
        self._announced = False
        self._left.clear()

    def allows(self, product: str) -> bool:
        """True if rows may answer for this kind of product; the first call writes the start line."""
        if not self._announced:
            self.announce()
        return not self.reasons.get(product, "not started")

    def announce(self) -> None:
        """Read the server's settings and write the start line, once, on the first rank."""
        with self._lock:
            if self._announced:
                return
            self._announced = True
            device = process_device()
            takeovers = [self._takeover(product, device) for product in FAMILIES]
            takeovers.append(
                Takeover(name=GRAPHS, reason=self.scope.reason(REPLAYS) or no_dependent_launch_reason(device))
            )
        line = start_line(self.engine, device.name, takeovers, self.scope.errors)
        _LOG.log(logging.INFO if _is_first_rank() else logging.DEBUG, "%s", line)

    def leave(self, product: str, reason: str) -> None:
        """A layer is left to the engine for a reason that is logged once."""
        with self._lock:
            new = f"{product} {reason}" not in self._left
            self._left.add(f"{product} {reason}")
        if new:
            _LOG.info("gemmpipe: %s: left to the engine: %s", product, reason)

    def _takeover(self, product: str, device: Device) -> Takeover:
        reason = self.reasons.get(product) or settings_reason(product)
        text = rows_text(FAMILIES[product], device) if not reason else ""
        if not reason and not text:
            reason = no_rows_reason(device)
        self.reasons[product] = reason
        return Takeover(name=product, detail=text, reason=reason)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


SGLANG_NOTICE = SglangNotice()
"""The process's state."""
