"""Memory between launches: one piece a stream, shared by all launches on it, since those follow one another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]
Shape = tuple[tuple[int, ...], str]
"""Of a tensor: sizes and the name of its dtype."""

_ALIGNMENT = 256


class Workspaces:
    """fp32 parts and int32 arrival counters by stream; they grow, and counters are 0 between launches."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Pair] = {}

    def take(self, parts: int, counters: int, device: "torch.device") -> Pair:
        """At least `parts` fp32 and `counters` int32 elements for launches on the stream that is current now."""
        import torch

        stream = _stream(device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The zeroing becomes part of the graph, so nothing outside of it may count on these.
            return _make(parts, counters, device)
        held = self._held.get((str(device), stream))
        if held is None or held[0].numel() < parts or held[1].numel() < counters:
            before = held or _make(0, 0, device)
            held = _make(max(parts, before[0].numel()), max(counters, before[1].numel()), device)
            self._held[(str(device), stream)] = held
        return held


def _make(parts: int, counters: int, device: "torch.device") -> Pair:
    import torch

    return (
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _stream(device: "torch.device") -> int:
    import torch

    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Tensors that live from one launch of a call to a later one, by stream; their contents do not outlive the call.

    A larger call replaces the memory; those bound before keep theirs.
    """

    held: "dict[tuple[str, int], torch.Tensor]" = field(default_factory=dict)

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

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.empty(needed, dtype=torch.uint8, device=device)  # the graph's own
        place = (str(device), _stream(device))
        memory = self.held.get(place)
        if memory is None or memory.numel() < needed:
            memory = self.held[place] = torch.empty(needed, dtype=torch.uint8, device=device)
        return memory


WORKSPACES = Workspaces()
SCRATCH = Scratch()
