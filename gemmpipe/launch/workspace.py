"""Device memory for launches: one workspace per stream, shared by all launches on it, since these run in order.

Also queries about the current stream: its handle, and the graph capture in which it takes part.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


def current_device_index(device: "torch.device") -> int:
    """The index of the device, -1 for the CPU."""
    import torch

    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def stream_getter() -> Callable[[int], int]:
    """The function that returns the handle of a GPU's current stream, 30 ns per call."""
    import torch

    getter: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return getter


def stream_is_capturing() -> bool:
    """True if the current stream of the current GPU captures a graph."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def capture_id(stream: int) -> int | None:
    """The driver's id of the capture in which a stream takes part, None if unknown."""
    query = _capture_query()
    if query is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    code = query(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if code == 0 and status.value == 1 else None


@cache
def _capture_query() -> Callable[..., int] | None:
    """The driver's function (stream, status, id, and three optional outputs), which torch does not offer."""
    import torch

    library, name = ("libcuda.so.1", "cuStreamGetCaptureInfo_v2")
    if torch.version.hip:
        library, name = "libamdhip64.so", "hipStreamGetCaptureInfo_v2"
    if sys.platform == "win32":
        return None
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None
    return found


WorkspaceTensors = tuple["torch.Tensor", "torch.Tensor"]
TensorShape = tuple[tuple[int, ...], str]
"""Sizes and dtype name of a tensor."""

_ALIGNMENT = 256


class WorkspaceBuffers(NamedTuple):
    """A workspace for launches: sizes in elements, addresses, and the tensors that own the memory."""

    parts: int
    counters: int
    parts_address: int
    counters_address: int
    tensors: WorkspaceTensors


WorkspaceAllocator = Callable[[int, int, "torch.device"], WorkspaceBuffers]
"""(parts, counters, device) -> a workspace of at least these numbers of elements for the current stream."""


class _ThreadState(threading.local):
    take: WorkspaceAllocator | None = None
    fresh: bool = False


_THREAD = _ThreadState()


@contextmanager
def use_allocator(take: WorkspaceAllocator) -> Iterator[None]:
    """Within the block, this thread's workspaces come from `take`."""
    before, _THREAD.take = _THREAD.take, take
    try:
        yield
    finally:
        _THREAD.take = before


@contextmanager
def unshared_scratch() -> Iterator[None]:
    """Within the block, this thread's SCRATCH tensors are new memory that is freed with them, not kept for reuse."""
    before, _THREAD.fresh = _THREAD.fresh, True
    try:
        yield
    finally:
        _THREAD.fresh = before


class Workspaces:
    """fp32 parts and int32 arrival counters by device and stream; they grow, and counters are 0 between launches."""

    def __init__(self) -> None:
        self._buffers: dict[int, dict[int, WorkspaceBuffers]] = {}
        self._captured: dict[tuple[int, int], tuple[int, WorkspaceBuffers]] = {}

    def take(self, parts: int, counters: int, device: "torch.device") -> WorkspaceTensors:
        """At least `parts` fp32 and `counters` int32 elements for launches on the current stream."""
        return (_THREAD.take or self.space)(parts, counters, device).tensors

    def by_stream(self, index: int) -> dict[int, WorkspaceBuffers]:
        """The workspaces of a device (-1 for the CPU) by stream; not for launches in a graph capture."""
        return self._buffers.setdefault(index, {})

    def space(self, parts: int, counters: int, device: "torch.device") -> WorkspaceBuffers:
        """Like `take`, with addresses."""
        index = current_device_index(device)
        stream = _stream(index)
        if index >= 0 and stream_is_capturing():
            return self._in_graph(parts, counters, device, (index, stream))
        spaces = self.by_stream(index)
        held = spaces.get(stream)
        if held is None or held.parts < parts or held.counters < counters:
            held = spaces[stream] = grow_workspace(held, parts, counters, device)
        return held

    def _in_graph(self, parts: int, counters: int, device: "torch.device", place: tuple[int, int]) -> WorkspaceBuffers:
        """The workspace of the capture's launches on this stream: the graph's own memory, zeroed once in the graph.

        It is not shared with launches outside the graph or with another graph, which may run at the same time. It is
        kept until the next capture on the stream, since freed memory would be reused within the same graph.
        """
        number = capture_id(place[1])
        known, held = self._captured.get(place, (None, None))
        if number is None or known != number or held is None or held.parts < parts or held.counters < counters:
            held = allocate_workspace(parts, counters, device)
            if number is not None:
                self._captured[place] = (number, held)
        return held


def grow_workspace(
    held: WorkspaceBuffers | None, parts: int, counters: int, device: "torch.device"
) -> WorkspaceBuffers:
    """A new workspace at least as large as the old one."""
    if held is not None:
        parts, counters = max(parts, held.parts), max(counters, held.counters)
    return allocate_workspace(parts, counters, device)


def allocate_workspace(parts: int, counters: int, device: "torch.device") -> WorkspaceBuffers:
    """A new workspace, with counters zeroed on the current stream."""
    import torch

    tensors = (
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    return WorkspaceBuffers(parts, counters, tensors[0].data_ptr(), tensors[1].data_ptr(), tensors)


def _stream(index: int) -> int:
    return 0 if index < 0 else stream_getter()(index)


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Temporary tensors shared by the launches of one call, in memory per stream; valid during the call only.

    A call that needs more replaces the memory; calls bound earlier keep theirs.
    """

    held: "dict[tuple[int, int], torch.Tensor]" = field(default_factory=dict)

    def take(self, shapes: Mapping[str, TensorShape], device: "torch.device") -> "dict[str, torch.Tensor]":
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

        index = current_device_index(device)
        if _THREAD.fresh or (index >= 0 and stream_is_capturing()):
            return torch.empty(needed, dtype=torch.uint8, device=device)  # owned by the call or the graph
        place = (index, _stream(index))
        memory = self.held.get(place)
        if memory is None or memory.numel() < needed:
            memory = self.held[place] = torch.empty(needed, dtype=torch.uint8, device=device)
        return memory


WORKSPACES = Workspaces()
SCRATCH = Scratch()
