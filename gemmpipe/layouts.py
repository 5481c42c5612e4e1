"""Pre-shuffled weight layouts: the same bytes in the order in which a matrix instruction wants them."""

from typing import TYPE_CHECKING

from gemmpipe.errors import UserError

if TYPE_CHECKING:
    import torch

PLAIN = "nk"
TILES_16X16 = "n16k16"
"""Tiles of 16 rows and 16 bytes: byte (n, k) at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16.

K counts bytes: a tile holds 16 elements of 8 bits along K, or 8 of 16 bits.
"""

_SIDE = 16
_PAIR = 32


def check_tiles(where: str, rows: int, columns: int) -> None:
    """Raises UserError for a weight that TILES_16X16 cannot hold: aiter takes 32 elements along K at once."""
    if rows % _SIDE or columns % _PAIR:
        raise UserError(f"{where}: a pre-shuffled weight of {rows} x {columns}, expected multiples of 16 x 32")


def store(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """A row-major [N, K] in a layout, its shape unchanged; N is a multiple of 16, K's bytes are too.

    TILES_16X16 is what aiter's `shuffle_weight(w, layout=(16, 16))` makes of 8-bit weights ([N/16, 16, K/32, 2, 16]
    permuted to [N/16, K/32, 2, 16, 16], which its Triton kernels view as (N/16, K*16)) and of 16-bit ones
    ([N/16, 16, K/32, 4, 8] to [N/16, K/32, 4, 16, 8]). Raises ValueError.
    """
    if layout == PLAIN:
        return w
    stored, step = _checked(w, layout)
    rows, columns = w.shape
    tiles = stored.view(rows // _SIDE, _SIDE, columns // step, step)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def plain(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """The row-major weight that `store` was given. Raises ValueError."""
    if layout == PLAIN:
        return w
    stored, step = _checked(w, layout)
    rows, columns = w.shape
    tiles = stored.view(rows // _SIDE, columns // step, _SIDE, step)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def runs_along_k(w: "torch.Tensor") -> "torch.Tensor":
    """A pre-shuffled [N, K] of bytes as [K/16, N/16, 256], a view: place along K, then which 16 rows, then a tile."""
    rows, columns = w.shape
    return w.view(rows // _SIDE, columns // _SIDE, _SIDE * _SIDE).transpose(0, 1)


def by_rows(w: "torch.Tensor", columns: int) -> "torch.Tensor":
    """A pre-shuffled weight of so many columns as [N, K], also where it comes as aiter views it: (N/16, K*16)."""
    viewed = w.dim() == 2 and w.shape[1] == _SIDE * columns and w.is_contiguous()
    return w.view(-1, columns) if viewed else w


def _checked(w: "torch.Tensor", layout: str) -> "tuple[torch.Tensor, int]":
    """The weight where a layout can hold it, and how many elements a tile has along K."""
    if layout != TILES_16X16:
        raise ValueError(f"weight layout '{layout}', expected {PLAIN} or {TILES_16X16}")
    step = _SIDE // w.element_size()
    if w.element_size() > 2 or w.dim() != 2 or w.shape[0] % _SIDE or w.shape[1] % step:
        expected = "[N, K] of 8 or 16 bits, N and the bytes of K multiples of 16"
        raise ValueError(f"{layout}: {tuple(w.shape)} of {w.dtype}, expected {expected}")
    return w, step
