"""`vllm` and `sglang`: the Triton functions of inference engines, called with a given configuration."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.backends.engine_functions import GEMM_FUNCTIONS, EngineFunction, product_launch, product_on_meta
from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.renamed import accept_old_methods
from gemmpipe.core.spec import ROW
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, Launch, Operands, Prepared, Weights

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


GEMM_KIND, MOE_KIND = "dense", "experts"
KINDS = (GEMM_KIND, MOE_KIND)
"""The kinds of products of engines' functions; each kind has its own space."""


class EngineImplementation(Implementation):
    """An engine's function for some products: the label is the engine's name, the knobs are the engine's alone.

    Screened with a kernel of the same form, so that builds compile in parallel; the finals call the engine's own
    function if it is installed, else the kernel in its exact form (`finals_implementation`, `exact_form`).
    """

    kind: str = GEMM_KIND

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, {"absent": "unavailable_reason", "call_without_memory": "call_on_meta"})

    def timed_scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """Row-major alone, as the engines' quantisers write scales for their Triton functions."""
        return (ROW,)

    @abstractmethod
    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """The configuration that the engine takes without a file; None if unknown."""

    @abstractmethod
    def folders(self) -> tuple[Path, ...]:
        """The folders with the files that the installed engine ships; imports nothing."""

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why the engine's own function cannot be called, or None. May import the engine."""

    def exact_form(self) -> "EngineImplementation":
        """The kernel compiled as the engine compiles its own, where screening runs fewer binaries that differ in it."""
        return self

    @abstractmethod
    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """Call the engine's own function on `meta` tensors, which compiles its Triton kernels (see engine_compile)."""


@dataclass(frozen=True, kw_only=True)
class EngineProduct(EngineImplementation):
    """One product by an engine's function; `kernel` is a family's kernel of the same form, with the engine's label."""

    kind = GEMM_KIND
    kernel: Implementation
    function: EngineFunction
    calls_engine: bool = False
    """True: call the engine's function instead of the kernel."""

    @property
    def label(self) -> str:  # type: ignore[override]
        """The engine's name."""
        return self.kernel.label

    def unavailable(self, device: Device) -> str | None:
        """The kernel's reason, or that there is no GPU."""
        return "no GPU: Triton compiles for GPUs" if device.kind == "cpu" else self.kernel.unavailable(device)

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that the kernel does not have."""
        self.kernel.check(space)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...] | None:
        """The knobs that the engine passes to its kernel."""
        return self.kernel.knob_names(spec, device)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs with the engine's knobs."""
        return self.kernel.configs(spec, device, space)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The engine's knobs alone."""
        return self.kernel.normalise(spec, knobs, device)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The kernel's reason."""
        return self.kernel.unsupported_reason(spec, knobs, device)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The kernel's reason."""
        return self.kernel.dominated_reason(spec, knobs, device)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """The kernel's builds; the engine's function compiles at its first call."""
        return self.kernel.builds(spec, knobs, device)

    def kernel_name(self, knobs: Knobs) -> str:
        """The name of the kernel, which screening runs."""
        return self.kernel.kernel_name(knobs)

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The kernel's preparation; engines' Triton functions take the same weights."""
        return self.kernel.prepare(spec, weights, knobs)

    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """The function's defaults, with a tile of one block of weight scales."""
        if spec.w_scale is None:
            return None
        rows, columns = spec.w_scale.block
        return {**self.function.default, "BLOCK_SIZE_N": rows, "BLOCK_SIZE_K": columns}

    def folders(self) -> tuple[Path, ...]:
        """`configs` next to its module."""
        return self.function.folders()

    def unavailable_reason(self) -> str | None:
        """Why it cannot be imported."""
        return self.function.unavailable_reason()

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """The function on operands without memory. Raises ValueError without block scales."""
        product_on_meta(self.function, spec, dict(knobs))

    def exact_form(self) -> "EngineProduct":
        """With the kernel's own form for the finals."""
        return replace(self, kernel=self.kernel.finals_implementation())

    def finals_implementation(self) -> Implementation:
        """The engine's function if it can be imported, else the kernel in its exact form."""
        if self.calls_engine:
            return self
        return self.exact_form() if self.unavailable_reason() else replace(self, calls_engine=True)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The kernel, or the engine's function, which returns its own output; x_scale is passed row-major."""
        if not self.calls_engine:
            return self.kernel.bind(spec, knobs, device, inputs, prepared, out)
        return product_launch(self.function, spec, inputs, prepared.weights, out.dtype, dict(knobs))

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """The kernel's binder, unless the engine's function is called."""
        return super().binder(spec, knobs, device) if self.calls_engine else self.kernel.binder(spec, knobs, device)


@dataclass(frozen=True, kw_only=True)
class EngineBackend:
    """An engine's functions for a family; none if the family has no kernel of their form."""

    engine: str

    def implementations(self, family: Family) -> tuple[EngineImplementation, ...]:
        """One, or none. A family's own EngineImplementation is used unchanged."""
        kernel = family.engine_kernels.get(self.engine)
        if kernel is None:
            return ()
        if isinstance(kernel, EngineImplementation):
            return (kernel,)
        return (EngineProduct(kernel=kernel, function=GEMM_FUNCTIONS[self.engine]),)
