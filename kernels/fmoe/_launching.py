"""Implementations of which a call is several launches in a row, with scratch between them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.experts import experts_of, routing
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Prepared
from gemmpipe.kernels.fmoe._steps import Step
from gemmpipe.launching.builds import load_build
from gemmpipe.launching.workspace import SCRATCH, Shape
from gemmpipe.templates.axes import integer
from gemmpipe.templates.tiled import WGMMA_ROWS, next_power
from gemmpipe.templates.two_stage import APART, FUSED, SECOND, knobs_of_stage

if TYPE_CHECKING:
    import torch

Planned = tuple[tuple[Step, Build], ...]


def settled(spec: GemmSpec, knobs: Knobs) -> dict[str, Scalar]:
    """The knobs without what says the same as not being there."""
    kept = {name: value for name, value in knobs.items() if name != FUSED or value}
    if spec.m * experts_of(spec).topk == 1:
        kept["GROUP_SIZE_M"] = 1  # one row of tiles has one order
    for name in APART:
        if name in kept and kept[name] == kept.get(name.removesuffix(SECOND)):
            del kept[name]
    return kept


def mostly_padding(spec: GemmSpec, knobs: Knobs) -> str | None:
    """`rule: detail` where tiles are mostly padding, in rows or in either product's columns; None elsewhere."""
    m = integer(knobs, "BLOCK_SIZE_M")
    if m > WGMMA_ROWS and m >= 2 * next_power(spec.m):
        return f"tile beyond the problem: {m} rows for {spec.m} an expert at most"
    for stage, columns in ((1, experts_of(spec).wide), (2, spec.n)):
        n = integer(knobs_of_stage(knobs, stage), "BLOCK_SIZE_N")
        if n > WGMMA_ROWS and n >= 2 * next_power(columns):
            return f"tile beyond the problem: {n} columns for {columns} (stage {stage})"
    return None


class LaunchesInARow(Implementation):
    """Says its launches and what lies between them."""

    @abstractmethod
    def planned(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Planned:
        """The launches in their order, with their builds."""

    @abstractmethod
    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Shape]:
        """The tensors between the launches."""

    def further(self, spec: GemmSpec, tensors: "Mapping[str, torch.Tensor | None]") -> "list[Callable[[], object]]":
        """Calls of libraries that follow the launches, on the tensors of the call by name."""
        return []

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
        runs: list[Callable[[], object]] = [
            load_build(build, device).launcher(step.grid, step.arguments(tensors))
            for step, build in self.planned(spec, knobs, device)
        ]
        runs += self.further(spec, tensors)

        def launch() -> "torch.Tensor":
            for run in runs:
                run()
            return out

        return launch
