"""Tensor descriptors of a bound kernel's operands by address: made at the first use, then found by a look-up.

Triton encodes a descriptor at every launch: 2 to 3 us of the host's time for four of them (H200's host, Triton 3.6).
Only its address changes between the calls of a bound kernel, so a call can give Triton's compiled launcher the encoded
one.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from gemmpipe.runtime.operands import ALIGNMENT

_WRAPPER_VARIABLES = ("launcher", "tensordesc_indices", "tensordesc_meta")
"""Variables of the function with which Triton 3.6 encodes descriptors, then calls its compiled launcher."""
_MAX_DESCRIPTORS = 1024  # per operand; one has about 300 bytes


class _AddressHolder:
    """Replaces the tensor of a descriptor, without keeping its memory alive."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class DescriptorCache(dict[int, object]):
    """By address, what a launcher takes for an operand: copies of the descriptor `pattern`, encoded by `encode`.

    None for an address that no kernel takes.
    """

    def __init__(self, pattern: object, encode: Callable[[object], object] | None = None) -> None:
        super().__init__()
        self._pattern = copy(pattern)
        self._pattern.base = None  # type: ignore[attr-defined]
        self._encode = encode

    def __missing__(self, address: int) -> object:
        if address & ALIGNMENT:  # the call copies such an operand, and cannot encode a descriptor of it
            return None
        made = copy(self._pattern)
        made.base = _AddressHolder(address)  # type: ignore[attr-defined]
        if self._encode is not None:
            made = self._encode(made)
        if len(self) >= _MAX_DESCRIPTORS:
            self.clear()
        self[address] = made
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class DescriptorForm:
    """The form in which a launcher takes a descriptor: some values, of which the first depends on the address."""

    cache: DescriptorCache
    constant: tuple[object, ...] = ()
    """The values after the first: sizes and strides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedLauncher:
    """Triton's compiled launcher, which takes encoded descriptors."""

    start: Callable[..., object]
    metadata: Mapping[int, Any]
    """By the index of an argument, what Triton's compiler knows of its descriptor: element, box, swizzle."""

    def form(self, index: int, pattern: object) -> DescriptorForm:
        """The form of the argument with this index."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        metadata = self.metadata[index]
        return DescriptorForm(
            cache=DescriptorCache(pattern, lambda descriptor: make_tensordesc_arg(descriptor, metadata)[0]),
            constant=tuple(make_tensordesc_arg(pattern, metadata)[1:]),
        )


def encoded_launcher(launch: object, described: Sequence[int]) -> EncodedLauncher | None:
    """The compiled launcher inside of Triton 3.6's `launch`; None if this has another form.

    `described`: the indices of arguments for which there are descriptors.
    """
    if not inspect.isfunction(launch):
        return None
    variables = inspect.getclosurevars(launch).nonlocals
    if not all(name in variables for name in _WRAPPER_VARIABLES):
        return None
    start, indices, metadata = (variables[name] for name in _WRAPPER_VARIABLES)
    if sorted(indices) != sorted(described) or len(metadata) != len(indices) or None in metadata:
        return None
    return EncodedLauncher(start=start, metadata=dict(zip(sorted(indices), metadata, strict=True)))
