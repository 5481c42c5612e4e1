"""What a call copies or converts because it lies in another way than its kernel reads: said once, and in the log.

docs/runtime.md lists every operand and what it costs. A copy that is part of what was tuned (a library that wants
scales in its own layout) is in the tabulated time, and is not told here.
"""

import torch

from gemmpipe.runtime.selection_log import LOG

_ALIGNMENT = 16  # bytes


def log_copied(word: str, tensor: torch.Tensor) -> None:
    """An operand that is copied in every call, since kernels read contiguous tensors at addresses divisible by 16."""
    if tensor.is_contiguous():
        _log_copy(word, tensor, f"begins at no multiple of {_ALIGNMENT} bytes", "")
    else:
        _log_copy(word, tensor, "lies in strides", str(list(tensor.stride())))


def log_copies(**operands: torch.Tensor | None) -> None:
    """Those of some operands, by name, that a library copies in every call as it reads them contiguous and aligned."""
    for word, tensor in operands.items():
        if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT):
            log_copied(word, tensor)


def log_converted(word: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """An operand that every call converts to another type."""
    _log_copy(word, tensor, "is read as", _dtype_name(dtype))


def log_padded(tensor: torch.Tensor, rows: int) -> None:
    """Activations that every call pads, since the candidate computes no fewer rows."""
    _log_copy("x", tensor, "is padded to rows:", str(rows))


def _log_copy(word: str, tensor: torch.Tensor, why: str, what: str) -> None:
    """A warning once for an operand and reason; every shape in the log of GEMMPIPE_LOG_SELECTION."""
    if not LOG.is_first((word, why, what, tensor.shape)):
        return
    size = tensor.numel() * tensor.element_size()
    reason = f"{why} {what}".rstrip()
    text = (
        f"{word} {_dtype_name(tensor.dtype)} {list(tensor.shape)} {reason}: copied in every such call ({size:,} bytes)"
    )
    LOG.warn(f"copied {word} {why}", f"{text}; said once, docs/runtime.md has what copies cost")
    LOG.log_step(text)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
