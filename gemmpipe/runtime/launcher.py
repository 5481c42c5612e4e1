"""Loaded kernels bound to all arguments but addresses, and memory for compiled graphs outside of their pools.

Split-K's workspaces must not be in the memory of a compiled graph, which belongs to torch's compiler.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar

import torch

from gemmpipe.launch.build import LoadedKernel
from gemmpipe.launch.workspace import (
    WORKSPACES,
    WorkspaceBuffers,
    allocate_workspace,
    current_device_index,
    grow_workspace,
    stream_getter,
    stream_is_capturing,
)

BoundLaunch = Callable[[int, list[object]], None]
_DIRECT_LAUNCH_TRITON = "3.6."
"""The Triton version with a compiled launcher that runs without its Python wrapper (tested): 0.6 us less."""
_MAX_DESCRIPTORS = 1024  # per operand; one has about 300 bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundKernel:
    """Fill the addresses into a copy of `values`, then call `launch(stream, values)`.

    Addresses are integers: the launcher does not query the driver about them. The kernel runs on the device that was
    current when it was loaded, on the stream of this handle.
    """

    launch: BoundLaunch
    values: tuple[object, ...]
    """Every argument in the order of the signature; None for an address to be filled in."""
    positions: Mapping[str, int]
    """Parameter name -> index in `values`."""


def bind_launch(
    loaded: LoadedKernel,
    grid: tuple[int, int, int],
    cluster: int,
    arguments: Mapping[str, object],
    *,
    launch_pdl: bool = True,
) -> BoundKernel:
    """Bind a loaded kernel; `arguments` has every parameter that is neither constant nor address.

    `launch_pdl`: see LoadedKernel.triton_launcher.
    """
    known = {**dict(loaded.build.constants), **arguments}
    positions = {name: index for index, (name, _) in enumerate(loaded.build.signature)}
    return BoundKernel(
        launch=_launch(loaded, grid, cluster, launch_pdl=launch_pdl),
        values=tuple(known.get(name) for name in positions),
        positions=positions,
    )


def _launch(loaded: LoadedKernel, grid: tuple[int, int, int], cluster: int, *, launch_pdl: bool) -> BoundLaunch:
    from triton import __version__ as version

    run, function = loaded.triton_launcher(launch_pdl=launch_pdl), loaded.kernel.function
    (x, y, z), metadata = loaded.cluster_launch(grid, cluster)
    if version.startswith(_DIRECT_LAUNCH_TRITON) and type(run).__name__ == "CudaLauncher" and not _scratch_bytes(run):
        start, together, early = run.launch, run.launch_cooperative_grid, run.launch_pdl

        def direct(stream: int, values: list[object]) -> None:
            start(x, y, z, stream, function, together, early, None, None, metadata, None, None, None, *values)

        return direct

    def launch(stream: int, values: list[object]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *values)

    return launch


def _scratch_bytes(run: Any) -> int:
    return int(run.global_scratch_size) + int(run.profile_scratch_size)


class _AddressHolder:
    """Replaces the tensor of a descriptor, without keeping its memory alive."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class DescriptorCache(dict[int, object]):
    """Tensor descriptors by address, copies of `pattern` made at the first use."""

    def __init__(self, pattern: object) -> None:
        super().__init__()
        self._pattern = copy(pattern)
        self._pattern.base = None  # type: ignore[attr-defined]

    def __missing__(self, address: int) -> object:
        made = copy(self._pattern)
        made.base = _AddressHolder(address)  # type: ignore[attr-defined]
        if len(self) >= _MAX_DESCRIPTORS:
            self.clear()
        self[address] = made
        return made


T = TypeVar("T")


def outside_graph_pools(make: Callable[[], T], device: torch.device) -> T:
    """`make()` in a separate thread, complete when it returns.

    During the warm-up of a compiled graph all memory of its thread comes from the graph's pool, which later replays
    overwrite.
    """
    if device.type != "cuda":
        return make()
    results: list[T] = []
    errors: list[BaseException] = []
    before = torch.cuda.current_stream(device)

    def work() -> None:
        try:
            with torch.no_grad(), torch.cuda.device(device):
                stream = torch.cuda.current_stream(device)
                stream.wait_stream(before)
                results.append(make())
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class GraphWorkspaces:
    """One workspace per thread and stream, made outside of all graphs' pools and never freed.

    torch.compile's graphs of a device share one pool, so they run one after another, like launches of one thread on
    one stream. They are captured after a warm-up of the same calls, on the same stream. A user's own graph may run
    concurrently with any other, and gets a separate workspace.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], WorkspaceBuffers] = {}
        self._outgrown: list[WorkspaceBuffers] = []
        """Replaced workspaces: graphs captured before still write there."""

    def take(self, parts: int, counters: int, device: torch.device) -> WorkspaceBuffers:
        """The workspace for launches on the current stream."""
        index = current_device_index(device)
        stream = stream_getter()(index) if index >= 0 else 0
        key = (get_ident(), index, stream)
        held = self._held.get(key)
        fits = held is not None and held.parts >= parts and held.counters >= counters
        if index >= 0 and stream_is_capturing():
            if not _is_capturing_compiled_graph(index, stream):
                return WORKSPACES.space(parts, counters, device)
            return held if held is not None and fits else allocate_workspace(parts, counters, device)
        if held is None or not fits:
            if held is not None:
                self._outgrown.append(held)
            before = held
            held = self._held[key] = outside_graph_pools(
                lambda: grow_workspace(before, 2 * parts, counters, device), device
            )
        return held


def _is_capturing_compiled_graph(index: int, stream: int) -> bool:
    """True if torch.compile captures its graphs on this stream."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_manager(index, create_if_none_exists=False)
    return manager is not None and manager.stream.cuda_stream == stream


GRAPH_WORKSPACES = GraphWorkspaces()
