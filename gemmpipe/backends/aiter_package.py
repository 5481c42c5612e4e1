"""The package aiter: functions by name, version, lists of assembly kernels, and the layout of its fp4 scales."""

import csv
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmpipe.backends import Backend
from gemmpipe.backends.hipblaslt import aiter_import_problem
from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import open_regular_text
from gemmpipe.templates.tiled import ceil_div

if TYPE_CHECKING:
    import torch

SPLITS = "NUM_KSPLIT"
GFX = ("gfx942", "gfx950")
_SCALE_ROWS, _SCALE_COLUMNS = 256, 8
"""aiter pads the scales of fp4 operands to multiples of these."""


@dataclass(frozen=True, kw_only=True)
class AiterBackend(Backend):
    """Base of aiter's libraries."""

    reads_strides = False

    def unavailable(self, device: Device) -> str | None:
        """It needs an AMD GPU and the package."""
        if device.kind != "hip":
            return "no AMD GPU: aiter's kernels are for these alone"
        return aiter_import_problem()


@dataclass(frozen=True, kw_only=True, slots=True)
class AsmKernel:
    """A kernel of one of aiter's lists."""

    name: str
    tile_m: int
    tile_n: int
    splits: bool
    """True if it can split K."""
    shuffled: bool
    """True if it reads a pre-shuffled weight."""
    bias: bool
    """True if it adds a bias."""
    least_k: int
    """The least K per split."""


def aiter_function(name: str, module: str = "aiter") -> Callable[..., Any]:
    """A function of the package. Raises ImportError or AttributeError if this version lacks it."""
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@cache
def aiter_version() -> str:
    """The package's version, or `unknown` if it is importable but not installed."""
    for name in ("amd-aiter", "aiter"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def asm_kernels(path: str) -> tuple[AsmKernel, ...]:
    """The kernels of a list (`bf16gemm/bf16gemm_fp32bf16.csv`) for this machine's architecture; empty without the list.

    Spellings of the columns vary between lists: `tileM`, `tile_m`, `tile_M`.
    """
    try:
        folder = Path(aiter_function("get_asm_dir", "aiter.jit.core")())
        with open_regular_text(folder / path, "a list of kernels", newline="") as lines:
            rows = [
                {_normalised_header(name): cell for name, cell in row.items() if name} for row in csv.DictReader(lines)
            ]
    except (ImportError, AttributeError, OSError, UserError):
        return ()
    return tuple(_parse_kernel(row) for row in rows)


def _normalised_header(name: str) -> str:
    return name.strip().lower().replace("_", "")


def _parse_kernel(row: Mapping[str, str]) -> AsmKernel:
    return AsmKernel(
        name=row["knlname"].strip(),
        tile_m=int(row["tilem"]),
        tile_n=int(row["tilen"]),
        splits=int(row.get("splitk") or 0) > 0,
        shuffled=int(row.get("bpreshuffle") or 0) > 0,
        bias=int(row.get("bias") or 0) > 0,
        least_k=int(row.get("subk") or 1),
    )


def int_or_default(value: Scalar, default: int = 0) -> int:
    """A cell or knob if it is an int, else the default."""
    return value if isinstance(value, int) else default


def log2_exact(splits: int) -> int:
    """log2 of a power of two."""
    return splits.bit_length() - 1


def shuffled_scales(scales: "torch.Tensor") -> "torch.Tensor":
    """e8m0 scales [rows, K/32] as aiter's fp4 kernels read them: [rows, K/32] padded to multiples of 256 and 8.

    Blocks of 32 rows and 8 columns are contiguous, in the order: column of four, row of 16, half of the columns, half
    of the rows (aiter/ops/shuffle.py, `shuffle_scale`). Padding is uninitialised.
    """
    import torch

    rows, columns = (
        ceil_div(size, step) * step for size, step in zip(scales.shape, (_SCALE_ROWS, _SCALE_COLUMNS), strict=True)
    )
    wide = torch.empty(rows, columns, dtype=torch.uint8, device=scales.device)
    wide[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = wide.view(rows // 32, 2, 16, columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
    return tiles.reshape(rows, columns).view(scales.dtype)
