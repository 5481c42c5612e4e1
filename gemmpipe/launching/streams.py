"""The stream that is current: its handle, and the graph capture that it takes part in."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def current_index(device: "torch.device") -> int:
    """The number of the device, -1 for the CPU."""
    import torch

    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def stream_getter() -> Callable[[int], int]:
    """The function that gives the handle of a GPU's current stream, 30 ns a call."""
    import torch

    getter: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return getter


def capturing() -> bool:
    """Whether the current stream of the current GPU records a graph."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def capture_number(stream: int) -> int | None:
    """The driver's number of the capture that a stream takes part in, None where it does not say."""
    query = _capture_query()
    if query is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    code = query(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if code == 0 and status.value == 1 else None


@cache
def _capture_query() -> Callable[..., int] | None:
    """The driver's function (stream, status, number, and three outputs that may be left out); torch has none."""
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
