"""`torch`: ATen's matrix products of 16-bit and int8 operands as stored, of others through a dequantised weight."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend, torch_moe
from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.core.errors import suggest_or_list
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.family.layouts import ROW_MAJOR

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

METHODS = {
    "mm": "the operands as they are stored",
    "int_mm": "int8 operands as they are stored, multiplied in int32, then the scales",
    "bfloat16_copy": "a dequantised bf16 weight, kept",
    "bfloat16_convert": "the weight dequantised to bf16 in each call",
    "float32_copy": "an fp32 weight, kept",
    "float32_convert": "the weight converted to fp32 in each call",
}


@dataclass(frozen=True, kw_only=True)
class Torch(Backend):
    """Candidates by one knob, `method` (see METHODS, and torch_moe.METHODS for experts)."""

    label = "torch"

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every method; `unsupported_reason` rejects those that cannot compute this product."""
        return tuple({"method": method} for method in (torch_moe.METHODS if spec.experts else METHODS))

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row of aiter's: the operands as they are stored."""
        return None if spec.experts else {"method": "mm"}

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` per rule."""
        method = str(knobs["method"])
        if spec.experts is not None:
            return torch_moe.unsupported_reason(spec, spec.experts, method, device)
        if method not in METHODS:
            return f"method: no '{method}'{suggest_or_list(method, METHODS)}"
        if method == "int_mm":
            return _int_mm_violation(spec, device)
        if method == "mm" and spec.w_layout != ROW_MAJOR:
            return f"weight layout: ATen reads row-major weights, not '{spec.w_layout}'"
        if method == "mm" and is_scaled(spec):
            return "scaled operands: ATen multiplies them only after dequantising"
        if method == "mm" and not _can_write(spec, device):
            return f"output type: this product of {spec.x_dtype} is not written as {spec.out_dtype} here"
        if method.startswith("bfloat16") and not is_scaled(spec) and spec.w_layout == ROW_MAJOR:
            return "16-bit operands: they need no bf16 copy"
        # On a GPU the tensor cores take bf16; fp32 pays off where 16-bit products are slow: up to 7x on a CPU.
        if method.startswith("float32") and device.kind != "cpu":
            return "fp32 on a GPU: about 10 times slower than 16 bits"
        return None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The dequantised copy if the method keeps one; all its bytes are in addition to the stored weight."""
        if spec.experts is not None:
            return torch_moe.prepare(spec, weights, str(knobs["method"]))
        if not str(knobs["method"]).endswith("_copy"):
            return Prepared(weights=weights)
        from gemmpipe.family.operands import torch_dtype
        from gemmpipe.family.reference import dequantise_weight

        copy = dequantise_weight(spec, weights, torch_dtype(str(knobs["method"]).split("_")[0]))
        return Prepared(weights=weights, extra=copy, extra_bytes=copy.numel() * copy.element_size())

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that writes `out`, dequantising the activations each time as an engine would."""
        import torch

        from gemmpipe.family.reference import dequantise, dequantise_weight

        method, bias = str(knobs["method"]), prepared.weights.bias
        if spec.experts is not None:
            return torch_moe.bind(spec, spec.experts, method, inputs, prepared, out)
        if method == "mm":
            return _launch_mm(inputs.x, prepared.weights.w.mT, bias, out)
        if method == "int_mm":
            return _launch_int_mm(inputs, prepared.weights, out)
        compute = getattr(torch, method.split("_")[0])
        kept = prepared.extra
        added = None if bias is None else bias.to(compute)

        def launch() -> "torch.Tensor":
            x = dequantise(inputs.x, inputs.x_scale, spec.x_scale, compute)
            w = kept if isinstance(kept, torch.Tensor) else dequantise_weight(spec, prepared.weights, compute)
            if out.dtype == compute:
                return _multiply(x, w.mT, added, out)
            if w.dim() == 2:
                return out.copy_(torch.nn.functional.linear(x, w, added))
            full = torch.bmm(x, w.mT)
            return out.copy_(full if added is None else full.add_(added))

        return launch


def is_scaled(spec: GemmSpec) -> bool:
    """True if an operand has scales."""
    return spec.x_scale is not None or spec.w_scale is not None


def library_violation(spec: GemmSpec) -> str | None:
    """`rule: detail` if this is not one product with a row-major [N, K] weight, as libraries compute it, or None."""
    if spec.w_layout != ROW_MAJOR:
        return f"weight layout: libraries read row-major weights, not '{spec.w_layout}'"
    if spec.batch != 1:
        return "batch: one product at a time"
    if spec.experts is not None:
        return "experts: one product at a time"
    return None


def _int_mm_violation(spec: GemmSpec, device: Device) -> str | None:
    """torch._int_mm's own checks; scales must not vary along K."""
    if problem := library_violation(spec):
        return problem
    if spec.x_dtype != "int8" or spec.w_dtype != "int8":
        return f"int8 only: the operands are {spec.x_dtype} and {spec.w_dtype}"
    if any(scale is not None and scale.granularity == "block" for scale in (spec.x_scale, spec.w_scale)):
        return "block scales: an int32 sum over all of K cannot take them"
    if device.kind != "cpu" and (spec.m <= 16 or spec.n % 8 or spec.k % 8):
        return f"alignment: M={spec.m} must be over 16, N={spec.n} and K={spec.k} multiples of 8"
    return None


def _can_write(spec: GemmSpec, device: Device) -> bool:
    """True if torch.mm writes this output type: its operands', and on an NVIDIA GPU also fp32 (out_dtype)."""
    if spec.out_dtype == spec.x_dtype == spec.w_dtype:
        return True
    return device.kind == "cuda" and spec.out_dtype == "float32" and spec.x_dtype == spec.w_dtype


def _launch_mm(x: "torch.Tensor", w_t: "torch.Tensor", bias: "torch.Tensor | None", out: "torch.Tensor") -> Launch:
    import torch

    if out.dtype == x.dtype:
        return lambda: _multiply(x, w_t, bias, out)

    def widened() -> "torch.Tensor":
        (torch.mm if x.dim() == 2 else torch.bmm)(x, w_t, out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)

    return widened


def _launch_int_mm(inputs: Inputs, weights: Weights, out: "torch.Tensor") -> Launch:
    """int32 sums, then fp32 scales ([1], or [M, 1] and [N, 1]) and bias."""
    import torch

    x_scale, w_scale, bias = inputs.x_scale, weights.w_scale, weights.bias
    if x_scale is None or w_scale is None:
        raise ValueError("an int8 product needs the scales of both operands")
    w_t, columns = weights.w.t(), w_scale.reshape(1, -1)

    def launch() -> "torch.Tensor":
        full = torch._int_mm(inputs.x, w_t).to(torch.float32).mul_(x_scale).mul_(columns)
        return out.copy_(full if bias is None else full.add_(bias))

    return launch


def _multiply(
    x: "torch.Tensor", w_t: "torch.Tensor", bias: "torch.Tensor | None", out: "torch.Tensor"
) -> "torch.Tensor":
    import torch

    if x.dim() > 2:
        torch.bmm(x, w_t, out=out)
        return out if bias is None else out.add_(bias)
    return torch.mm(x, w_t, out=out) if bias is None else torch.addmm(bias, x, w_t, out=out)
