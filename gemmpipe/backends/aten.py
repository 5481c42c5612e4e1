"""`torch`: ATen's matrix product, on 16-bit operands as they are and on others through a dequantised weight."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.data import Device, Knobs
from gemmpipe.errors import nearest
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Scaling, Weights

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

METHODS = {
    "mm": "the operands as they are stored",
    "bfloat16_copy": "a dequantised bf16 weight, kept",
    "bfloat16_convert": "the weight dequantised to bf16 in each call",
    "float32_copy": "an fp32 weight, kept",
    "float32_convert": "the weight converted to fp32 in each call",
}


@dataclass(frozen=True, kw_only=True)
class Torch(Backend):
    """Candidates by one knob, `method` (see METHODS)."""

    label = "torch"

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every method; those that cannot compute this product are unfit."""
        return tuple({"method": method} for method in METHODS)

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` a rule."""
        method = str(knobs["method"])
        if method not in METHODS:
            return f"method: no '{method}'{nearest(method, METHODS)}"
        if problem := unsupported(spec):
            return problem
        if method == "mm" and is_scaled(spec):
            return "scaled operands: ATen multiplies them only after dequantising"
        if method == "mm" and not _can_write(spec, device):
            return f"output type: this product of {spec.x_dtype} is not written as {spec.out_dtype} here"
        if method.startswith("bfloat16") and not is_scaled(spec):
            return "16-bit operands: they need no bf16 copy"
        # On a GPU the tensor cores take bf16; fp32 pays where 16-bit products are slow: up to 7x on a CPU.
        if method.startswith("float32") and device.kind != "cpu":
            return "fp32 on a GPU: an order slower than 16 bits"
        return None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The dequantised copy where the method keeps one; all its bytes are beside the stored weight."""
        if not str(knobs["method"]).endswith("_copy"):
            return Prepared(weights=weights)
        copy = dequantised(weights, spec.w_scale, str(knobs["method"]).split("_")[0])
        return Prepared(weights=weights, extra=copy, extra_bytes=copy.numel() * copy.element_size())

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that multiplies into `out`, dequantising the activations each time as an engine would."""
        import torch

        from gemmpipe.reference import dequantise

        method, bias = str(knobs["method"]), prepared.weights.bias
        if method == "mm":
            return _plain(inputs.x, prepared.weights.w.t(), bias, out)
        compute = getattr(torch, method.split("_")[0])
        kept = prepared.extra
        added = None if bias is None else bias.to(compute)

        def launch() -> "torch.Tensor":
            x = dequantise(inputs.x, inputs.x_scale, spec.x_scale, compute)
            w = (
                kept
                if isinstance(kept, torch.Tensor)
                else dequantised(prepared.weights, spec.w_scale, str(compute)[6:])
            )
            if out.dtype == compute:
                return _multiply(x, w.t(), added, out)
            return out.copy_(torch.nn.functional.linear(x, w, added))

        return launch


def dequantised(weights: Weights, scaling: Scaling | None, dtype: str) -> "torch.Tensor":
    """The weight [N, K] times its scales in `dtype`."""
    import torch

    from gemmpipe.reference import dequantise

    return dequantise(weights.w, weights.w_scale, scaling, getattr(torch, dtype))


def is_scaled(spec: GemmSpec) -> bool:
    """Whether an operand carries scales or is no float that ATen multiplies."""
    return spec.x_scale is not None or spec.w_scale is not None


def unsupported(spec: GemmSpec) -> str | None:
    """Why no library path through row-major [N, K] weights computes this product, or None."""
    if spec.w_layout != "nk":
        return f"weight layout: '{spec.w_layout}' is another kernel's"
    if spec.batch != 1:
        return "batch: one product at a time"
    if "float4" in spec.w_dtype or "float4" in spec.x_dtype:
        return f"packed operands: {spec.w_dtype} is not dequantised here"
    return None


def _can_write(spec: GemmSpec, device: Device) -> bool:
    """torch.mm writes its operands' type, and on a GPU also fp32 (torch.mm's out_dtype)."""
    if spec.out_dtype == spec.x_dtype == spec.w_dtype:
        return True
    return device.kind == "cuda" and spec.out_dtype == "float32" and spec.x_dtype == spec.w_dtype


def _plain(x: "torch.Tensor", w_t: "torch.Tensor", bias: "torch.Tensor | None", out: "torch.Tensor") -> Launch:
    import torch

    if out.dtype == x.dtype:
        return lambda: _multiply(x, w_t, bias, out)

    def widened() -> "torch.Tensor":
        torch.mm(x, w_t, out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)

    return widened


def _multiply(
    x: "torch.Tensor", w_t: "torch.Tensor", bias: "torch.Tensor | None", out: "torch.Tensor"
) -> "torch.Tensor":
    import torch

    return torch.mm(x, w_t, out=out) if bias is None else torch.addmm(bias, x, w_t, out=out)
