"""Loaded kernels bound to all arguments but addresses, and memory for compiled graphs outside of their pools.

Split-K's workspaces must not be in the memory of a compiled graph, which belongs to torch's compiler.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from gemmpipe.runtime.descriptors import DescriptorCache, DescriptorForm, EncodedLauncher, encoded_launcher

BoundLaunch = Callable[[int, list[object]], None]
_DIRECT_LAUNCH_TRITON = "3.6."
"""The Triton version with a compiled launcher that runs without its Python wrapper (tested): 0.6 us less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundKernel:
    """Fill the addresses into a copy of `values`, then call `launch(stream, values)`.

    Addresses are integers: the launcher does not query the driver about them. The kernel runs on the device that was
    current when it was loaded, on the stream of this handle.
    """

    launch: BoundLaunch
    values: tuple[object, ...]
    """Every value that the launcher takes, in the order of the signature; None for an address to be filled in."""
    positions: Mapping[str, int]
    """Parameter name -> index in `values`."""
    descriptors: Mapping[str, DescriptorCache] = field(default_factory=dict)
    """Parameter name -> what is filled in instead of the address, for an operand with a descriptor."""


def bind_launch(
    loaded: LoadedKernel,
    grid: tuple[int, int, int],
    cluster: int,
    arguments: Mapping[str, object],
    *,
    launch_pdl: bool = True,
) -> BoundKernel:
    """Bind a loaded kernel; `arguments` has every parameter that is neither constant nor workspace.

    The addresses of their tensors and descriptors are not bound. `launch_pdl`: see LoadedKernel.triton_launcher.
    """
    known = {**dict(loaded.build.constants), **arguments}
    names = [name for name, _ in loaded.build.signature]
    patterns = {name: known[name] for name in names if _is_descriptor(known.get(name))}
    launch, encoded = _launch(loaded, grid, cluster, [names.index(name) for name in patterns], launch_pdl=launch_pdl)
    values: list[object] = []
    positions: dict[str, int] = {}
    caches: dict[str, DescriptorCache] = {}
    for index, name in enumerate(names):
        positions[name] = len(values)
        if name not in patterns:
            values.append(None if isinstance(known.get(name), torch.Tensor) else known.get(name))
            continue
        pattern = patterns[name]
        form = DescriptorForm(cache=DescriptorCache(pattern)) if encoded is None else encoded.form(index, pattern)
        caches[name] = form.cache
        values += [None, *form.constant]
    return BoundKernel(launch=launch, values=tuple(values), positions=positions, descriptors=caches)


def _is_descriptor(value: object) -> bool:
    return isinstance(getattr(value, "base", None), torch.Tensor)


def _launch(
    loaded: LoadedKernel, grid: tuple[int, int, int], cluster: int, described: Sequence[int], *, launch_pdl: bool
) -> tuple[BoundLaunch, EncodedLauncher | None]:
    """(the launch, the launcher if it takes encoded descriptors); `described`: the indices of descriptors."""
    from triton import __version__ as version

    run, function = loaded.triton_launcher(launch_pdl=launch_pdl), loaded.kernel.function
    (x, y, z), metadata = loaded.cluster_launch(grid, cluster)
    if version.startswith(_DIRECT_LAUNCH_TRITON) and type(run).__name__ == "CudaLauncher" and not _scratch_bytes(run):
        encoded = encoded_launcher(run.launch, described) if described else None
        start = run.launch if encoded is None else encoded.start
        together, early = run.launch_cooperative_grid, run.launch_pdl

        def direct(stream: int, values: list[object]) -> None:
            start(x, y, z, stream, function, together, early, None, None, metadata, None, None, None, *values)

        return direct, encoded

    def launch(stream: int, values: list[object]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *values)

    return launch, None


def _scratch_bytes(run: Any) -> int:
    return int(run.global_scratch_size) + int(run.profile_scratch_size)


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
