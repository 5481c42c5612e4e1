"""The first stage of pipelines that start from tuned tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gemmpipe import table as columns
from gemmpipe.data import Device
from gemmpipe.device import gpu_device, gpu_kind, target_device
from gemmpipe.errors import EnvironmentProblem, UserError, at_least
from gemmpipe.family import Family
from gemmpipe.files.artifact import runs_of, sidecar
from gemmpipe.files.csvfile import named_files
from gemmpipe.formats.united import report_path
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.incumbents import native_tables
from gemmpipe.stages.rows import problem_frame, untimed_row
from gemmpipe.stages.winners import Winner, rivals, winners
from gemmpipe.tables.merging import Row
from gemmpipe.tables.store import Sheet, open_sheet
from gemmpipe.tables.tunableop import is_results, read_results, tuned_gfx
from gemmpipe.tables.uniting import Entry, entries_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Load(Stage):
    """Reads tuned tables.

    `of: inputs` gives every row of `inputs=` as a selection: who comes next decides which stay. `of: table` gives
    the rows of `table=` that are for this run's device (or its targets), as problems with a shortlist each: the
    recorded winner and the first `rivals` candidates of each library that is the baseline.
    """

    of: Literal["inputs", "table"]
    rivals: int

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("selections", "problems", "shortlist")
    reads: ClassVar[tuple[str, ...]] = ("inputs", "table", "target")

    def __post_init__(self) -> None:
        at_least(0, rivals=self.rivals)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The rows. Raises UserError for a table that cannot be read, or that is also written."""
        given = {"inputs": context.inputs, "table": context.table}
        other = "table" if self.of == "inputs" else "inputs"
        if given[other]:
            raise UserError(f"{other}: this pipeline starts from {self.of}=, expected that alone")
        if not given[self.of]:
            example = "'inputs=[a.csv,b.csv]'" if self.of == "inputs" else "table=outputs/tuned/NAME.csv"
            raise UserError(f"{self.of}: missing, expected tuned tables, as in {example}")
        files = named_files(self.of, context.inputs or str(context.table))
        if self.of == "table":
            return self._of_table(files, context)
        files = _without_output(files, context)
        if context.targets and not any(is_results(path) for path in files):
            raise UserError("target: tables say their devices themselves, expected none but for TunableOp's files")
        entries: list[Entry] = []
        for path in files:
            found, contents = _read(path, context)
            context.events.emit("line", f"load: {path}: {contents}")
            entries += found
        return {
            "selections": frame_of(context.family, entries),
            "problems": problem_frame(context.family, []),
            "shortlist": _shortlist([], 0, context),
        }

    def _of_table(self, files: Sequence[Path], context: Context) -> "dict[str, pd.DataFrame]":
        if len(files) != 1:
            raise UserError(f"table: {len(files)} files, expected one; 'gemmpipe merge' unites several")
        everything, contents = _read(files[0], context)
        entries, here = _wanted(everything, files[0], context)
        left = (
            f"; {len(everything) - len(entries):,} for other devices: {here}" if len(everything) > len(entries) else ""
        )
        context.events.emit("line", f"load: {files[0]}: {contents}{left}")
        devices = dict.fromkeys([context.device.gfx], context.device)
        if context.device.kind == "none":
            devices = {gfx: target_device(gfx) for gfx in dict.fromkeys(str(e.row["gfx"]) for e in entries)}
        found = list(winners(context, (e.row for e in entries), lambda row: devices[str(row["gfx"])]))
        for entry, winner in zip(entries, found, strict=True):
            if winner.reason:
                context.events.emit("line", f"stale: {entry.place}: {winner.problem.id}: {winner.reason}")
        selections = frame_of(context.family, entries)
        selections["problem"] = [winner.problem.id for winner in found]
        selections["candidate"] = [winner.candidate.id if winner.candidate else None for winner in found]
        selections["reason"] = [winner.reason for winner in found]
        problems = {winner.problem.id: winner.problem for winner in found}
        return {
            "selections": selections,
            "problems": problem_frame(context.family, problems.values()),
            "shortlist": _shortlist(found, self.rivals if context.device.kind != "none" else 0, context),
        }


def _without_output(files: Sequence[Path], context: Context) -> list[Path]:
    """The inputs but the output, which a glob may find: it takes part anyway.

    Raises UserError where it is named, and for an input that what is written beside the output would replace.
    """
    written = native_tables(context.family, context.output, (each for _, each in context.formats))
    named = [Path(word).expanduser() for word in context.inputs]
    for path in files:
        if path in named and any(table.exists() and table.samefile(path) for table in written):
            raise UserError(f"inputs: '{path}' is also the output, expected another: output=NAME.csv")
    beside = {each.resolve() for table in written for each in (sidecar(table), report_path(table))}
    for path in files:
        if path.resolve() in beside:
            raise UserError(f"inputs: '{path}' is where a file beside the output goes, expected another output=")
    return [path for path in files if not any(table.exists() and table.samefile(path) for table in written)]


