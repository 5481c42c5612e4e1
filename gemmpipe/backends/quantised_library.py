"""`quantised_library`: x quantised to fp8 by our kernel, then a library's product of fp8 operands.

For products of x in 16 bits and w in fp8, with scales of 128 x 128 blocks or of rows: what an engine runs with this
library, with a quantiser of one launch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.spec import COLUMN
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.templates.quantise import (
    by_row,
    quantised_inputs,
    quantised_spec,
    quantiser_build,
    weight_only_violation,
)

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

_ROWS = 4
"""Libraries multiply whole groups of four rows of block-scaled operands; engines pad M to them."""


@dataclass(frozen=True, kw_only=True)
class QuantisedLibrary(Backend):
    """A library's candidates, with the quantiser before each."""

    label = "quantised_library"
    reads_strides = False
    library: Backend = field(default_factory=ScaledMm)

    def unavailable(self, device: Device) -> str | None:
        """The library's reason, or that there is no GPU for the quantiser."""
        return "no GPU: Triton compiles for GPUs" if device.kind == "cpu" else self.library.unavailable(device)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The library's; none for other operands."""
        return () if weight_only_violation(spec) else self.library.configs(_padded(spec), device, space)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """As the library does."""
        return self.library.normalise(_padded(spec), knobs, device)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule that the operands or the library break, or None."""
        if reason := weight_only_violation(spec):
            return reason
        return self.library.unsupported_reason(_padded(spec), knobs, device)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """The quantiser's."""
        return (quantiser_build(spec, device),)

    def kernel_name(self, knobs: Knobs) -> str:
        """The library's name."""
        return f"quantised {self.library.kernel_name(knobs)}"

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """As the library does."""
        return self.library.prepare(_padded(spec), weights, knobs)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The quantiser, then the library's call."""
        padded = _padded(spec)
        x = inputs.x.contiguous()
        # The quantiser's build reads the type of x from the specification: that of the product is fp8 already.
        quantised = quantised_inputs(replace(spec, m=padded.m), device, x, padded.x_scale_orders[0])
        if padded.m == spec.m:
            multiply = self.library.bind(padded, knobs, device, quantised.inputs, prepared, out)
        else:
            multiply = self._padded_call(padded, knobs, device, quantised.inputs, prepared, out)

        def launch() -> "torch.Tensor":
            quantised.run()
            return multiply()[: spec.m]

        return launch

    def _padded_call(
        self, padded: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The library's call into an output of its own with the padded number of rows, new in each call."""
        import torch

        def multiply() -> "torch.Tensor":
            full = torch.empty(padded.out_shape, dtype=out.dtype, device=out.device)
            return self.library.bind(padded, knobs, device, inputs, prepared, full)()

        return multiply


def _padded(spec: GemmSpec) -> GemmSpec:
    """The library's product: x quantised; with block scales M is rounded up, and the scales are M-major."""
    m = spec.m if by_row(spec) else -(-spec.m // _ROWS) * _ROWS
    return quantised_spec(replace(spec, m=m), COLUMN)
