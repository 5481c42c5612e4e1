"""The load stage: reads tuned tables, for pipelines that start from them.

A row's winner becomes a problem and a candidate, or has a reason why it is stale.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gemmpipe.backends import library_backends
from gemmpipe.core import schema as columns
from gemmpipe.core.artifact import read_runs, sidecar_path
from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.device import gpu_device, gpu_kind, target_device
from gemmpipe.core.errors import EnvironmentProblem, UserError, check_at_least
from gemmpipe.core.events import counted
from gemmpipe.core.files import named_files
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.guard import PluginError
from gemmpipe.formats.native import report_path
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.history import native_tables
from gemmpipe.stages.rows import untimed_row
from gemmpipe.stages.screen.candidates import CandidateFilter
from gemmpipe.tables.merge import Row, is_timed
from gemmpipe.tables.recorded import UnusableRow, candidate_of_row, libtype_of
from gemmpipe.tables.store import ParsedTable, parse_table
from gemmpipe.tables.tunableop import is_results, read_results, tuned_gfx
from gemmpipe.tables.unite import TableEntry, entries_of

if TYPE_CHECKING:
    import pandas as pd


CANNOT_RUN = "cannot run here: "
"""The begin of the reason of a row whose library this machine does not have; other reasons are of stale rows."""


class _MissingLibrary(UnusableRow):
    """The library of a row is not here: nothing is known about the row."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A row's problem, and its candidate with the implementation; with a `reason` instead if it is stale, or cannot
    run here.
    """

    problem: Problem
    device: Device
    spec: GemmSpec | None = None
    implementation: Implementation | None = None
    candidate: Candidate | None = None
    reason: str = ""

    @property
    def cannot_run(self) -> bool:
        """True if this machine lacks the row's library."""
        return self.reason.startswith(CANNOT_RUN)


def winners(context: Context, rows: Iterable[Row], device_for: Callable[[Row], Device]) -> Iterator[Winner]:
    """Yields the winner of each row, in order; `device_for` returns the device that a row is for."""
    for row in rows:
        device = device_for(row)
        problem = context.family.problem(tuple((c.name, row[c.name]) for c in context.family.key_columns))
        try:
            yield _winner(context, row, problem, device)
        except _MissingLibrary as error:
            yield Winner(problem=problem, device=device, reason=f"{CANNOT_RUN}{error}")
        except (UnusableRow, UserError) as error:
            yield Winner(problem=problem, device=device, reason=str(error))


def _winner(context: Context, row: Row, problem: Problem, device: Device) -> Winner:
    spec = context.family.spec(problem)
    label = libtype_of(row, context.family)
    implementation = _implementation(context, label)
    if not is_timed(row):
        raise UnusableRow(f"time: us is {row.get('us')}, no time that was measured")
    if implementation is None:
        raise _MissingLibrary(f"{label}: neither a backend of this run nor a library that gemmpipe knows")
    # Own kernels are compiled for devices that are not here, too.
    if (context.device == device or label in context.row_backends) and (missing := implementation.unavailable(device)):
        raise _MissingLibrary(f"{label}: {missing}")
    candidate = candidate_of_row(implementation, row, spec, device)
    return Winner(problem=problem, device=device, spec=spec, implementation=implementation, candidate=candidate)


def _implementation(context: Context, label: str) -> Implementation | None:
    """The implementation of a `libtype`; a library of gemmpipe's that the run did not choose joins its backends."""
    if context.implementation(label) is None and label in library_backends():
        context.row_backends[label] = library_backends()[label]
    return context.implementation(label)


def baseline_candidates(context: Context, spec: GemmSpec, count: int) -> Iterator[tuple[Implementation, Candidate]]:
    """The library paths to compare a winner with: the first `count` of each label of the family's baseline."""
    for label in context.family.baseline:
        implementation = context.implementation(label)
        if implementation is None:
            continue
        candidate_filter = CandidateFilter(implementation=implementation, spec=spec, device=context.device)
        try:
            listed = candidate_filter.list_configs(context.space)
        except PluginError as raised:
            context.events.emit("warning", f"{label}: left out: {raised}")
            continue
        yield from (
            (implementation, candidate) for candidate in islice(candidate_filter.valid_candidates(listed), count)
        )


