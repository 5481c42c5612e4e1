"""Pre-shuffled weight layouts: the same bytes in the order in which a matrix instruction wants them."""

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
    """Raises UserError for a weight that TILES_16X16 cannot hold: aiter takes 32 elements along K at once."""
    if rows % _TILE or columns % _K_MULTIPLE:
        raise UserError(f"{where}: a pre-shuffled weight of {rows} x {columns}, expected multiples of 16 x 32")


def preshuffle(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """A row-major [N, K] in a layout, its shape unchanged; N is a multiple of 16, K's bytes are too.

    TILES_16X16 is what aiter's `shuffle_weight(w, layout=(16, 16))` makes of 8-bit weights ([N/16, 16, K/32, 2, 16]
    permuted to [N/16, K/32, 2, 16, 16], which its Triton kernels view as (N/16, K*16)) and of 16-bit ones
    ([N/16, 16, K/32, 4, 8] to [N/16, K/32, 4, 16, 8]). Raises ValueError.
    """
    if layout == ROW_MAJOR:
        return w
    stored, step = _check_layout(w, layout)
    rows, columns = w.shape
    tiles = stored.view(rows // _TILE, _TILE, columns // step, step)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def unshuffle(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """The row-major weight that `preshuffle` was given. Raises ValueError."""
    if layout == ROW_MAJOR:
        return w
    stored, step = _check_layout(w, layout)
    rows, columns = w.shape
    tiles = stored.view(rows // _TILE, columns // step, _TILE, step)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def k_major_tiles(w: "torch.Tensor") -> "torch.Tensor":
    """A pre-shuffled [N, K] of bytes as [K/16, N/16, 256], a view: place along K, then which 16 rows, then a tile."""
    rows, columns = w.shape
    return w.view(rows // _TILE, columns // _TILE, _TILE * _TILE).transpose(0, 1)


def as_matrix(w: "torch.Tensor", columns: int) -> "torch.Tensor":
    """A pre-shuffled weight of so many columns as [N, K], also where it comes as aiter views it: (N/16, K*16)."""
    viewed = w.dim() == 2 and w.shape[1] == _TILE * columns and w.is_contiguous()
    return w.view(-1, columns) if viewed else w


def _check_layout(w: "torch.Tensor", layout: str) -> "tuple[torch.Tensor, int]":
    """The weight where a layout can hold it, and how many elements a tile has along K."""
    if layout != TILES_16X16:
        raise ValueError(f"weight layout '{layout}', expected {ROW_MAJOR} or {TILES_16X16}")
    step = _TILE // w.element_size()
    if w.element_size() > 2 or w.dim() != 2 or w.shape[0] % _TILE or w.shape[1] % step:
        expected = "[N, K] of 8 or 16 bits, N and the bytes of K multiples of 16"
        raise ValueError(f"{layout}: {tuple(w.shape)} of {w.dtype}, expected {expected}")
    return w, step
