"""`quack`: the CuTe DSL kernels of Quack for 16-bit products on Hopper and Blackwell, where it is installed."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import is_scaled, library_violation
from gemmpipe.backends.packages import also_missing, not_installed
from gemmpipe.core.data import Device, Knobs
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared
from gemmpipe.family.dtypes import DTYPES_16BIT

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Quack(Backend):
    """One candidate: the library's default configuration (`quack.gemm_interface.gemm`, untuned)."""

    label = "quack"

    def unavailable(self, device: Device) -> str | None:
        """It needs an NVIDIA GPU and the package `quack`."""
        missing = None if find_spec("quack") else not_installed("quack")
        if device.kind != "cuda":
            return also_missing("no NVIDIA GPU: Quack has kernels for NVIDIA only", missing)
        return missing

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The rules of the product's form."""
        return self.form_violation(spec)

    def form_violation(self, spec: GemmSpec) -> str | None:
        """Unscaled 16-bit products."""
        if problem := library_violation(spec):
            return problem
        if is_scaled(spec) or spec.x_dtype not in DTYPES_16BIT:
            return f"16-bit operands only: {spec.x_dtype}"
        if spec.bias or spec.out_dtype != spec.x_dtype or spec.batch > 1:
            return "form: no bias, one product, and the output in the operands' type"
        return None

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call that writes `out`."""
        from quack.gemm_interface import gemm

        x, w_t = inputs.x, prepared.weights.w.t()

        def launch() -> "torch.Tensor":
            gemm(x, w_t, out=out, tuned=False)
            return out

        return launch
