"""Launching the dense warp-specialised kernel: its bias and scales."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.templates.dense import sum_misfit
from gemmpipe.templates.signature import operand_pointers
from gemmpipe.templates.warp_specialised import WarpSpecialised
from gemmpipe.templates.warp_specialised_tiles import DENSE, Widest


@dataclass(frozen=True, kw_only=True)
class DenseWarpSpecialised(WarpSpecialised):
    """`gluon`: 16 or 8 bits, scales by row or tensor or none, bias; 8-bit floats sum in the tensor core's 14 bits."""

    kernel: str = "gemmpipe.templates.dense_hopper:dense_warp_specialised"
    widest: Widest = DENSE

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        return sum_misfit(spec) or super().misfit(spec, knobs, device)

    def operands(self, spec: GemmSpec) -> Mapping[str, str]:
        """Bias and scales, left out of builds without them."""
        pointers = operand_pointers(spec)
        return {name: pointers[name] for name in ("bias_ptr", "x_scale_ptr", "w_scale_ptr")}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """How the sum is scaled."""
        return {"SCALES": spec.x_scale.granularity if spec.x_scale else "none"}

    def values(self, spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> Mapping[str, object]:
        """The tensors."""
        weights = prepared.weights
        return {"bias_ptr": weights.bias, "x_scale_ptr": inputs.x_scale, "w_scale_ptr": weights.w_scale}
