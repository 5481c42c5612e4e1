"""Implementations with one kernel launch per call, given as data (KernelLaunch).

The arguments are computed and bound once; for other operands with the same layout only addresses are replaced
(ArgumentRebinder).
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.spec import ROW
from gemmpipe.family import GemmSpec, Implementation, Inputs, Launch, Operands, Prepared
from gemmpipe.launch.build import LoadedKernel, load_build
from gemmpipe.launch.workspace import WORKSPACES

if TYPE_CHECKING:
    import torch

PARTS_PARAMETER, COUNTERS_PARAMETER = "parts_ptr", "counters_ptr"
"""The parameters for the stream's workspace."""

Workspace = tuple["torch.Tensor", "torch.Tensor"] | tuple[None, None]
"""Parts and counters."""


def tensors_of(operands: Operands) -> tuple["torch.Tensor | None", ...]:
    """All tensors that a launch could read or write, in a fixed order."""
    inputs, weights = operands.inputs, operands.prepared.weights
    x = (inputs.x, inputs.x_scale, inputs.topk_ids, inputs.topk_weights)
    w = (weights.w, weights.w_scale, weights.bias, weights.w2, weights.w2_scale)
    return (*x, *w, operands.out)


class ArgumentRebinder:
    """Replaces the operands in the arguments of a launch; operands are found by address, so views count as well."""

    def __init__(self, arguments: Mapping[str, object], operands: Operands) -> None:
        self._arguments = arguments
        self._tensors = tensors_of(operands)
        self._roles: dict[str, int] = {}
        """By argument, the index of its tensor in `tensors_of`."""
        self._same: list[tuple[int, int]] = []
        """Pairs of operands with equal addresses."""
        self._complete = self._find_roles()

    def _find_roles(self) -> bool:
        """Fill `_roles` and `_same`. False if an argument has an address that is not an operand's."""
        owners: dict[int, int] = {}
        for role, tensor in enumerate(self._tensors):
            if tensor is not None and owners.setdefault(tensor.data_ptr(), role) != role:
                self._same.append((owners[tensor.data_ptr()], role))
        for name, value in self._arguments.items():
            address = _address_of(value)
            if address is not None:
                if address not in owners:
                    return False
                self._roles[name] = owners[address]
        return True

    def to(self, operands: Operands) -> dict[str, object] | None:
        """The arguments for other operands; None if their strides or alignment differ, or if a role is unknown."""
        others = tensors_of(operands)
        if not self._complete or any(_address_of(others[a]) != _address_of(others[b]) for a, b in self._same):
            return None
        arguments = dict(self._arguments)
        for name, role in self._roles.items():
            known, other = self._tensors[role], others[role]
            if known is None or other is None or other.stride() != known.stride() or other.data_ptr() % 16:
                return None
            arguments[name] = _with_tensor(self._arguments[name], other)
        return arguments


def _address_of(value: object) -> int | None:
    """The address of a tensor, or of a descriptor's tensor; None for other values."""
    tensor = getattr(value, "base", value)
    found = getattr(tensor, "data_ptr", None)
    return None if found is None else int(found())


def _with_tensor(value: object, tensor: "torch.Tensor") -> object:
    """The argument `value` with another tensor: the tensor itself, or a descriptor with the same boxes."""
    if not hasattr(value, "base"):
        return tensor
    descriptor = copy(value)
    descriptor.base = tensor
    return descriptor


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelLaunch:
    """A complete call: zeroing the output if splits are added to it, then one launch."""

    build: Build
    grid: tuple[int, int, int]
    arguments: Mapping[str, object]
    """By parameter, without constants and workspace: operands, descriptors of operands, integers."""
    parts: int = 0
    """fp32 elements of workspace."""
    counters: int = 0
    """int32 elements of workspace that are 0 before and after a launch."""
    zero_output: bool = False
    cluster: int = 1
    """Programs per cluster along x; it divides the grid."""
    launch_pdl: bool = False
    """See KernelImplementation."""

    def operands(self, parts: "torch.Tensor | None", counters: "torch.Tensor | None") -> dict[str, object]:
        """The values of all parameters that are not constants, with this workspace."""
        given = {PARTS_PARAMETER: parts, COUNTERS_PARAMETER: counters, **self.arguments}
        return {name: given[name] for name, kind in self.build.signature if kind != "constexpr"}

    def call(self, run: Callable[[], object], out: "torch.Tensor") -> Launch:
        """The complete call; `run` is its kernel launch."""
        zeroed = self.zero_output

        def launch() -> "torch.Tensor":
            if zeroed:
                out.zero_()
            run()
            return out

        return launch


@dataclass(frozen=True, kw_only=True)
class KernelImplementation(Implementation):
    """An implementation with one kernel launch per call."""

    launch_pdl: bool = False
    """True: the launch begins while the previous kernel ends (programmatic dependent launch), if its kernel can.

    It pays only after a kernel that lets the next one start early, such as our quantisers.
    """

    def scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """The memory orders of x's block scales that it reads directly; others must be copied to the first one."""
        return (ROW,)

    @abstractmethod
    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """The launch that computes the product of these operands into `out`."""

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """The launch bound to these operands, with the workspace of the current stream."""
        return _Binder(self, spec, knobs, device)(Operands(inputs=inputs, prepared=prepared, out=out))

    def binder(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Callable[[Operands], Launch]:
        """A function that binds the launch to operands; all but the addresses is computed once."""
        plain = type(self).bind is KernelImplementation.bind
        return _Binder(self, spec, knobs, device) if plain else super().binder(spec, knobs, device)


class _Binder:
    """Binds a kernel to several sets of operands; the workspace is that of the current stream at the first one."""

    def __init__(self, kernel: KernelImplementation, spec: GemmSpec, knobs: Knobs, device: Device) -> None:
        self._launch = partial(kernel.launch, spec, knobs, device)
        self._device = device
        self._bound_launch: tuple[Operands, KernelLaunch, LoadedKernel, Workspace] | None = None

    def __call__(self, own: Operands) -> Launch:
        if self._bound_launch is None:
            one = self._launch(own.inputs, own.prepared, own.out)
            workspace: Workspace = (None, None)
            if one.parts:
                workspace = WORKSPACES.take(one.parts, one.counters, own.out.device)
            loaded = load_build(one.build, self._device)
            self._bound_launch = own, one, loaded, workspace
        else:
            _, one, loaded, workspace = self._bound_launch
            arguments = self._rebinding.to(own) if self._rebinding is not None else None
            if arguments is not None:
                one = replace(one, arguments=arguments)
            else:
                one = self._launch(own.inputs, own.prepared, own.out)
                if one.build != loaded.build:  # scales in another memory order
                    loaded = load_build(one.build, self._device)
        return one.call(
            loaded.launcher(one.grid, one.operands(*workspace), one.cluster, launch_pdl=one.launch_pdl), own.out
        )

    @cached_property
    def _rebinding(self) -> ArgumentRebinder | None:
        """None under the interpreter, which needs the operands themselves."""
        assert self._bound_launch is not None
        own, one, loaded, _ = self._bound_launch
        return None if loaded.interpreted else ArgumentRebinder(one.arguments, own)
