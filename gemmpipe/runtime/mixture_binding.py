"""A mixture's launches bound once per key: a call reads addresses, makes the scratch memory and launches.

Binding again in each call costs more than the launches of a small mixture: tensors for the scratch memory, arguments by
name, the look-up of each build, and a query of the driver for each tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.family import GemmSpec
from gemmpipe.launch.build import load_build
from gemmpipe.launch.workspace import SCRATCH, TensorShape, stream_getter, unshared_scratch
from gemmpipe.runtime.descriptors import DescriptorCache
from gemmpipe.runtime.launcher import BoundLaunch, bind_launch
from gemmpipe.runtime.operands import ALIGNMENT

OPERANDS = ("x", "ids", "shares", "out", "w", "w_scale", "w2", "w2_scale")
"""The tensors that a call gives, by their names in the launches."""
Tensors = Mapping[str, torch.Tensor | None]
BoundMixture = Callable[[tuple[torch.Tensor | None, ...]], bool]
"""Launch on the operands in their order; False if one is not contiguous or not aligned: nothing is launched then."""
_PLACE = 256
"""Bytes of which the address of a scratch tensor is a multiple."""


class MixtureStep(Protocol):
    """One launch of a plan."""

    @property
    def tensors(self) -> Mapping[str, str | None]:
        """Parameter -> name of its tensor."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs."""

    def arguments(self, tensors: Tensors) -> dict[str, object]:
        """The value of every parameter that is no constant."""


@runtime_checkable
class PlannedLaunches(Protocol):
    """An implementation whose call is a plan of launches with scratch tensors between them."""

    def launch_plan(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[tuple[MixtureStep, Build], ...]:
        """The launches in their order, with their builds."""

    def scratch(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, TensorShape]:
        """(shape, dtype) of the tensors between the launches, by name."""

    def launches_alone(self, spec: GemmSpec) -> bool:
        """True if a call consists of the plan's launches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _BoundStep:
    """A launch: `values` with None for addresses; slots are (index in values, index among addresses, descriptors)."""

    launch: BoundLaunch
    values: list[object]
    slots: tuple[tuple[int, int, DescriptorCache | None], ...]


def scratch_places(shapes: Mapping[str, TensorShape]) -> tuple[tuple[int, ...], int]:
    """(the offset of each tensor, bytes of all) in memory that begins at a multiple of 256."""
    offsets, end = [], 0
    for shape, dtype in shapes.values():
        offsets.append(end)
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        end += -(-size // _PLACE) * _PLACE
    return tuple(offsets), end


def bind_mixture(
    implementation: PlannedLaunches, spec: GemmSpec, knobs: Knobs, device: Device, given: Tensors
) -> BoundMixture | None:
    """The launches for operands with the shapes and types of `given`; None under Triton's interpreter."""
    shapes, place = implementation.scratch(spec, knobs), given["x"]
    assert place is not None
    with unshared_scratch():
        tensors = {**given, **SCRATCH.take(shapes, place.device)}
    roles = {name: index for index, name in enumerate((*OPERANDS, *shapes))}
    steps: list[_BoundStep] = []
    for step, build in implementation.launch_plan(spec, knobs, device):
        loaded = load_build(build, device)
        if loaded.interpreted:
            return None
        named = {parameter: name for parameter, name in step.tensors.items() if name is not None}
        ready = bind_launch(loaded, step.grid, 1, step.arguments(tensors))
        slots = tuple(
            (ready.positions[parameter], roles[name], ready.descriptors.get(parameter))
            for parameter, name in named.items()
        )
        steps.append(_BoundStep(launch=ready.launch, values=list(ready.values), slots=slots))
    offsets, size = scratch_places(shapes)
    return _bound_call(tuple(steps), offsets, size + _PLACE, device, place.device)


def _bound_call(
    steps: tuple[_BoundStep, ...], offsets: tuple[int, ...], size: int, device: Device, place: torch.device
) -> BoundMixture:
    """The launching call, one function since calls in it cost time; the device is current."""
    stream_of, index = stream_getter(), device.index
    launches = [(step.launch, step.values, step.slots) for step in steps]

    def call(operands: tuple[torch.Tensor | None, ...]) -> bool:
        addresses, bits = [], 0
        for tensor in operands:
            if tensor is None:
                addresses.append(0)
                continue
            if not tensor.is_contiguous():
                return False
            address = tensor.data_ptr()
            bits |= address
            addresses.append(address)
        if bits & ALIGNMENT:
            return False
        memory = torch.empty(size, dtype=torch.uint8, device=place)  # freed in the stream's order, as any tensor
        base = -(-memory.data_ptr() // _PLACE) * _PLACE
        addresses += [base + offset for offset in offsets]
        stream = stream_of(index)
        for launch, values, slots in launches:
            arguments = values[:]
            for at, role, descriptors in slots:
                arguments[at] = addresses[role] if descriptors is None else descriptors[addresses[role]]
            launch(stream, arguments)
        return True

    return call
