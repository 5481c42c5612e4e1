"""`flashinfer`: FlashInfer's block-scaled product for Hopper, `fp8_blockscale_gemm_sm90`, and its mixture of experts.

It takes x in fp8 with scales, or in bf16, which it quantises in a launch of its own: what vLLM calls for up to 32 rows.
Its kernels are compiled when they are first called, by nvcc and NVRTC.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend, flashinfer_moe
from gemmpipe.backends.aten import library_violation
from gemmpipe.backends.cuda_driver import scales_for_copy_engine
from gemmpipe.backends.deepgemm_package import cuda_home
from gemmpipe.backends.packages import also_missing, not_installed
from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights

if TYPE_CHECKING:
    import torch

_BLOCK = 128
_MODULES = ("flashinfer", "tvm_ffi")
"""What it imports."""


@dataclass(frozen=True, kw_only=True)
class FlashInfer(Backend):
    """One candidate: the library chooses between a kernel and one with swapped operands."""

    label = "flashinfer"
    reads_strides = False

    def unavailable(self, device: Device) -> str | None:
        """It needs a Hopper GPU, the package, and a CUDA toolkit of version 12.8 or later for its compiler."""
        missing = next((not_installed(module) for module in _MODULES if find_spec(module) is None), None)
        if device.kind != "cuda":
            return also_missing("no NVIDIA GPU: FlashInfer has kernels for NVIDIA only", missing)
        if device.gfx != "sm_90":
            return f"FlashInfer's products for Hopper are for sm_90, not {device.gfx}"
        if missing is not None:
            return missing
        if find_spec("flashinfer_jit_cache") is None and cuda_home() is None:
            return "FlashInfer compiles its kernels: set CUDA_HOME to a CUDA toolkit of version 12.8 or later"
        return None

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The functions' own checks."""
        return self.form_violation(spec)

    def form_violation(self, spec: GemmSpec) -> str | None:
        """The functions' own checks; x in fp8 with 1x128 scales or in bf16, w in fp8 with 128x128 scales."""
        if spec.experts is not None:
            return flashinfer_moe.form_violation(spec, spec.experts)
        if problem := library_violation(spec):
            return problem
        if spec.w_dtype != "float8_e4m3fn" or spec.w_scale is None or spec.w_scale.block != (_BLOCK, _BLOCK):
            return "w: float8_e4m3fn with 128x128 scales only"
        if spec.w_scale.granularity != "block" or not (_is_quantised(spec) or _is_bf16(spec)):
            return f"x: float8_e4m3fn with 1x128 scales, or bfloat16, not {spec.x_dtype}"
        if spec.out_dtype != "bfloat16" or spec.bias or spec.batch > 1:
            return "form: bfloat16 output, no bias, one product"
        if spec.k % _BLOCK or spec.n % 64:
            return f"sizes: K={spec.k} must be a multiple of 128, N={spec.n} of 64"
        return None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The stored weights; of experts a copy of the first one in the library's order."""
        return Prepared(weights=weights) if spec.experts is None else flashinfer_moe.prepare(weights)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that writes `out`.

        It reads the scales of x by their address alone, as M-major lines of a multiple of four rows; others are copied
        within the call.
        """
        if spec.experts is not None:
            return flashinfer_moe.bind(spec, inputs, prepared, out)
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        weights, x = prepared.weights, inputs.x.contiguous()
        w, w_scale = weights.w.contiguous(), weights.w_scale
        if w_scale is None or (inputs.x_scale is None) == _is_quantised(spec):
            raise ValueError("flashinfer needs the scales of w, and of x in fp8")
        w_scale = w_scale.contiguous()
        if inputs.x_scale is None:
            return lambda: fp8_blockscale_gemm_sm90(x, w, None, w_scale, out)
        x_scale, copy_scales = scales_for_copy_engine(inputs.x_scale, whole_lines=True)

        def launch() -> "torch.Tensor":
            copy_scales()
            fp8_blockscale_gemm_sm90(x, w, x_scale, w_scale, out)
            return out

        return launch


def _is_quantised(spec: GemmSpec) -> bool:
    scaling = spec.x_scale
    return scaling is not None and scaling.block == (1, _BLOCK) and spec.x_dtype == "float8_e4m3fn"


def _is_bf16(spec: GemmSpec) -> bool:
    return spec.x_scale is None and spec.x_dtype == "bfloat16"
