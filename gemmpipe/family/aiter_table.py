"""aiter's tuned tables: their columns, and split counts, for which its libraries have different encodings."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.schema import DEVICE_COLUMNS

RESULT_COLUMNS = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")
"""The columns after the key, and after `libtype` in tables of several libraries."""

_NATIVE_NAMES = {"kernelId": "solidx", "errRatio": "err_ratio"}
_MANGLED = "_ZN"
_MAX_DOUBLINGS = 16
_TIMES = ("us", "tflops", "bw")


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterTable:
    """The aiter table with tuned rows for a family's products."""

    columns: tuple[str, ...]
    """Its header after `gfx,cu_num`, in order."""
    variable: str = ""
    """Its name in aiter's environment variables: `GEMM_A8W8` for AITER_CONFIG_GEMM_A8W8."""
    powers: tuple[str, ...] = ("", "ck", "cktile")
    """Libraries that write log2 of the number of splits (`""`: in tables without `libtype`); others the number."""
    implied: Mapping[str, Scalar] = field(default_factory=dict)
    """Key columns that the table does not have, with the only value of its rows, if it is not the family's default."""

    def library(self, row: Mapping[str, Scalar]) -> str:
        """The library of a row's kernel; with an empty `libtype`, `asm` for a mangled kernel name, else `ck`."""
        libtype = str(row.get("libtype") or "")
        return libtype or ("asm" if str(row.get("kernelName") or "").startswith(_MANGLED) else "ck")

    def splits(self, libtype: Scalar, cell: Scalar) -> Scalar:
        """The number of splits decoded from a cell, at least 1. Raises UserError for an invalid exponent."""
        if not isinstance(cell, int):
            return None
        if str(libtype or "") not in self.powers:
            return max(1, cell)
        if not 0 <= cell <= _MAX_DOUBLINGS:
            raise UserError(f"{cell}, expected log2 of the number of splits")
        return 1 << cell

    def cell(self, libtype: Scalar, splits: Scalar) -> int:
        """The cell for a number of splits. Raises UserError if the library's encoding does not have it."""
        count = splits if isinstance(splits, int) else 1
        if str(libtype or "") not in self.powers:
            return 0 if count == 1 and libtype != "asm" else count  # without splits assembly has 1, the others 0
        if count < 1 or count & (count - 1):
            raise UserError(f"splitK {count}: {libtype or 'this table'} writes powers of two only")
        return count.bit_length() - 1


def render(
    rows: Iterable[Mapping[str, Scalar]], table: AiterTable, dtypes: Iterable[str], more: Sequence[str] = ()
) -> str:
    """The table's text; `dtypes` are the key columns written as `torch.bfloat16`, `more` the columns after aiter's.

    Raises UserError like `cell`.
    """
    named, columns = set(dtypes), (*table.columns, *more)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*DEVICE_COLUMNS, *columns))
    for row in rows:
        writer.writerow([row["gfx"], row["cu_num"], *(_text(row, name, table, named) for name in columns)])
    return out.getvalue()


def _text(row: Mapping[str, Scalar], name: str, table: AiterTable, dtypes: set[str]) -> Scalar:
    value = row.get(_NATIVE_NAMES.get(name, name))
    if name == "splitK":
        return table.cell(table.library(row), value)
    if name == "libtype":
        return table.library(row)  # aiter's loader rejects an empty one
    if name in dtypes:
        return f"torch.{value}"
    if value is None and name in ("solidx", "kernelId", "errRatio", "err_ratio", *_TIMES):
        return 0  # aiter's readers reject an empty cell as a number
    return "" if value is None else value