@dataclass(frozen=True, kw_only=True)
class Load(Stage):
    """Reads tuned tables.

    `read: inputs` gives every row of `inputs=` as a selection; a later stage decides which are kept. `read: table`
    gives the rows of `table=` for this run's device (or its targets) as problems, each with a shortlist: the recorded
    winner and the first `baselines` candidates of each library of the family's baseline.
    """

    read: Literal["inputs", "table"]
    baselines: int

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("selections", "problems", "shortlist")
    reads: ClassVar[tuple[str, ...]] = ("inputs", "table", "target")

    def __post_init__(self) -> None:
        check_at_least(0, baselines=self.baselines)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the rows. Raises UserError for a table that cannot be read, or that is also written."""
        given = {"inputs": context.inputs, "table": context.table}
        other = "table" if self.read == "inputs" else "inputs"
        if given[other]:
            raise UserError(f"{other}: cannot be combined with {self.read}=, which this pipeline starts from")
        if not given[self.read]:
            example = "'inputs=[a.csv,b.csv]'" if self.read == "inputs" else "table=outputs/tuned/NAME.csv"
            raise UserError(f"{self.read}: missing; expected tuned tables, as in {example}")
        files = named_files(self.read, context.inputs or str(context.table))
        if self.read == "table":
            return self._of_table(files, context)
        files = _without_output(files, context)
        if context.targets and not any(is_results(path) for path in files):
            raise UserError("target: given; expected for TunableOp's files alone, as rows of tables have their device")
        entries: list[TableEntry] = []
        for path in files:
            found, contents = _read(path, context)
            context.events.emit("line", f"load: {path}: {contents}")
            entries += found
        if not entries:
            named = ", ".join(context.inputs)
            raise UserError(f"inputs: no rows in {named}: nothing to merge; expected tuned tables with rows")
        return {
            "selections": selections_frame(context.family, entries),
            "shortlist": _shortlist([], 0, context),
        }

    def _of_table(self, files: Sequence[Path], context: Context) -> "dict[str, pd.DataFrame]":
        if len(files) != 1:
            raise UserError(f"table: {len(files)} files; expected one ('gemmpipe merge' unites several)")
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
            if winner.reason and not winner.cannot_run:
                context.events.emit("line", f"stale: {entry.place}: {winner.problem.id}: {winner.reason}")
        _report_missing(found, files[0], context)
        selections = selections_frame(context.family, entries)
        selections["problem"] = [winner.problem.id for winner in found]
        selections["candidate"] = [winner.candidate.id if winner.candidate else None for winner in found]
        selections["reason"] = [winner.reason for winner in found]
        context.problems[:] = {winner.problem.id: winner.problem for winner in found}.values()
        return {
            "selections": selections,
            "shortlist": _shortlist(found, self.baselines if context.device.kind != "none" else 0, context),
        }


def _report_missing(found: Sequence[Winner], path: Path, context: Context) -> None:
    """Lines about rows whose library is not here. Raises EnvironmentProblem if that is all rows.

    Without a device only kernels are compiled, which rows of libraries do not need.
    """
    if context.device.kind == "none":
        return
    reasons = Counter(winner.reason for winner in found if winner.cannot_run).most_common()
    if reasons and sum(count for _, count in reasons) == len(found):
        why = "; ".join(f"{counted(count, 'row')} {reason}" for reason, count in reasons)
        raise EnvironmentProblem(f"table: {path}: {why}; nothing is left to check")
    for reason, count in reasons:
        context.events.emit("line", f"load: {path}: {counted(count, 'row')} {reason}")


def _without_output(files: Sequence[Path], context: Context) -> list[Path]:
    """The inputs without the output, which a glob may match: merge reads it anyway.

    Raises UserError where it is named, and for an input that a file next to the output would overwrite.
    """
    written = native_tables(context.family, context.output, (each for _, each in context.formats))
    named = [Path(text).expanduser() for text in context.inputs]
    for path in files:
        if path in named and any(table.exists() and table.samefile(path) for table in written):
            raise UserError(f"inputs: '{path}' is also the output; expected another one: output=NAME.csv")
    written_too = {each.resolve() for table in written for each in (sidecar_path(table), report_path(table))}
    for path in files:
        if path.resolve() in written_too:
            raise UserError(f"inputs: '{path}' is written together with the output; expected another output=")
    return [path for path in files if not any(table.exists() and table.samefile(path) for table in written)]


def _read(path: Path, context: Context) -> tuple[list[TableEntry], str]:
    """The rows of a table, and a summary of its contents."""
    sheet = _tunableop(path, context) if is_results(path) else parse_table(path, context.family)
    try:
        runs = read_runs(sidecar_path(path))
    except UserError as error:
        context.events.emit("warning", f"{error}; left out")
        runs = {}
    return entries_of(path, context.family, sheet, runs), _contents(sheet)


def _tunableop(path: Path, context: Context) -> ParsedTable:
    """The winners of a TunableOp result file (PyTorch)."""
    found = read_results(path, context.family, _tuned_on(path, context))
    for reason, count in found.left_out.most_common():
        context.events.emit("line", f"load: {path}: {count:,} left out: {reason}")
    return ParsedTable(extra=(), missing_columns=(), rows=found.rows, lines=found.lines)


def _tuned_on(path: Path, context: Context) -> Device:
    """The device of a result file: `target=`, else this machine's GPU, else the one that its contents suggest."""
    if context.targets and len(context.targets) > 1:
        raise UserError(f"target: {', '.join(context.targets)}; expected the one that {path} was tuned on")
    if context.targets or gpu_kind():
        return target_device(context.targets[0]) if context.targets else gpu_device(0)
    if gfx := tuned_gfx(path):
        device = target_device(gfx)
        where = f"{device.name}, {device.cu_num} units of {gfx}"
        context.events.emit("line", f"load: {path}: assumed to be tuned on {where}")
        return device
    raise UserError(f"{path}: no GPU here or in the file; expected the one that it was tuned on: target=sm_90")


