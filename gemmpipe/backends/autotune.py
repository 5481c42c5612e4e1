"""`autotune`: the family's own Triton kernel with the configuration that `triton.autotune` chooses; for comparisons."""

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
    """What a user of `@triton.autotune` gets on the same kernel and space."""

    limit_s: float | None
    """Seconds of tuning a problem, after which it looks at no further configuration; None: it looks at all."""

    def __post_init__(self) -> None:
        check_at_least(0, limit_s=self.limit_s)

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """One, on the family's Triton kernel if it has one that a call launches once."""
        kernels = (
            i for i in family.implementations if i.label == _KERNEL_LABEL and isinstance(i, KernelImplementation)
        )
        return (Autotuned(kernel=next(kernels, None), limit_s=self.limit_s),)


@dataclass(frozen=True, kw_only=True)
class Autotuned(Implementation):
    """Lists no candidate: a comparison has it `run_autotune` one of the kernel's, and times that beside the others."""

    label = LABEL
    kernel: KernelImplementation | None
    limit_s: float | None

    def unavailable(self, device: Device) -> str | None:
        """Triton times on a GPU alone."""
        return "no GPU: Triton tunes on one" if device.kind == "cpu" else None

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """None that are known before it has tuned."""
        return ()

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The kernel's own rules."""
        if self.kernel is None:
            return "kernel: triton.autotune tunes one, and a call of this family launches several"
        return self.kernel.unsupported_reason(spec, knobs, device) if knobs else None

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """As the kernel wants them."""
        return self._kernel.prepare(spec, weights, knobs)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The kernel as Triton's JIT launches it; nothing before it was chosen how."""
        if not knobs:  # a worker that died while choosing has the candidate tried alone: only choosing can show why
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
        """Have `triton.autotune` choose among these; `before_each` is called before it looks at one."""
        launches = [self._kernel.launch(spec, knobs, device, inputs, prepared, out) for knobs in configurations]
        return run_autotune(launches, out, self.limit_s, before_each, bench)

    @property
    def _kernel(self) -> KernelImplementation:
        if self.kernel is None:
            raise ValueError("a family without a kernel for triton.autotune was asked to launch it")
        return self.kernel
