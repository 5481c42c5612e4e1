"""The first stage of pipelines that start from tuned tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.artifact import runs_of, sidecar
from gemmpipe.csvfile import named_files
from gemmpipe.device import cpu_device, gpu_device, gpu_kind
from gemmpipe.errors import UserError
from gemmpipe.family import Family
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.incumbents import native_tables
from gemmpipe.store import Sheet, open_sheet
from gemmpipe.table import RECORDED, RESULT
from gemmpipe.tunableop import is_results, read_results
from gemmpipe.uniting import Entry, entries_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Load(Stage):
    """Reads the rows of `inputs=` as selections, all of them: who comes next decides which stay."""

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("selections",)
    reads: ClassVar[tuple[str, ...]] = ("inputs",)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The rows. Raises UserError for a table that cannot be read, or that is also written."""
        if not context.inputs:
            raise UserError("inputs: missing, expected tuned tables, as in 'inputs=[a.csv,b.csv]'")
        files = named_files("inputs", context.inputs)
        _refuse_outputs(files, native_tables(context.family, context.output, (each for _, each in context.formats)))
        entries: list[Entry] = []
        for path in files:
            sheet = _tunableop(path, context) if is_results(path) else open_sheet(path, context.family)
            context.events.emit("line", f"load: {path}: {_contents(sheet)}")
            entries += entries_of(path, context.family, sheet, _runs(path, context))
        return {"selections": frame_of(context.family, entries)}


def _tunableop(path: Path, context: Context) -> Sheet:
    """The winners of a result file of PyTorch's TunableOp, for this machine's device: the file hardly says its own."""
    found = read_results(path, context.family, gpu_device(0) if gpu_kind() else cpu_device())
    for reason, count in found.left_out.most_common():
        context.events.emit("line", f"load: {path}: {count:,} left out: {reason}")
    return Sheet(extra=(), lacking=(), rows=found.rows, lines=found.lines)


def _refuse_outputs(files: Sequence[Path], written: Sequence[Path]) -> None:
    for path in files:
        for table in written:
            if table.exists() and table.samefile(path):
                raise UserError(f"inputs: '{path}' is also the output, expected another: output=NAME.csv")


def _runs(path: Path, context: Context) -> dict[str, dict[str, object]]:
    try:
        return {run: dict(facts) for run, facts in runs_of(sidecar(path)).items()}
    except UserError as error:
        context.events.emit("warning", f"{error}; left out")
        return {}


def _contents(sheet: Sheet) -> str:
    """`90 rows (90 sm_90/132), no column bpreshuffle, kept _tag`."""
    places = Counter(f"{row['gfx']}/{row['cu_num']}" for row in sheet.rows)
    said = ", ".join(f"{count:,} {place}" for place, count in sorted(places.items()))
    lacking = f"; filled, since it has no such column: {', '.join(sheet.lacking)}" if sheet.lacking else ""
    extra = f"; kept, though unknown: {', '.join(sheet.extra)}" if sheet.extra else ""
    return f"{len(sheet.rows):,} rows{f' ({said})' if said else ''}{lacking}{extra}"


def frame_of(family: Family, entries: Iterable[Entry]) -> "pd.DataFrame":
    """Entries as selections: a problem's own each, columns as they are in the table, and `table.RECORDED`."""
    import pandas as pd

    names = ["gfx", "cu_num", *(column.name for column in family.key_columns), *RESULT]
    rows = [(*map(entry.row.get, names), "", entry.place, entry.extra) for entry in entries]
    # As objects: numbers stay what they were, and None stays None.
    return pd.DataFrame(rows, columns=[*names, "format", *RECORDED], dtype=object)
