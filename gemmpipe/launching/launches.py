"""Implementations of which a call is one launch of one kernel: stated as data, so that it can be bound once."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Operands, Prepared
from gemmpipe.launching.builds import load_build
from gemmpipe.launching.rebinding import Rebinding
from gemmpipe.launching.workspace import WORKSPACES

if TYPE_CHECKING:
    import torch

PARTS, COUNTERS = "parts_ptr", "counters_ptr"
"""The parameters that the stream's workspace is given to."""


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

    @abstractmethod
    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """The launch that computes the product of these operands into `out`."""

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """That launch, ready; its workspace is the stream's that is current now."""
        [launch] = self._bound(spec, knobs, device, [Operands(inputs=inputs, prepared=prepared, out=out)])
        return launch

    def bind_each(self, spec: GemmSpec, knobs: Knobs, device: Device, sets: Sequence[Operands]) -> list[Launch]:
        """What a launch is made of but for addresses is found once."""
        if type(self).bind is not Kernel.bind:
            return super().bind_each(spec, knobs, device, sets)
        return self._bound(spec, knobs, device, sets)

    def _bound(self, spec: GemmSpec, knobs: Knobs, device: Device, sets: Sequence[Operands]) -> list[Launch]:
        first = sets[0]
        one = self.launch(spec, knobs, device, first.inputs, first.prepared, first.out)
        workspace = WORKSPACES.take(one.parts, one.counters, first.out.device) if one.parts else (None, None)
        loaded = load_build(one.build, device)
        launches = [one.call(loaded.launcher(one.grid, one.operands(*workspace)), first.out)]
        again = Rebinding(one.arguments, first) if len(sets) > 1 and not loaded.interpreted else None
        for other in sets[1:]:
            arguments = again.to(other) if again is not None and again.complete else None
            if arguments is None:
                its = self.launch(spec, knobs, device, other.inputs, other.prepared, other.out)
            else:
                its = replace(one, arguments=arguments)
            launches.append(its.call(loaded.launcher(its.grid, its.operands(*workspace)), other.out))
        return launches
