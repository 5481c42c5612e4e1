"""Implementations of which a call is one launch of one kernel: stated as data, so that it can be bound once."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Prepared
from gemmpipe.launching.builds import load_build
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
        one = self.launch(spec, knobs, device, inputs, prepared, out)
        workspace = WORKSPACES.take(one.parts, one.counters, out.device) if one.parts else (None, None)
        run = load_build(one.build, device).launcher(one.grid, one.operands(*workspace))
        return one.call(run, out)
