"""Replays of CUDA graphs after a launch with programmatic dependent launch, which makes their kernels start sooner.

On NVIDIA GPUs from sm_90 on, every kernel of a CUDA graph starts 0.1 to 0.7 us sooner if the last kernel that was
launched on the replay's stream outside a graph has this attribute: a decode step of 24 layers in torch takes 3.35
instead of 3.50 ms (H200, driver 580; docs/results/runtime.md). The driver's documentation does not mention it. The
state lasts until other launches end it, as those of another stream do, so that an engine's graphs are mostly in the
slower one. Which kernel it is does not matter: here it is an empty one.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import Build, Device
from gemmpipe.core.device import gpu_device
from gemmpipe.core.errors import one_line
from gemmpipe.launch.build import find_kernel, is_interpreted, load_build
from gemmpipe.launch.source_hash import source_hash

if TYPE_CHECKING:
    import torch

_KERNEL = "gemmpipe.launch._empty:empty"
_OLDEST = 90  # the architecture that introduced programmatic dependent launch
_LOG = logging.getLogger("gemmpipe.replays")
_REPLACED: list[Callable[..., Any]] = []
"""torch's own `CUDAGraph.replay`, while `shorten_replays` is in force."""


def dependent_launch(device: Device) -> Callable[[], None] | None:
    """A launch of an empty kernel with programmatic dependent launch on the stream that is current at the call.

    None for a device without such launches. Raises all errors of the compiler and the driver.
    """
    if device.kind != "cuda" or int(device.gfx.removeprefix("sm_")) < _OLDEST:
        return None
    function = find_kernel(_KERNEL)
    if is_interpreted(function):
        return None
    options = (("launch_pdl", True), ("num_warps", 1))
    build = Build(
        kernel=_KERNEL, source_hash=source_hash(function), signature=(), constants=(), aligned=(), options=options
    )
    return load_build(build, device).launcher((1, 1, 1), {})


def shorten_replays() -> None:
    """From now on a dependent launch precedes each `torch.cuda.CUDAGraph.replay()` in this process.

    Results of graphs do not change. On a GPU without such launches
    replays stay as they are. CUDA is not initialised before the first replay, so that processes may still be forked.
    """
    import torch

    if _REPLACED:
        return
    original = torch.cuda.CUDAGraph.replay

    def replay(self: "torch.cuda.CUDAGraph") -> None:
        if (launch := _launch_on(torch.cuda.current_device())) is not None:
            launch()
        original(self)

    _REPLACED.append(original)
    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def restore_replays() -> None:
    """Undo `shorten_replays`."""
    import torch

    if _REPLACED:
        torch.cuda.CUDAGraph.replay = _REPLACED.pop()  # type: ignore[method-assign]


@lru_cache(maxsize=64)
def _launch_on(index: int) -> Callable[[], None] | None:
    """The dependent launch on the GPU with this index in torch's numbering, which is the current one.

    None where there are none, and after a warning if it fails: replays work without it.
    """
    try:
        return dependent_launch(gpu_device(index))
    except Exception as error:  # noqa: BLE001 - any error of the compiler or the driver
        _LOG.warning("no dependent launch before replays on GPU %d: %s", index, one_line(error))
        return None
