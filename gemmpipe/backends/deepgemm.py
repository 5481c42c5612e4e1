"""`deepgemm`: DeepSeek's fp8 block-scaled kernels for Hopper and Blackwell, where the package is installed."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.scaled_mm import scaled_mm_violation
from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeepGemm(Backend):
    """One candidate: the library selects its configuration (`deep_gemm.fp8_gemm_nt`)."""

    label = "deepgemm"

    def unavailable(self, device: Device) -> str | None:
        """It needs an NVIDIA GPU and the package `deep_gemm`."""
        if device.kind != "cuda":
            return "no NVIDIA GPU: DeepGEMM has kernels for NVIDIA only"
        return None if find_spec("deep_gemm") else "the package deep_gemm is not installed"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """1x128 by 128x128 scales and bf16 output; any M."""
        from dataclasses import replace

        if spec.x_scale is None or spec.x_scale.granularity != "block":
            return "scales: 1x128 x 128x128 only"
        if spec.out_dtype != "bfloat16":
            return f"output: bfloat16 only, not {spec.out_dtype}"
        return scaled_mm_violation(replace(spec, m=4), device)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """Scales of x in any order: the library copies those that are not M-major and padded within its call."""
        import deep_gemm

        weights = prepared.weights
        x = (inputs.x, inputs.x_scale)
        w = (weights.w, weights.w_scale)

        def launch() -> "torch.Tensor":
            deep_gemm.fp8_gemm_nt(x, w, out)
            return out

        return launch
