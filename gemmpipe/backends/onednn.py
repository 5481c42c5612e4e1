"""`onednn`: oneDNN's linear layer on a CPU, with the weight packed once in oneDNN's own layout."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import is_scaled, library_violation
from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.errors import suggest_or_list
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

METHODS = ("float32_packed", "bfloat16_packed")


@dataclass(frozen=True, kw_only=True)
class OneDnn(Backend):
    """Candidates by one knob, `method`: the type of the packed weight."""

    label = "onednn"

    def unavailable(self, device: Device) -> str | None:
        """It computes on CPUs, with a torch built with oneDNN."""
        import torch

        if device.kind != "cpu":
            return "no CPU run: oneDNN is used on CPUs only"
        return None if torch._C._has_mkldnn else "this torch is built without oneDNN"

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """A packed weight of each type."""
        return tuple({"method": method} for method in METHODS)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """One `if` per rule."""
        import torch

        method = str(knobs["method"])
        if method not in METHODS:
            return f"method: no '{method}'{suggest_or_list(method, METHODS)}"
        if device.kind != "cpu":
            return "no CPU run: oneDNN is used on CPUs only"
        if problem := library_violation(spec):
            return problem
        # Packed 16-bit weights need avx512 or avx_ne_convert; without, oneDNN rejects them.
        if method == "bfloat16_packed" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return f"bf16: {device.gfx} has no instructions for packed bf16 weights"
        if method == "bfloat16_packed" and not is_scaled(spec) and spec.x_dtype != "bfloat16":
            return f"bf16: it would round {spec.x_dtype} operands"
        if method == "bfloat16_packed" and spec.out_dtype == "float32" and not is_scaled(spec):
            return "output type: a bf16 product is rounded to bf16 before it becomes fp32"
        return None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The packed weight. A bf16 weight packed as bf16 has the same size and replaces it; all others are extra."""
        import torch

        from gemmpipe.family.reference import dequantise_weight

        dtype = str(knobs["method"]).removesuffix("_packed")
        packed = torch.ops.mkldnn._reorder_linear_weight(
            dequantise_weight(spec, weights, getattr(torch, dtype)), spec.m
        )
        replaces = not is_scaled(spec) and spec.w_dtype == dtype
        return Prepared(
            weights=weights, extra=packed, extra_bytes=0 if replaces else packed.numel() * packed.element_size()
        )

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that converts the activations, multiplies, and writes `out`."""
        import torch

        from gemmpipe.family.reference import dequantise

        compute = getattr(torch, str(knobs["method"]).removesuffix("_packed"))
        bias = prepared.weights.bias
        added = None if bias is None else bias.to(compute)
        linear = torch.ops.mkldnn._linear_pointwise

        def launch() -> "torch.Tensor":
            x = dequantise(inputs.x, inputs.x_scale, spec.x_scale, compute)
            return out.copy_(linear(x, prepared.extra, added, "none", [], ""))

        return launch
