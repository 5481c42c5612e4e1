"""Scales in the memory order that a library insists on; the copy that this takes is part of the library's call."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gemmpipe.spec import COLUMN

if TYPE_CHECKING:
    import torch


def in_order(scales: "torch.Tensor", order: str) -> "tuple[torch.Tensor, Callable[[], object]]":
    """(scales [M, blocks] without gaps in this order, what is to be called before each product that reads them).

    Scales that lie so already are given back themselves, and the call does nothing; others are copied by it.
    """
    import torch

    if (scales.mT if order == COLUMN else scales).is_contiguous():
        return scales, nothing
    rows, blocks = scales.shape
    strides = (1, rows) if order == COLUMN else (blocks, 1)
    kept = torch.empty_strided((rows, blocks), strides, dtype=scales.dtype, device=scales.device)
    return kept, lambda: kept.copy_(scales)


def nothing() -> object:
    """What is to be called before a product whose scales lie as they should."""