def _contents(sheet: ParsedTable) -> str:
    """`90 rows (90 sm_90/132); missing columns filled: bpreshuffle; unknown columns kept: _tag`."""
    devices = ", ".join(f"{count:,} {device}" for device, count in sorted(_device_counts(sheet.rows).items()))
    parts = [f"{counted(len(sheet.rows), 'row')}{f' ({devices})' if devices else ''}"]
    if sheet.missing_columns:
        parts.append(f"missing columns filled: {', '.join(sheet.missing_columns)}")
    if sheet.extra:
        parts.append(f"unknown columns kept: {', '.join(sheet.extra)}")
    if sheet.formula_columns:
        parts.append(f"cells left out, as spreadsheets read them as formulas: {', '.join(sheet.formula_columns)}")
    return "; ".join(parts)


def _device_counts(rows: Iterable[Row]) -> Counter[str]:
    return Counter(f"{row['gfx']}/{row['cu_num']}" for row in rows)


def _wanted(entries: Sequence[TableEntry], path: Path, context: Context) -> tuple[list[TableEntry], str]:
    """The rows for this run's device, or without one for its targets or any GPU; and the text of that condition."""
    device, targets = context.device, context.targets
    if not entries:
        raise UserError(f"table: {path} has no rows; expected a tuned table")
    if device.kind != "none":
        if targets:
            raise UserError("target: given; expected none, as rows are verified on this machine's device")
        found = _of_device(entries, device)
        here = f"this machine is {device.gfx}/{device.cu_num} ({device.name})"
    else:
        wanted = {target_device(gfx).gfx for gfx in targets} if targets else None
        found = [e for e in entries if (e.row["gfx"] in wanted if wanted else not _of_cpu(e.row))]
        here = f"none for target={','.join(targets)}" if targets else "only GPUs have kernels to compile"
        for gfx in (wanted or set()) - {str(e.row["gfx"]) for e in found} if found else ():
            context.events.emit("warning", f"target: {path} has no row for {gfx}; nothing is compiled for it")
    if not found:
        rows = ", ".join(_device_counts(e.row for e in entries))
        raise (UserError if targets or device.kind == "none" else EnvironmentProblem)(
            f"table: {path} has rows for {rows}, and {here}"
        )
    return found, here


def _of_device(entries: Sequence[TableEntry], device: Device) -> list[TableEntry]:
    """The rows for a device: of its model or of none, as an H100 and an H200 have equal `gfx` and `cu_num`.

    Where the table has no such row, those of other models: they are checked, and their times not compared.
    """
    fit = [e for e in entries if (e.row["gfx"], e.row["cu_num"]) == (device.gfx, device.cu_num)]
    return [e for e in fit if e.row.get("device") in (None, "", device.name)] or fit


def _of_cpu(row: Row) -> bool:
    return str(row["gfx"]).startswith("cpu")


def _shortlist(found: Sequence[Winner], baselines: int, context: Context) -> "pd.DataFrame":
    """The valid winners, each with its baseline candidates; none has a time yet."""
    import pandas as pd

    rows: list[dict[str, object]] = []
    for winner in found:
        if winner.candidate is None or winner.spec is None or winner.implementation is None:
            continue
        listed = {winner.candidate: winner.implementation}
        listed |= (
            {c: i for i, c in baseline_candidates(context, winner.spec, baselines) if c != winner.candidate}
            if baselines
            else {}
        )
        for candidate, implementation in listed.items():
            library = candidate.backend in context.family.baseline
            context.journal.kernel_names[candidate.id] = implementation.kernel_name(candidate.knobs)
            rows.append(untimed_row(winner.problem.id, candidate, "library" if library else "incumbent"))
    return pd.DataFrame(rows, columns=list(columns.SHORTLIST))


def selections_frame(family: Family, entries: Iterable[TableEntry]) -> "pd.DataFrame":
    """Entries as selections, one per row: the columns of the table and `schema.RECORDED`."""
    import pandas as pd

    names = [*columns.DEVICE_COLUMNS, *(column.name for column in family.key_columns), *columns.RESULT]
    rows = [(*map(entry.row.get, names), "", entry.place, entry.extra) for entry in entries]
    # As objects: numbers stay what they were, and None stays None.
    return pd.DataFrame(rows, columns=[*names, "format", *columns.RECORDED], dtype=object)
