"""`vllm_function` and `sglang_function`: an engine's own Triton function, configured by the engine itself.

Dense products by blocks, and vLLM's `fused_experts`: the engine looks up its file for this device, or takes its
default. A comparison shows what a server has without us, and a table leaves experts to the engine where it is faster.
Engines are imported at the first call, never before.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends import Backend, engine_moe
from gemmpipe.backends.engine_functions import GEMM_FUNCTIONS, product_launch, product_on_meta
from gemmpipe.backends.packages import also_missing, not_installed
from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.spec import ROW, Scaling
from gemmpipe.family import Experts, GemmSpec, Inputs, Launch, Prepared
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES
from gemmpipe.family.layouts import ROW_MAJOR

if TYPE_CHECKING:
    import torch

_BLOCKS = ((1, 128), (128, 128))
_ACTIVATIONS = ("silu", "gelu")


class _EngineFunction:
    """What both engines' backends have in common: one candidate without knobs."""

    reads_strides: ClassVar[bool] = False
    engine: ClassVar[str]

    def unavailable(self, device: Device) -> str | None:
        """It needs a GPU and the engine's package, which is not imported for this."""
        found = GEMM_FUNCTIONS[self.engine].folders() or engine_moe.folders(self.engine)
        missing = None if found else not_installed(self.engine)
        if device.kind == "cpu":
            return also_missing("no GPU: engines' Triton functions run on GPUs", missing)
        return missing

    def timed_scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """Row-major alone, as the engines' quantisers write scales for their Triton functions."""
        return (ROW,)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The rules of the product's form."""
        return self.form_violation(spec)

    def form_violation(self, spec: GemmSpec) -> str | None:
        """One product of fp8 by blocks into 16 bits; vLLM's experts in 16 bits and in fp8."""
        if spec.experts is not None:
            return self._experts_violation(spec, spec.experts)
        if (
            spec.x_dtype not in FP8_DTYPES
            or spec.w_dtype not in FP8_DTYPES
            or not _by_blocks(spec.x_scale, spec.w_scale)
        ):
            return "scales: expected fp8 with scales of 1x128 and 128x128"
        if spec.out_dtype not in DTYPES_16BIT or spec.batch > 1 or spec.bias or spec.w_layout != ROW_MAJOR:
            return "form: one product into 16 bits, no bias, w in rows"
        return None

    def _experts_violation(self, spec: GemmSpec, experts: Experts) -> str | None:
        if self.engine != "vllm":
            return engine_moe.unavailable_reason(self.engine)
        if not experts.gated or experts.activation not in _ACTIVATIONS or spec.w_layout != ROW_MAJOR or spec.bias:
            return f"form: gated experts with {' or '.join(_ACTIVATIONS)}, weights in rows, no bias"
        if spec.w_scale is None:
            return None if spec.w_dtype in DTYPES_16BIT else f"types: 16 bits or fp8, not {spec.w_dtype}"
        if spec.w_dtype not in FP8_DTYPES or spec.w_scale.granularity not in ("block", "row"):
            return "scales: expected fp8 with scales by row or of 128x128"
        group = spec.w_scale.block[1] if spec.w_scale.granularity == "block" else 1
        if spec.k % group or experts.inner % group:
            return f"quantiser: whole groups of {group}, not {spec.k} and {experts.inner}"
        return None

    def compiles_when_called(self, spec: GemmSpec, knobs: Knobs) -> bool:
        """True for a product; vLLM's experts look up their configuration in the launch."""
        return spec.experts is None

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """The function on operands without memory. Raises ValueError for other operands than a product's by blocks."""
        product_on_meta(GEMM_FUNCTIONS[self.engine], spec, None)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that returns an output of the engine's. Raises RuntimeError if the engine cannot be imported."""
        weights = prepared.weights
        if spec.experts is not None:
            return engine_moe.launch(self.engine, spec, {}, inputs, weights)
        return product_launch(GEMM_FUNCTIONS[self.engine], spec, inputs, weights, out.dtype, None)


def _by_blocks(x_scale: Scaling | None, w_scale: Scaling | None) -> bool:
    blocks = tuple(s.block for s in (x_scale, w_scale) if s is not None and s.granularity == "block")
    return blocks == _BLOCKS


@dataclass(frozen=True, kw_only=True)
class VllmFunction(_EngineFunction, Backend):
    """`w8a8_triton_block_scaled_mm`, and `fused_experts`."""

    label = "vllm_function"
    engine = "vllm"


@dataclass(frozen=True, kw_only=True)
class SglangFunction(_EngineFunction, Backend):
    """`w8a8_block_fp8_matmul_triton`; its experts run inside a server only."""

    label = "sglang_function"
    engine = "sglang"
