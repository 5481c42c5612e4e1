"""`vllm` and `sglang`: the Triton functions of inference engines, with a given configuration of theirs."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.backends.engine_compile import empty_meta, scales_shape, torch_dtype
from gemmpipe.backends.engine_functions import GEMM_FUNCTIONS, EngineFunction
from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.renamed import accept_old_methods
from gemmpipe.core.spec import ROW
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, Launch, Operands, Prepared, Weights

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


GEMM_KIND, MOE_KIND = "dense", "experts"
KINDS = (GEMM_KIND, MOE_KIND)
"""What engines' functions compute; each kind has a space of its own."""


class EngineImplementation(Implementation):
    """What an engine runs for some products: its label is the engine's name, its knobs are the engine's and no others.

    Screened by a kernel of ours of the same form, whose builds compile side by side; in the finals the engine's own
    function where it is installed (`in_finals`).
    """

    kind: str = GEMM_KIND

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, {"absent": "unavailable_reason", "call_without_memory": "call_on_meta"})

    def timed_scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """Row by row alone: so the engines' quantisers write scales for their Triton functions."""
        return (ROW,)

    @abstractmethod
    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """The configuration that the engine takes without a file; None where it is not known."""

    @abstractmethod
    def folders(self) -> tuple[Path, ...]:
        """Where the installed engine keeps the files that it ships; nothing is imported."""

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why the engine's own function does not take part, or None. May import the engine."""

    @abstractmethod
    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """Call the engine's own function on tensors of `meta`: its Triton kernels compile (see engine_compile)."""


@dataclass(frozen=True, kw_only=True)
class EngineProduct(EngineImplementation):
    """One product by an engine's function; `kernel` is a family's kernel of that form, under the engine's label."""

    kind = GEMM_KIND
    kernel: Implementation
    function: EngineFunction
    calls_engine: bool = False
    """Whether the engine's function is called instead of the kernel."""

    @property
    def label(self) -> str:  # type: ignore[override]
        """The engine's name."""
        return self.kernel.label

    def unavailable(self, device: Device) -> str | None:
        """As the kernel of its form."""
        return self.kernel.unavailable(device)

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that its kernel does not have."""
        self.kernel.check(space)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...] | None:
        """Those that the engine passes on."""
        return self.kernel.knob_names(spec, device)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points, as far as the engine has these knobs."""
        return self.kernel.configs(spec, device, space)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """The engine's knobs alone."""
        return self.kernel.normalise(spec, knobs, device)

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """What the kernel of its form cannot do."""
        return self.kernel.unsupported_reason(spec, knobs, device)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """As the kernel of its form."""
        return self.kernel.dominated_reason(spec, knobs, device)

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """Those of the kernel of its form; the engine's function compiles at its first call."""
        return self.kernel.builds(spec, knobs, device)

    def kernel_name(self, knobs: Knobs) -> str:
        """The kernel of its form, which screening runs."""
        return self.kernel.kernel_name(knobs)

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """Engines' Triton functions take the weights as they are."""
        return self.kernel.prepare(spec, weights, knobs)

    def default(self, spec: GemmSpec, device: Device) -> Knobs | None:
        """A tile of one block of weight scales, as the function has it."""
        if spec.w_scale is None:
            return None
        rows, columns = spec.w_scale.block
        return {**self.function.default, "BLOCK_SIZE_N": rows, "BLOCK_SIZE_K": columns}

    def folders(self) -> tuple[Path, ...]:
        """The folder beside its module."""
        return self.function.folders()

    def unavailable_reason(self) -> str | None:
        """Why it cannot be imported."""
        return self.function.unavailable_reason()

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        """The function on operands without memory."""
        if spec.x_scale is None or spec.w_scale is None:
            raise ValueError("block scales are missing")
        x, w = empty_meta((spec.m, spec.k), spec.x_dtype), empty_meta((spec.n, spec.k), spec.w_dtype)
        x_scale = empty_meta(scales_shape(spec.x_scale, spec.m, spec.k), spec.x_scale.dtype)
        w_scale = empty_meta(scales_shape(spec.w_scale, spec.n, spec.k), spec.w_scale.dtype)
        operands = (x, w, x_scale, w_scale)
        self.function.launch(operands, list(spec.w_scale.block), torch_dtype(spec.out_dtype), dict(knobs))()

    def finals_implementation(self) -> Implementation:
        """The engine's function, where it can be imported."""
        return self if self.calls_engine or self.unavailable_reason() else replace(self, calls_engine=True)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The engine's function returns an output of its own; x_scale is given row by row, as its quantiser writes."""
        if not self.calls_engine:
            return self.kernel.bind(spec, knobs, device, inputs, prepared, out)
        if inputs.x_scale is None or spec.w_scale is None:
            raise ValueError("block scales are missing")
        weights = prepared.weights
        operands = (inputs.x, weights.w, inputs.x_scale.contiguous(), weights.w_scale)
        return self.function.launch(operands, list(spec.w_scale.block), out.dtype, dict(knobs))

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """That of the kernel, unless the engine's function is called."""
        return super().binder(spec, knobs, device) if self.calls_engine else self.kernel.binder(spec, knobs, device)


@dataclass(frozen=True, kw_only=True)
class EngineBackend:
    """What the engine of this name runs for a family; nothing where the family has no kernel of its form."""

    engine: str

    def implementations(self, family: Family) -> tuple[EngineImplementation, ...]:
        """One, or none. What a family brings as an EngineImplementation already is taken as it is."""
        kernel = family.engine_kernels.get(self.engine)
        if kernel is None:
            return ()
        if isinstance(kernel, EngineImplementation):
            return (kernel,)
        return (EngineProduct(kernel=kernel, function=GEMM_FUNCTIONS[self.engine]),)
