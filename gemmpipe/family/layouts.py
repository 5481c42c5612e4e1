"""Pre-shuffled weight layouts: the weight's bytes in the order in which matrix instructions read them."""

from typing import TYPE_CHECKING

from gemmpipe.core.errors import UserError

if TYPE_CHECKING:
    import torch

ROW_MAJOR = "nk"
TILES_16X16 = "n16k16"
"""Tiles of 16 rows and 16 bytes: byte (n, k) at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16.

K counts bytes: a tile holds 16 elements of 8 bits along K, or 8 of 16 bits.
"""

_TILE = 16
_K_MULTIPLE = 32


def check_preshuffle_shape(where: str, rows: int, columns: int) -> None:
    """Raise UserError for a weight that does not fit TILES_16X16; aiter reads 32 elements along K at a time."""
    if rows % _TILE or columns % _K_MULTIPLE:
        raise UserError(f"{where}: a pre-shuffled weight of {rows} x {columns}, expected multiples of 16 x 32")


def preshuffle(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """A row-major [N, K] converted to a layout, with unchanged shape; N and the bytes of K are multiples of 16.

    TILES_16X16 is the result of aiter's `shuffle_weight(w, layout=(16, 16))` for 8-bit weights ([N/16, 16, K/32, 2, 16]
    permuted to [N/16, K/32, 2, 16, 16], which its Triton kernels view as (N/16, K*16)) and for 16-bit weights
    ([N/16, 16, K/32, 4, 8] to [N/16, K/32, 4, 16, 8]). Raises ValueError.
    """
    if layout == ROW_MAJOR:
        return w
    stored, step = _check_layout(w, layout)
    rows, columns = w.shape
    tiles = stored.view(rows // _TILE, _TILE, columns // step, step)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def unshuffle(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """The inverse of `preshuffle`: the row-major weight. Raises ValueError."""
    if layout == ROW_MAJOR:
        return w
    stored, step = _check_layout(w, layout)
    rows, columns = w.shape
    tiles = stored.view(rows // _TILE, columns // step, _TILE, step)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def k_major_tiles(w: "torch.Tensor") -> "torch.Tensor":
    """A view of a pre-shuffled [N, K] of bytes as [K/16, N/16, 256]: tile index along K, along N, bytes of a tile."""
    rows, columns = w.shape
    return w.view(rows // _TILE, columns // _TILE, _TILE * _TILE).transpose(0, 1)


def as_matrix(w: "torch.Tensor", columns: int) -> "torch.Tensor":
    """A pre-shuffled weight with K = `columns` as [N, K], given as [N, K] or in aiter's view (N/16, K*16)."""
    viewed = w.dim() == 2 and w.shape[1] == _TILE * columns and w.is_contiguous()
    return w.view(-1, columns) if viewed else w


def _check_layout(w: "torch.Tensor", layout: str) -> "tuple[torch.Tensor, int]":
    """The weight and the elements of a tile along K. Raises ValueError if the weight does not fit the layout."""
    if layout != TILES_16X16:
        raise ValueError(f"weight layout '{layout}', expected {ROW_MAJOR} or {TILES_16X16}")
    step = _TILE // w.element_size()
    if w.element_size() > 2 or w.dim() != 2 or w.shape[0] % _TILE or w.shape[1] % step:
        expected = "[N, K] of 8 or 16 bits, N and the bytes of K multiples of 16"
        raise ValueError(f"{layout}: {tuple(w.shape)} of {w.dtype}, expected {expected}")
    return w, step
