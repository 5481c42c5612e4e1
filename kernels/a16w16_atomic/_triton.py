"""The dense kernel with splits of K that atomics add up: launch and constraints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.launch.launch import KernelLaunch
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.dense import Dense, scaling_violation
from gemmpipe.templates.params import WORKSPACE_PARAMETERS, int_knob

if TYPE_CHECKING:
    import torch

_MAX_SPLITS = 16


@dataclass(frozen=True, kw_only=True)
class AtomicDense(Dense):
    """`triton`: splits are added to the output, in its own type and in any order, without a workspace."""

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if spec.bias or spec.x_scale is not None:
            return "epilogue: a split adds its plain sum, without bias and scales"
        # Each addition rounds to the output's type: 16 leave 1 % of elements outside the tolerance, 32 over 4 %.
        if int_knob(knobs, "NUM_KSPLIT") > _MAX_SPLITS:
            return f"rounding: {knobs['NUM_KSPLIT']} additions in {spec.out_dtype}, {_MAX_SPLITS} at most"
        return scaling_violation(spec) or tile_violation(spec, knobs, device, accumulators=1, parts=False)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """The dense kernel's, without a workspace."""
        return {**super().pointers(spec), **dict.fromkeys(WORKSPACE_PARAMETERS, "constexpr")}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """The dense kernel's, but SPLIT_K is `atomic`."""
        return {**super().constants(spec, knobs), "SPLIT_K": "atomic" if knobs["NUM_KSPLIT"] != 1 else "none"}

    def workspace_bytes(self, spec: GemmSpec, knobs: Knobs) -> int:
        """0: splits are added to the output."""
        return 0

    def kernel_name(self, knobs: Knobs) -> str:
        """`dense@3fa9c1d2`, or `dense_atomic@...`."""
        return super().kernel_name(knobs).replace("_splitk@", "_atomic@")

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """The output is zeroed before splits are added to it."""
        one = super().launch(spec, knobs, device, inputs, prepared, out)
        return replace(one, zero_output=int_knob(knobs, "NUM_KSPLIT") > 1)
