"""Replays of CUDA graphs after a launch with programmatic dependent launch, which makes their kernels start sooner.

On an H200 every kernel of a CUDA graph starts 0.1 to 0.7 us sooner if the last kernel that was launched on the
replay's stream outside a graph has this attribute, which GPUs from sm_90 on have: a decode step of 24 layers in torch
takes 3.35 ms instead of the 3.50 that it takes after 40 ordinary kernels, as an engine's sampler launches them (driver
580; docs/results/runtime.md). NVIDIA does not document it. Other launches end the state, as those of another stream do.
Which kernel sets it does not matter: here it is one that waits for the end of the one before it, and does nothing.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import Build, Device
from gemmpipe.core.device import gpu_device
from gemmpipe.core.errors import one_line
from gemmpipe.launch.build import find_kernel, is_interpreted, load_build
from gemmpipe.launch.source_hash import source_hash

if TYPE_CHECKING:
    import torch

_KERNEL = "gemmpipe.launch._empty:dependent"
_OLDEST = 90  # the architecture that introduced programmatic dependent launch
_LOG = logging.getLogger("gemmpipe.replays")
_REPLACED: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
"""(torch's own `CUDAGraph.replay`, ours), while `shorten_replays` is in force."""


def no_dependent_launch_reason(device: Device) -> str:
    """Why a device has no dependent launches; empty if it has them."""
    if device.kind != "cuda":
        return f"no NVIDIA GPU, {device.kind}"
    if int(device.gfx.removeprefix("sm_")) < _OLDEST:
        return f"{device.gfx} is older than sm_{_OLDEST}"
    return ""


def dependent_launch(device: Device) -> Callable[[], None] | None:
    """A launch with programmatic dependent launch on the stream that is current at the call, of a kernel without work.

    None for a device without such launches. Raises all errors of the compiler and the driver.
    """
    if no_dependent_launch_reason(device):
        return None
    if is_interpreted(find_kernel(_KERNEL)):
        return None
    return load_build(dependent_build(), device).launcher((1, 1, 1), {})


def dependent_build() -> Build:
    """The build of the kernel that is launched."""
    options = (("launch_pdl", True), ("num_warps", 1))
    hashed = source_hash(find_kernel(_KERNEL))
    return Build(kernel=_KERNEL, source_hash=hashed, signature=(), constants=(), aligned=(), options=options)


def shorten_replays() -> None:
    """From now on a dependent launch precedes each `torch.cuda.CUDAGraph.replay()` in this process.

    It is launched on the current stream of the current device, which are the replay's unless a program replays a graph
    of another device. Results of graphs do not change. On a GPU without such launches, and in a stream that captures a
    graph, replays stay as they are. CUDA is not initialised before the first replay, so that processes may be forked.
    """
    import torch

    if _REPLACED:
        return
    original = torch.cuda.CUDAGraph.replay

    @wraps(original)
    def replay(self: "torch.cuda.CUDAGraph") -> None:
        if not torch.cuda.is_current_stream_capturing():
            launch = _launch_on(torch.cuda.current_device())
            if launch is not None:
                launch()
        original(self)

    _REPLACED.append((original, replay))
    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def restore_replays() -> None:
    """Undo `shorten_replays`, unless another library has replaced `replay` since."""
    import torch

    if _REPLACED and torch.cuda.CUDAGraph.replay is _REPLACED[0][1]:
        torch.cuda.CUDAGraph.replay = _REPLACED.pop()[0]  # type: ignore[method-assign]


@lru_cache(maxsize=64)
def _launch_on(index: int) -> Callable[[], None] | None:
    """The dependent launch on the GPU with this index in torch's numbering, which is the current one.

    None where there are none, and after a warning if it cannot be made: replays work without it.
    """
    try:
        return dependent_launch(gpu_device(index))
    except Exception as error:  # noqa: BLE001 - any error of the compiler or the driver
        _LOG.warning("no dependent launch before replays on GPU %d: %s", index, one_line(error))
        return None
