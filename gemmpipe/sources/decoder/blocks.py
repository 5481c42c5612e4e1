"""Whether a cut keeps the tiles of block-scaled weights whole; engines refuse to load a model where it does not."""

from collections.abc import Iterator

from gemmpipe.errors import UserError
from gemmpipe.sources.decoder.linear import Linear


def check_blocks(block: tuple[int, int], linear: Linear, tp: int, where: str) -> None:
    """Raises UserError, beginning with `where`, for a size that is no multiple of the (rows, columns) of a tile."""
    hint = "; shapes.ep= deals whole experts out instead" if linear.experts and linear.cut != "whole" else ""
    for size, multiple, what in _cut_sizes(linear, tp, *block):
        if size % multiple:
            raise UserError(
                f"{where}: {what} {size} with tp {tp}: engines need a multiple of {multiple} for block scales{hint}"
            )


def _cut_sizes(linear: Linear, tp: int, rows: int, columns: int) -> Iterator[tuple[int, int, str]]:
    if linear.cut == "row" and tp > 1:
        yield linear.k, columns, "K"
    parts = linear.parts or (linear.n,)
    if linear.cut == "column" and tp > 1:
        yield from ((part, rows, "N of a part") for part in parts)
    else:
        # Uncut, only a part that another one follows must end on a tile.
        yield from ((part, rows, "N of a part") for part in parts[:-1])
