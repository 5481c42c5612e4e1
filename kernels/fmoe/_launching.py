"""Implementations of which a call is several launches in a row, with scratch between them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs
from gemmpipe.experts import routing
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Prepared
from gemmpipe.kernels.fmoe._steps import Step
from gemmpipe.launching.builds import load_build
from gemmpipe.launching.workspace import SCRATCH, Shape

if TYPE_CHECKING:
    import torch

Planned = tuple[tuple[Step, Build], ...]


class LaunchesInARow(Implementation):
    """Says its launches and what lies between them."""

    @abstractmethod
    def planned(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Planned:
        """The launches in their order, with their builds."""

    @abstractmethod
    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Shape]:
        """The tensors between the launches."""

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """A build for each launch."""
        return tuple(dict.fromkeys(build for _, build in self.planned(spec, knobs, device)))

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The launches in a row; what lies between them is the current stream's scratch."""
        ids, shares = routing(inputs)
        weights = prepared.weights
        tensors: dict[str, torch.Tensor | None] = {"x": inputs.x, "ids": ids, "shares": shares, "out": out}
        tensors |= {"w": weights.w, "w_scale": weights.w_scale, "w2": weights.w2, "w2_scale": weights.w2_scale}
        tensors |= SCRATCH.take(self.scratch(spec, knobs), out.device)
        runs = [
            load_build(build, device).launcher(step.grid, step.arguments(tensors))
            for step, build in self.planned(spec, knobs, device)
        ]

        def launch() -> "torch.Tensor":
            for run in runs:
                run()
            return out

        return launch
