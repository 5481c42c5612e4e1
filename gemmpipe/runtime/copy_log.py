"""Reports of operands that a call copies or converts because the kernel cannot read them: one warning, and the log.

docs/reference/runtime.md lists every operand and the cost. A copy that belongs to the tuned candidate (a library with
its own layout of scales) is part of the tabulated time and not reported.
"""

import torch

from gemmpipe.runtime.selection_log import LOG

_ALIGNMENT = 16  # bytes


def log_copied(name: str, tensor: torch.Tensor) -> None:
    """Report an operand copied in every call: kernels read contiguous tensors at addresses divisible by 16."""
    if tensor.is_contiguous():
        _log_copy(name, tensor, f"is not aligned to {_ALIGNMENT} bytes", "")
    else:
        _log_copy(name, tensor, "has strides", str(list(tensor.stride())))


def log_copied_output(y: torch.Tensor, *, direct: bool, shared: bool = False) -> None:
    """Report an output that every call copies: kernels cannot write it, or `direct`, the candidate has its own.

    `shared`: it has x's memory, which kernels still read when they begin to write.
    """
    if direct:
        _log_copy("y", y, "is not written by the candidate, which returns another tensor", "")
    elif shared:
        _log_copy("y", y, "shares memory with x", "")
    else:
        log_copied("y", y)


def log_converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Report an operand that every call converts to another type."""
    _log_copy(name, tensor, "is read as", _dtype_name(dtype))


def log_padded(tensor: torch.Tensor, rows: int) -> None:
    """Report activations that every call pads, since the candidate cannot compute fewer rows."""
    _log_copy("x", tensor, "is padded to rows", str(rows))


def log_added(bias: torch.Tensor) -> None:
    """Report a bias that every call adds after the product, whose kernels have none."""
    if LOG.is_first(("bias", "added", bias.shape)):
        text = f"bias {_dtype_name(bias.dtype)} {list(bias.shape)} is added after the product: one more kernel per call"
        LOG.warn("added bias", f"{text}; reported once, docs/reference/runtime.md lists the cost of operands")
        LOG.log_step(text)


def _log_copy(name: str, tensor: torch.Tensor, why: str, detail: str) -> None:
    """One warning per operand and reason; every shape in the log of GEMMPIPE_LOG_SELECTION."""
    if not LOG.is_first((name, why, detail, tensor.shape)):
        return
    size = tensor.numel() * tensor.element_size()
    reason = f"{why} {detail}".rstrip()
    text = (
        f"{name} {_dtype_name(tensor.dtype)} {list(tensor.shape)} {reason}: copied in every such call ({size:,} bytes)"
    )
    LOG.warn(f"copied {name} {why}", f"{text}; reported once, docs/reference/runtime.md lists the cost of copies")
    LOG.log_step(text)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
