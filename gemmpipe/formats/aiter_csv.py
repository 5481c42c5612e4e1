"""aiter's own tuned tables, with its header: rows read from aiter, hipBLASLt's solutions, aiter's assembly kernels."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.data import Scalar, is_plausible_time_us
from gemmpipe.core.events import counted
from gemmpipe.core.schema import DEVICE_COLUMNS, RECORDED, RESULT
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.aiter_table import render
from gemmpipe.family.dtypes import DTYPES_16BIT
from gemmpipe.family.problem import is_missing
from gemmpipe.formats import Format, Target
from gemmpipe.formats.native import unite_into
from gemmpipe.tables.merge import Row, is_provisional, is_timed, provisional_text

if TYPE_CHECKING:
    import pandas as pd

_SOLUTIONS = "hipblaslt"
"""The library with solution numbers that both programs use; aiter finds its own kernels by name."""
_ASSEMBLY = "asm"
_TORCH = "torch"
"""torch's product, which aiter's table of bf16 products has too."""
_AITER_LIBTYPES = ("ck", _ASSEMBLY)
_BY_NUMBER = "kernels without a name, by which aiter finds them"
_NAME = "kernelName"
"""The knob of an assembly kernel that holds aiter's name of it."""
_POLICY = "policy"


@dataclass(frozen=True, kw_only=True)
class AiterCsv(Format):
    """Unites rows with `aiter/{name}` in the folder of artifacts; `file` names another (None: the native table's name).

    Rows of our kernels are left out: aiter builds the kernels that its tables name, and does not have ours.
    """

    file: str | None

    def named_file(self, folder: Path) -> Path | None:
        """The table's path, if `file` names it."""
        return folder / "aiter" / self.file if self.file else None

    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """The table and the report of the union; warns of the number of selections left out."""
        import pandas as pd

        if family.aiter_table is None:
            target.warn(f"aiter: no table of {family.name}")
            return []
        names = [*DEVICE_COLUMNS, *(column.name for column in family.key_columns), *RESULT]
        own = selections[selections["format"].fillna("") == ""]
        # Selections of an older run lack later columns.
        own = own.reindex(columns=list(dict.fromkeys((*own.columns, *names))))
        rows = [dict(zip(names, values, strict=True)) for values in own[names].itertuples(index=False, name=None)]
        reasons = [_unfit_reason(row, family) for row in rows]
        kept = own[[not reason for reason in reasons]]
        for reason, count in Counter(filter(None, reasons)).most_common():
            target.warn(f"aiter: {count:,} of {counted(len(own), 'selection')} left out: {reason}")
        if untimed := len(kept) - sum(map(is_plausible_time_us, kept["us"])):
            target.warn(f"aiter: {counted(untimed, 'row')} without a time left out")
        if not len(kept):
            return []
        if marked := provisional_text(kept[_POLICY]):
            target.warn(f"aiter: {marked}: aiter uses them as the others; the column {_POLICY} marks them")
        if "place" not in kept:
            nothing = pd.Series([dict[str, Scalar]() for _ in range(len(kept))], index=kept.index, dtype=object)
            kept = kept.assign(place=f"run {target.run_id}:0", extra=nothing)
        dtypes = [column.name for column in family.key_columns if column.kind == "dtype"]
        path = self.named_file(target.folder) or target.folder / "aiter" / family.csv_name
        plain = kept[[*names, *RECORDED]].astype(object).where(kept[[*names, *RECORDED]].notna(), None)
        plain["kernelName"] = [
            _aiter_kernel_name({"libtype": libtype, "config": config}) or name
            for libtype, config, name in zip(plain["libtype"], plain["config"], plain["kernelName"], strict=True)
        ]
        text = partial(_text, dtypes=dtypes)
        return unite_into(path, family, plain, target, text=text)


def _text(rows: Sequence[Row], family: Family, extra: Sequence[str], *, dtypes: Sequence[str]) -> str:
    """The CSV text without foreign columns and rows without a time: aiter would take 0 as the fastest time.

    A provisional row keeps its mark in the column `policy`, after aiter's: its readers find columns by name.
    """
    assert family.aiter_table is not None
    timed = [row for row in rows if is_timed(row)]
    marks = (_POLICY,) if any(is_provisional(row.get(_POLICY)) for row in timed) else ()
    return render(timed, family.aiter_table, dtypes, marks)


def _aiter_kernel_name(row: Mapping[str, Scalar]) -> str:
    """aiter's name of the kernel of a selection, or nothing."""
    if is_missing(row.get("config")) or row.get("libtype") != _ASSEMBLY:
        return ""
    knobs = json.loads(str(row["config"]))
    return str(knobs.get(_NAME) or "") if isinstance(knobs, dict) else ""


def _is_plain_torch(row: Mapping[str, Scalar], family: Family) -> bool:
    """True for torch's product as aiter runs it: unscaled 16-bit operands in rows, and an output of their type."""
    named = family.aiter_table is not None and "libtype" in family.aiter_table.columns
    if not named or row.get("libtype") != _TORCH or row.get("scaleAB") or row.get("bpreshuffle"):
        return False
    same = row.get("dtype") == row.get("outdtype") and row.get("dtype") in DTYPES_16BIT
    return same and json.loads(str(row["config"])) == {"method": "mm"}


def _unfit_reason(row: Row, family: Family) -> str:
    """Why aiter's table cannot have the row: another kernel, or a key with more columns; empty if it can."""
    assert family.aiter_table is not None
    known = row.get("libtype") == _SOLUTIONS or _aiter_kernel_name(row) or _is_plain_torch(row, family)
    if not (is_missing(row.get("config")) or known):
        return _BY_NUMBER if row.get("libtype") in _AITER_LIBTYPES else "not kernels of aiter"
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    plain = {**family.key_defaults(defaults, str(row.get("gfx"))), **family.aiter_table.implied}
    others = (column for column in family.key_columns if column.name not in family.aiter_table.columns)
    cells = ((column, None if is_missing(row.get(column.name)) else row[column.name]) for column in others)
    names = [column.name for column, value in cells if value != plain.get(column.name, column.default)]
    return f"aiter's table has no column {', '.join(names)}" if names else ""
