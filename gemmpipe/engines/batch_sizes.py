"""The numbers of rows with which engines multiply: batch sizes of CUDA graphs, and those of prefill.

From the sources of vLLM 0.25.1 and 0.33.0 (`VllmConfig._set_cudagraph_sizes`, `EngineArgs.get_batch_defaults`) and
SGLang 0.5.23 (`handle_gpu_memory_settings`, `generate_decode_cuda_graph_batch_sizes`,
`generate_prefill_cuda_graph_batch_sizes`), without speculative decoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmpipe.engines.packages import VLLM

VLLM_MAX_CAPTURE = 512
"""vLLM's largest batch size of a graph by default; 1024 on Blackwell of data centers."""
_BLACKWELL = ("sm_100", "sm_103")
_MEMORY_GIB: Mapping[str, int] = {
    "sm_80": 80,
    "sm_90": 80,
    "sm_100": 180,
    "sm_103": 270,
    "gfx942": 192,
    "gfx950": 288,
}
"""The least memory of data-center devices of an architecture: engines' defaults have steps at 70, 90 and 160."""
OTHER_GIB = 24
"""The memory that is assumed for other devices, in GiB."""
_A100 = "sm_80"


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """An engine's limits of a batch, as it sets them without arguments or as the user gives them."""

    requests: int
    """Requests that run at a time."""
    tokens: int
    """Tokens of a step, at most: rows of a product in prefill."""
    captured: int
    """The largest batch size of a CUDA graph."""


def knows_memory(gfx: str) -> bool:
    """True if the least memory of an architecture's devices is known."""
    return gfx in _MEMORY_GIB


def default_limits(engine: str, gfx: str, tp: int, memory_gib: int | None) -> BatchLimits:
    """The limits of a server that is launched without arguments about them; memory in GiB (None: by architecture)."""
    memory = _MEMORY_GIB.get(gfx, OTHER_GIB) if memory_gib is None else memory_gib
    if engine == VLLM:
        large = memory >= 70 and gfx != _A100
        requests = 1024 if large else 256
        tokens = 16384 if memory >= 160 else 8192 if large else 2048
        most = 1024 if gfx in _BLACKWELL else VLLM_MAX_CAPTURE
        return BatchLimits(requests=requests, tokens=tokens, captured=min(2 * requests, most, tokens))
    steps = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
    for below, tokens, small, large_tp in steps:
        if memory < below:
            captured = small if tp < 4 else large_tp
            return BatchLimits(requests=captured, tokens=tokens, captured=captured)
    return BatchLimits(requests=512, tokens=16384, captured=512)


def vllm_capture_sizes(most: int) -> list[int]:
    """The batch sizes for which vLLM captures CUDA graphs: 1, 2, 4, then steps of 8 below 256 and of 16 to `most`."""
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]


def sglang_capture_sizes(most: int) -> list[int]:
    """The batch sizes for which SGLang captures CUDA graphs of decode, `most` included."""
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32))
    return sorted({*(size for size in sizes if size <= most), most})


def sglang_prefill_sizes(most: int) -> list[int]:
    """The token counts for which SGLang captures graphs of prefill: a step is padded to the next of them."""
    fine = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    return [size for size in (*fine, *range(1280, 4097, 256), *range(4608, most + 1, 512)) if size <= most]


def decode_sizes(engine: str, limits: BatchLimits, given: Sequence[int] | None) -> list[int]:
    """The batch sizes of decode, ascending: `given` or the engine's own up to `limits.captured`."""
    if given is not None:
        return sorted({size for size in given if size <= limits.tokens})
    if engine != VLLM:
        return sglang_capture_sizes(limits.captured)
    own = vllm_capture_sizes(limits.captured)
    more = [size for size in (limits.tokens, limits.requests) if size <= limits.captured]
    return sorted({*own, *more})


def prefill_sizes(limits: BatchLimits) -> list[int]:
    """Rows of prefill: any number up to `limits.tokens` occurs; the powers of two above the graphs, and that limit."""
    powers = []
    size = 1
    while size < limits.tokens:
        if size > limits.captured:
            powers.append(size)
        size *= 2
    return [*powers, limits.tokens]
