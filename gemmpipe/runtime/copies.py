"""What a call copies or converts because it lies in another way than its kernel reads: said once, and in the log.

docs/runtime.md lists every operand and what it costs. A copy that is part of what was tuned (a library that wants
scales in its own layout) is in the tabulated time, and is not told here.
"""

import torch

from gemmpipe.runtime.selection import LOG

_ALIGNMENT = 16  # bytes


def tell_copied(word: str, tensor: torch.Tensor) -> None:
    """An operand that is copied in every call, since kernels read contiguous tensors at addresses divisible by 16."""
    if tensor.is_contiguous():
        _tell(word, tensor, f"begins at no multiple of {_ALIGNMENT} bytes", "")
    else:
        _tell(word, tensor, "lies in strides", str(list(tensor.stride())))


def tell_copies(**operands: torch.Tensor | None) -> None:
    """Those of some operands, by name, that a library copies in every call as it reads them contiguous and aligned."""
    for word, tensor in operands.items():
        if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT):
            tell_copied(word, tensor)


def tell_converted(word: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """An operand that every call converts to another type."""
    _tell(word, tensor, "is read as", _name(dtype))


def tell_padded(tensor: torch.Tensor, rows: int) -> None:
    """Activations that every call pads, since the candidate computes no fewer rows."""
    _tell("x", tensor, "is padded to rows:", str(rows))


def _tell(word: str, tensor: torch.Tensor, why: str, what: str) -> None:
    """A warning once for an operand and reason; every shape in the log of GEMMPIPE_LOG_SELECTION."""
    if not LOG.first((word, why, what, tensor.shape)):
        return
    size = tensor.numel() * tensor.element_size()
    reason = f"{why} {what}".rstrip()
    text = f"{word} {_name(tensor.dtype)} {list(tensor.shape)} {reason}: copied in every such call ({size:,} bytes)"
    LOG.warn(f"copied {word} {why}", f"{text}; said once, docs/runtime.md has what copies cost")
    LOG.step(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