def _read(path: Path, context: Context) -> tuple[list[Entry], str]:
    """The rows of a table, and its contents in words."""
    sheet = _tunableop(path, context) if is_results(path) else open_sheet(path, context.family)
    try:
        runs = runs_of(sidecar(path))
    except UserError as error:
        context.events.emit("warning", f"{error}; left out")
        runs = {}
    return entries_of(path, context.family, sheet, runs), _contents(sheet)


def _tunableop(path: Path, context: Context) -> Sheet:
    """The winners of a result file of PyTorch's TunableOp."""
    found = read_results(path, context.family, _tuned_on(path, context))
    for reason, count in found.left_out.most_common():
        context.events.emit("line", f"load: {path}: {count:,} left out: {reason}")
    return Sheet(extra=(), lacking=(), rows=found.rows, lines=found.lines)


def _tuned_on(path: Path, context: Context) -> Device:
    """What a result file was tuned on: `target=`, this machine's GPU, or where it has none what the file hints at."""
    if context.targets and len(context.targets) > 1:
        raise UserError(f"target: {', '.join(context.targets)}, expected the one that {path} was tuned on")
    if context.targets or gpu_kind():
        return target_device(context.targets[0]) if context.targets else gpu_device(0)
    if gfx := tuned_gfx(path):
        device = target_device(gfx)
        context.events.emit("line", f"load: {path}: taken for tuned on {device.name}, {device.cu_num} units of {gfx}")
        return device
    raise UserError(f"{path}: no GPU here and none named there, expected target= with what it was tuned on: sm_90")


def _contents(sheet: Sheet) -> str:
    """`90 rows (90 sm_90/132), no column bpreshuffle, kept _tag`."""
    said = ", ".join(f"{count:,} {place}" for place, count in sorted(_places(sheet.rows).items()))
    lacking = f"; filled, since it has no such column: {', '.join(sheet.lacking)}" if sheet.lacking else ""
    extra = f"; kept, though unknown: {', '.join(sheet.extra)}" if sheet.extra else ""
    odd = f"; left out, as spreadsheets take them for formulas: cells of {', '.join(sheet.formulas)}"
    return f"{len(sheet.rows):,} rows{f' ({said})' if said else ''}{lacking}{extra}{odd if sheet.formulas else ''}"


def _places(rows: Iterable[Row]) -> Counter[str]:
    return Counter(f"{row['gfx']}/{row['cu_num']}" for row in rows)


def _wanted(entries: Sequence[Entry], path: Path, context: Context) -> tuple[list[Entry], str]:
    """The rows for this run's device, or without one those for its targets or for any GPU; and which that is."""
    device, targets = context.device, context.targets
    if not entries:
        raise UserError(f"table: {path} has no rows, expected a tuned table")
    if device.kind != "none":
        if targets:
            raise UserError("target: rows are verified on the device that is here, expected none")
        found = [e for e in entries if (e.row["gfx"], e.row["cu_num"]) == (device.gfx, device.cu_num)]
        here = f"this machine is {device.gfx}/{device.cu_num} ({device.name})"
    else:
        wanted = {target_device(gfx).gfx for gfx in targets} if targets else None
        found = [e for e in entries if (e.row["gfx"] in wanted if wanted else not _of_cpu(e.row))]
        here = f"none for target={','.join(targets)}" if targets else "only GPUs have kernels to compile"
        for gfx in (wanted or set()) - {str(e.row["gfx"]) for e in found} if found else ():
            context.events.emit("warning", f"target: {path} has no row for {gfx}: nothing is compiled for it")
    if not found:
        rows = ", ".join(_places(e.row for e in entries))
        raise (UserError if targets or device.kind == "none" else EnvironmentProblem)(
            f"table: {path} has rows for {rows}, and {here}"
        )
    return found, here


def _of_cpu(row: Row) -> bool:
    return str(row["gfx"]).startswith("cpu")


def _shortlist(found: Sequence[Winner], most: int, context: Context) -> "pd.DataFrame":
    """The winners that stand, each with its rivals; nothing of them is timed yet."""
    import pandas as pd

    rows: list[dict[str, object]] = []
    for winner in found:
        if winner.candidate is None or winner.spec is None or winner.implementation is None:
            continue
        listed = {winner.candidate: winner.implementation}
        listed |= {c: i for i, c in rivals(context, winner.spec, most) if c != winner.candidate} if most else {}
        for candidate, implementation in listed.items():
            library = candidate.backend in context.family.baseline
            context.journal.kernel_names[candidate.id] = implementation.kernel_name(candidate.knobs)
            rows.append(untimed_row(winner.problem.id, candidate, "library" if library else "incumbent"))
    return pd.DataFrame(rows, columns=list(columns.SHORTLIST))


def frame_of(family: Family, entries: Iterable[Entry]) -> "pd.DataFrame":
    """Entries as selections: a problem's own each, columns as they are in the table, and `table.RECORDED`."""
    import pandas as pd

    names = ["gfx", "cu_num", *(column.name for column in family.key_columns), *columns.RESULT]
    rows = [(*map(entry.row.get, names), "", entry.place, entry.extra) for entry in entries]
    # As objects: numbers stay what they were, and None stays None.
    return pd.DataFrame(rows, columns=[*names, "format", *columns.RECORDED], dtype=object)
