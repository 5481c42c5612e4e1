"""The launch of a kernel on other operands, made alike: its arguments with other addresses in them."""

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

from gemmpipe.family import Operands

if TYPE_CHECKING:
    import torch


def tensors_of(operands: Operands) -> tuple["torch.Tensor | None", ...]:
    """All that a launch could read or write, in a fixed order."""
    inputs, weights = operands.inputs, operands.prepared.weights
    x = (inputs.x, inputs.x_scale, inputs.topk_ids, inputs.topk_weights)
    w = (weights.w, weights.w_scale, weights.bias, weights.w2, weights.w2_scale)
    return (*x, *w, operands.out)


class Rebinding:
    """Which arguments of a launch are operands; a view of one counts as it, since a launch takes the address alone."""

    def __init__(self, arguments: Mapping[str, object], operands: Operands) -> None:
        self._arguments = arguments
        self._tensors = tensors_of(operands)
        self._roles: dict[str, int] = {}
        """By argument, the place of its tensor in `tensors_of`."""
        self._same: list[tuple[int, int]] = []
        """Operands at one address."""
        self._complete = self._find_roles()

    def _find_roles(self) -> bool:
        """Whether every address among the arguments is known to be an operand's."""
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
        """The arguments for other operands; None where these do not lie alike, or a role is not known."""
        others = tensors_of(operands)
        if not self._complete or any(_address_of(others[a]) != _address_of(others[b]) for a, b in self._same):
            return None
        arguments = dict(self._arguments)
        for name, role in self._roles.items():
            known, other = self._tensors[role], others[role]
            if known is None or other is None or other.stride() != known.stride() or other.data_ptr() % 16:
                return None
            arguments[name] = _at(self._arguments[name], other)
        return arguments


def _address_of(value: object) -> int | None:
    """Of a tensor, or of the tensor that a descriptor describes."""
    tensor = getattr(value, "base", value)
    found = getattr(tensor, "data_ptr", None)
    return None if found is None else int(found())


def _at(value: object, tensor: "torch.Tensor") -> object:
    """What stands for this tensor where `value` stood for another: itself, or a descriptor of the same boxes."""
    if not hasattr(value, "base"):
        return tensor
    descriptor = copy(value)
    descriptor.base = tensor
    return descriptor
