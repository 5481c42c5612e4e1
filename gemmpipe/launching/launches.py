"""Implementations of which a call is one launch of one kernel: stated as data, so that it can be bound once."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Operands, Prepared
from gemmpipe.launching.builds import Loaded, load_build
from gemmpipe.launching.rebinding import Rebinding
from gemmpipe.launching.workspace import WORKSPACES
from gemmpipe.spec import ROW

if TYPE_CHECKING:
    import torch

PARTS, COUNTERS = "parts_ptr", "counters_ptr"
"""The parameters that the stream's workspace is given to."""

Workspace = tuple["torch.Tensor", "torch.Tensor"] | tuple[None, None]
"""Parts and counters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelLaunch:
    """All that a call does: the output zeroed first where splits are added to it, then one launch."""

    build: Build
    grid: tuple[int, int, int]
    arguments: Mapping[str, object]
    """By parameter, constants and workspace left out: operands as they are, descriptors of them, integers."""
    parts: int = 0
    """fp32 elements of workspace."""
    counters: int = 0
    """int32 elements of workspace that are 0 before and after."""
    zeroed: bool = False
    cluster: int = 1
    """Programs launched side by side, so many times as the grid holds them."""

    def operands(self, parts: "torch.Tensor | None", counters: "torch.Tensor | None") -> dict[str, object]:
        """What every parameter that is no constant gets, with this workspace."""
        given = {PARTS: parts, COUNTERS: counters, **self.arguments}
        return {name: given[name] for name, kind in self.build.signature if kind != "constexpr"}

    def call(self, run: Callable[[], object], out: "torch.Tensor") -> Launch:
        """The whole call, `run` being its launch."""
        zeroed = self.zeroed

        def launch() -> "torch.Tensor":
            if zeroed:
                out.zero_()
            run()
            return out

        return launch


class Kernel(Implementation):
    """An implementation that says its launch."""

    def scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """The memory orders of x's block scales that it reads as they lie; others are to be copied to the first."""
        return (ROW,)

    @abstractmethod
    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """The launch that computes the product of these operands into `out`."""

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """That launch, ready; its workspace is the stream's that is current now."""
        return _Binder(self, spec, knobs, device)(Operands(inputs=inputs, prepared=prepared, out=out))

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """What a launch is made of but for addresses is found once."""
        plain = type(self).bind is Kernel.bind
        return _Binder(self, spec, knobs, device) if plain else super().binder(spec, knobs, device)


class _Binder:
    """Binds a kernel to one set of operands after the other; the workspace is that of the first one's stream."""

    def __init__(self, kernel: Kernel, spec: GemmSpec, knobs: Knobs, device: Device) -> None:
        self._launch = partial(kernel.launch, spec, knobs, device)
        self._device = device
        self._first: tuple[Operands, KernelLaunch, Loaded, Workspace] | None = None

    def __call__(self, own: Operands) -> Launch:
        if self._first is None:
            one = self._launch(own.inputs, own.prepared, own.out)
            workspace: Workspace = (None, None)
            if one.parts:
                workspace = WORKSPACES.take(one.parts, one.counters, own.out.device)
            loaded = load_build(one.build, self._device)
            self._first = own, one, loaded, workspace
        else:
            _, one, loaded, workspace = self._first
            arguments = self._rebinding.to(own) if self._rebinding is not None else None
            if arguments is not None:
                one = replace(one, arguments=arguments)
            else:
                one = self._launch(own.inputs, own.prepared, own.out)
                if one.build != loaded.build:  # scales in another memory order
                    loaded = load_build(one.build, self._device)
        return one.call(loaded.launcher(one.grid, one.operands(*workspace), one.cluster), own.out)

    @cached_property
    def _rebinding(self) -> Rebinding | None:
        """None where an interpreter wants the operands themselves."""
        assert self._first is not None
        own, one, loaded, _ = self._first
        return None if loaded.interpreted else Rebinding(one.arguments, own)
