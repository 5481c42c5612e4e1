"""`autotune`: a family's own Triton kernel with the configuration that `triton.autotune` selects; for comparisons."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.errors import check_at_least
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, Launch, Prepared, Weights
from gemmpipe.launch.launch import KernelImplementation
from gemmpipe.launch.triton_autotune import AutotuneResult, BenchFunction, jit_launch, run_autotune

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

LABEL = "autotune"
_KERNEL_LABEL = "triton"


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """The result of `@triton.autotune` on the same kernel and space."""

    limit_s: float | None
    """Seconds of tuning per problem, after which no further configuration is tried; None: no limit."""

    def __post_init__(self) -> None:
        check_at_least(0, limit_s=self.limit_s)

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """One, with the family's Triton kernel if a call is a single launch of it."""
        kernels = (
            i for i in family.implementations if i.label == _KERNEL_LABEL and isinstance(i, KernelImplementation)
        )
        return (Autotuned(kernel=next(kernels, None), limit_s=self.limit_s),)


@dataclass(frozen=True, kw_only=True)
class Autotuned(Implementation):
    """Lists no candidates: a comparison calls `choose` and times the selected configuration with the others."""

    label = LABEL
    kernel: KernelImplementation | None
    limit_s: float | None

    def unavailable(self, device: Device) -> str | None:
        """It needs a GPU: Triton's autotuner times there only."""
        return "no GPU: Triton tunes on one" if device.kind == "cpu" else None

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Empty: the configuration is known after tuning only."""
        return ()

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The kernel's own rules."""
        if self.kernel is None:
            return "kernel: triton.autotune tunes a single launch, and a call of this family has several"
        return self.kernel.unsupported_reason(spec, knobs, device) if knobs else None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The kernel's own preparation."""
        return self._kernel.prepare(spec, weights, knobs)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The kernel as Triton's JIT launches it; without knobs, before `choose`, a launch of nothing."""
        if not knobs:  # after a worker died in `choose` the candidate is tried alone: only `choose` can show the cause
            return lambda: out
        return jit_launch(self._kernel.launch(spec, knobs, device, inputs, prepared, out), out)

    def choose(
        self,
        spec: GemmSpec,
        configurations: Sequence[Knobs],
        device: Device,
        inputs: Inputs,
        prepared: Prepared,
        out: "torch.Tensor",
        before_each: Callable[[], object],
        bench: BenchFunction | None = None,
    ) -> AutotuneResult:
        """Have `triton.autotune` select one of these; `before_each` is called before it tries each."""
        launches = [self._kernel.launch(spec, knobs, device, inputs, prepared, out) for knobs in configurations]
        return run_autotune(launches, out, self.limit_s, before_each, bench)

    @property
    def _kernel(self) -> KernelImplementation:
        if self.kernel is None:
            raise ValueError("this family has no kernel for triton.autotune")
        return self.kernel
