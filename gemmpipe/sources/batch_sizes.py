"""The Ms of a decoder's products: numbers, or the name of an engine whose captured batch sizes are meant."""

from collections.abc import Callable, Mapping, Sequence

from gemmpipe.errors import UserError, nearest, quoted
from gemmpipe.parsing import MAX_SIZE

_EXPECTED = f"expected whole numbers from 1 to {MAX_SIZE}, as in [1, 64, 4096], or vllm"
_VLLM_MOST = 512


def vllm_capture_sizes(most: int = _VLLM_MOST) -> list[int]:
    """The batch sizes for which vLLM captures CUDA graphs, by default: its documentation of cudagraph_capture_sizes.

    1, 2, 4, then steps of 8 below 256 and of 16 up to `most`, which vLLM sets to twice max_num_seqs and at most 512.
    """
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]


_ENGINES: Mapping[str, Callable[[], list[int]]] = {"vllm": vllm_capture_sizes}


def batch_sizes(nsets: Sequence[int] | int | str) -> list[int]:
    """Each M once, in the given order. Raises UserError naming shapes.nsets."""
    if isinstance(nsets, str):
        if nsets not in _ENGINES:
            raise UserError(f"shapes.nsets: '{nsets}', {_EXPECTED}{nearest(nsets, _ENGINES)}")
        return _ENGINES[nsets]()
    sizes = [nsets] if isinstance(nsets, int) else list(nsets or ())
    for m in sizes:
        if isinstance(m, bool) or not isinstance(m, int) or not 1 <= m <= MAX_SIZE:
            raise UserError(f"shapes.nsets: {quoted(m)}, {_EXPECTED}")
    if not sizes:
        raise UserError(f"shapes.nsets: empty, {_EXPECTED}")
    return list(dict.fromkeys(sizes))
