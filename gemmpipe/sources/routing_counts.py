"""The file of captured routings, next to that of captured products: the rows of each expert in each layer."""

import csv
import fcntl
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.capture_file import MAX_COUNT
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_cells
from gemmpipe.core.paths import PRIVATE_MODE, make_folder, open_private, write_atomic
from gemmpipe.family.problem import parse_bounded_int
from gemmpipe.family.routing import profile_of

SIZES = ("model_dim", "inter_dim", "expert", "topk")
"""The key columns of the layers whose routings are counted together."""
COLUMNS = (*SIZES, "layer", "counts")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """A mixture of experts by its sizes (those of SIZES) and the name of its layer."""

    sizes: tuple[int, ...]
    layer: str


def routing_file(captured: Path) -> Path:
    """The file of the routings of a file of captured products: `gemmpipe_captured.routing.csv`."""
    return captured.with_suffix(".routing.csv")


def read_counts(path: Path) -> dict[LayerSizes, list[int]]:
    """The counts of each layer, by expert. Raises UserError: `file:row`, what was expected."""
    lines = read_cells(path)
    _, header = next(lines, (1, []))
    if tuple(header) != COLUMNS:
        raise UserError(f"{path}:1: expected the columns {', '.join(COLUMNS)} of captured routings")
    return dict(_rows(lines, path))


def _rows(lines: Iterator[tuple[int, list[str]]], path: Path) -> Iterator[tuple[LayerSizes, list[int]]]:
    for line, cells in lines:
        try:
            *sizes, layer, counts = cells
            numbers = tuple(parse_bounded_int(cell, 1, 2**31 - 1) for cell in sizes)
            found = [parse_bounded_int(cell, 0, MAX_COUNT) for cell in counts.split()]
        except (UserError, ValueError) as error:
            raise UserError(f"{path}:{line}: {error}") from None
        if len(numbers) != len(SIZES) or len(found) != numbers[2]:
            raise UserError(f"{path}:{line}: {len(found)} counts, expected one for each expert")
        yield LayerSizes(sizes=numbers, layer=layer), found


def add_counts(path: Path, counts: Mapping[LayerSizes, Sequence[int]]) -> None:
    """Add to the counts in the file, which any number of processes share. Raises OSError and what read_counts does."""
    make_folder(path.parent)
    with open(path.with_name(f".{path.name}.lock"), "a", opener=open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = read_counts(path) if path.is_file() else {}
        for key, found in counts.items():
            before = merged.get(key, [0] * len(found))
            merged[key] = [a + b for a, b in zip(before, found, strict=True)]
        write_atomic(path, _text(merged), mode=PRIVATE_MODE)


def _text(counts: Mapping[LayerSizes, Sequence[int]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for layer, found in counts.items():
        writer.writerow([*layer.sizes, layer.layer, " ".join(map(str, found))])
    return out.getvalue()


def profiles(captured: Path) -> dict[tuple[int, ...], str]:
    """The profile of all layers with the same sizes, of the routings captured with this file; empty without any."""
    path = routing_file(captured)
    if not path.is_file():
        return {}
    layers: dict[tuple[int, ...], list[list[int]]] = {}
    for each, counts in read_counts(path).items():
        layers.setdefault(each.sizes, []).append(counts)
    return {sizes: profile for sizes, counts in layers.items() if (profile := profile_of(counts)) is not None}
