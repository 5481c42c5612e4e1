"""Pre-shuffled weight layouts: the same bytes in the order in which a matrix instruction wants them."""

from typing import TYPE_CHECKING

from gemmpipe.errors import UserError

if TYPE_CHECKING:
    import torch

PLAIN = "nk"
TILES_16X16 = "n16k16"
"""16 x 16 tiles of bytes: element (n, k) at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16."""

_SIDE = 16
_PAIR = 32


def check_tiles(where: str, rows: int, row_bytes: int) -> None:
    """Raises UserError for a weight that TILES_16X16 cannot hold: aiter pairs tiles along K."""
    if rows % _SIDE or row_bytes % _PAIR:
        raise UserError(f"{where}: a pre-shuffled weight of {rows} x {row_bytes} bytes, expected multiples of 16 x 32")


def store(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """A row-major [N, K] of one-byte elements in a layout, its shape unchanged; N and K are multiples of 16.

    TILES_16X16 is what aiter's `shuffle_weight(w, layout=(16, 16))` makes of 8-bit weights ([N/16, 16, K/32, 2, 16]
    permuted to [N/16, K/32, 2, 16, 16]) and its Triton kernels view as (N/16, K*16). Raises ValueError.
    """
    if layout == PLAIN:
        return w
    _check(w, layout)
    rows, columns = w.shape
    tiles = w.view(rows // _SIDE, _SIDE, columns // _SIDE, _SIDE)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def plain(w: "torch.Tensor", layout: str) -> "torch.Tensor":
    """The row-major weight that `store` was given. Raises ValueError."""
    if layout == PLAIN:
        return w
    _check(w, layout)
    rows, columns = w.shape
    tiles = w.view(rows // _SIDE, columns // _SIDE, _SIDE, _SIDE)
    return tiles.transpose(1, 2).contiguous().view(rows, columns)


def runs_along_k(w: "torch.Tensor") -> "torch.Tensor":
    """A pre-shuffled [N, K] as [K/16, N/16, 256], a view: where along K, then which 16 rows, then a tile's bytes."""
    rows, columns = w.shape
    return w.view(rows // _SIDE, columns // _SIDE, _SIDE * _SIDE).transpose(0, 1)


def by_rows(w: "torch.Tensor", columns: int) -> "torch.Tensor":
    """A pre-shuffled weight of so many columns as [N, K], also where it comes as aiter views it: (N/16, K*16)."""
    viewed = w.dim() == 2 and w.shape[1] == _SIDE * columns and w.is_contiguous()
    return w.view(-1, columns) if viewed else w


def _check(w: "torch.Tensor", layout: str) -> None:
    if layout != TILES_16X16:
        raise ValueError(f"weight layout '{layout}', expected {PLAIN} or {TILES_16X16}")
    if w.element_size() != 1 or w.dim() != 2 or w.shape[0] % _SIDE or w.shape[1] % _SIDE:
        raise ValueError(f"{layout}: {tuple(w.shape)} of {w.dtype}, expected [N, K] of bytes, both multiples of 16")
