"""The package aiter: its functions by name, its version, its lists of assembly kernels, its layout of fp4 scales."""

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

if TYPE_CHECKING:
    import torch

SPLITS = "NUM_KSPLIT"
GFX = ("gfx942", "gfx950")
_SCALE_ROWS, _SCALE_COLUMNS = 256, 8
"""What aiter pads the scales of fp4 operands to."""


@dataclass(frozen=True, kw_only=True)
class AiterBackend(Backend):
    """What aiter's libraries have in common."""

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
    """Whether it can split K."""
    shuffled: bool
    """Whether it reads a pre-shuffled weight."""
    bias: bool
    """Whether it adds a bias."""
    least_k: int
    """What a split must have along K at least."""


def aiter_function(name: str, module: str = "aiter") -> Callable[..., Any]:
    """A function of the package. Raises ImportError and AttributeError where this version lacks it."""
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@cache
def aiter_version() -> str:
    """The package's version, or `unknown` for one that was never installed."""
    for name in ("amd-aiter", "aiter"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def asm_kernels(path: str) -> tuple[AsmKernel, ...]:
    """The kernels of a list, `bf16gemm/bf16gemm_fp32bf16.csv`, for the architecture of this machine; none without it.

    The lists spell their columns in several ways: `tileM`, `tile_m`, `tile_M`.
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
    """A cell or knob as a whole number."""
    return value if isinstance(value, int) else default


def log2_exact(splits: int) -> int:
    """log2 of a power of two."""
    return splits.bit_length() - 1


def shuffled_scales(scales: "torch.Tensor") -> "torch.Tensor":
    """e8m0 scales [rows, K/32] as aiter's fp4 kernels read them: [rows, K/32] padded to multiples of 256 and 8.

    32 rows and 8 columns lie together: the column's place among four, then the row's among 16, then which half of the
    columns, then which half of the rows (aiter/ops/shuffle.py, `shuffle_scale`). Padding is left as it comes.
    """
    import torch

    rows, columns = (
        -(-size // step) * step for size, step in zip(scales.shape, (_SCALE_ROWS, _SCALE_COLUMNS), strict=True)
    )
    wide = torch.empty(rows, columns, dtype=torch.uint8, device=scales.device)
    wide[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = wide.view(rows // 32, 2, 16, columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
    return tiles.reshape(rows, columns).view(scales.dtype)
