"""Memory between launches: one piece a stream, shared by all launches on it, since those follow one another."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from gemmpipe.launching.streams import capture_number, capturing, current_index, stream_getter

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]
Shape = tuple[tuple[int, ...], str]
"""Of a tensor: sizes and the name of its dtype."""

_ALIGNMENT = 256


class Space(NamedTuple):
    """A workspace as a launch wants it: sizes in elements, addresses, and the tensors that hold the memory."""

    parts: int
    counters: int
    parts_address: int
    counters_address: int
    tensors: Pair


Take = Callable[[int, int, "torch.device"], Space]
"""(parts, counters, device) -> a workspace of at least so many elements for the stream that is current."""


class _Here(threading.local):
    take: Take | None = None
    fresh: bool = False


_HERE = _Here()


@contextmanager
def taking_from(take: Take) -> Iterator[None]:
    """What this thread takes inside comes from elsewhere."""
    before, _HERE.take = _HERE.take, take
    try:
        yield
    finally:
        _HERE.take = before


@contextmanager
def fresh_scratch() -> Iterator[None]:
    """What this thread takes of SCRATCH inside is its own and goes when the call does: a program lends no memory."""
    before, _HERE.fresh = _HERE.fresh, True
    try:
        yield
    finally:
        _HERE.fresh = before


class Workspaces:
    """fp32 parts and int32 arrival counters by device and stream; they grow, and counters are 0 between launches."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Space]] = {}
        self._captured: dict[tuple[int, int], tuple[int, Space]] = {}

    def take(self, parts: int, counters: int, device: "torch.device") -> Pair:
        """At least `parts` fp32 and `counters` int32 elements for launches on the stream that is current now."""
        return (_HERE.take or self.space)(parts, counters, device).tensors

    def by_stream(self, index: int) -> dict[int, Space]:
        """What there is on a device (-1 for the CPU) by stream; good outside of graph captures alone."""
        return self._held.setdefault(index, {})

    def space(self, parts: int, counters: int, device: "torch.device") -> Space:
        """As `take`."""
        index = current_index(device)
        stream = _stream(index)
        if index >= 0 and capturing():
            return self._in_graph(parts, counters, device, (index, stream))
        spaces = self.by_stream(index)
        held = spaces.get(stream)
        if held is None or held.parts < parts or held.counters < counters:
            held = spaces[stream] = grown(held, parts, counters, device)
        return held

    def _in_graph(self, parts: int, counters: int, device: "torch.device", place: tuple[int, int]) -> Space:
        """The workspace of this capture's launches on this stream: the graph's own memory, zeroed once in it.

        Nothing outside the graph may count on it, and no other graph: they may run at the same time. It is held
        until the next capture on the stream, since memory given back is taken again within the same graph.
        """
        number = capture_number(place[1])
        known, held = self._captured.get(place, (None, None))
        if number is None or known != number or held is None or held.parts < parts or held.counters < counters:
            held = made(parts, counters, device)
            if number is not None:
                self._captured[place] = (number, held)
        return held


def grown(held: Space | None, parts: int, counters: int, device: "torch.device") -> Space:
    """A new workspace that serves what the old one served as well."""
    if held is not None:
        parts, counters = max(parts, held.parts), max(counters, held.counters)
    return made(parts, counters, device)


def made(parts: int, counters: int, device: "torch.device") -> Space:
    """A workspace of its own, zeroed on the current stream."""
    import torch

    tensors = (
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    return Space(parts, counters, tensors[0].data_ptr(), tensors[1].data_ptr(), tensors)


def _stream(index: int) -> int:
    return 0 if index < 0 else stream_getter()(index)


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Tensors that live from one launch of a call to a later one, by stream; their contents do not outlive the call.

    A larger call replaces the memory; those bound before keep theirs.
    """

    held: "dict[tuple[int, int], torch.Tensor]" = field(default_factory=dict)

    def take(self, shapes: Mapping[str, Shape], device: "torch.device") -> "dict[str, torch.Tensor]":
        """Contiguous tensors of these shapes, at addresses divisible by 256, for launches on the current stream."""
        import torch

        dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in shapes.items()}
        sizes = {name: prod(shape) * dtypes[name].itemsize for name, (shape, _) in shapes.items()}
        needed = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()) + _ALIGNMENT
        memory = self._memory(needed, device)
        offset, found = -memory.data_ptr() % _ALIGNMENT, {}
        for name, (shape, _) in shapes.items():
            found[name] = memory[offset : offset + sizes[name]].view(dtypes[name]).view(shape)
            offset += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        return found

    def _memory(self, needed: int, device: "torch.device") -> "torch.Tensor":
        import torch

        index = current_index(device)
        if _HERE.fresh or (index >= 0 and capturing()):
            return torch.empty(needed, dtype=torch.uint8, device=device)  # the call's own, or the graph's
        place = (index, _stream(index))
        memory = self.held.get(place)
        if memory is None or memory.numel() < needed:
            memory = self.held[place] = torch.empty(needed, dtype=torch.uint8, device=device)
        return memory


WORKSPACES = Workspaces()
SCRATCH = Scratch()
