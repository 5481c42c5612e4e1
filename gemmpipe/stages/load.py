"""The first stage of pipelines that start from tuned tables.

The winners of a tuned table as problems and candidates, and why one of them does not stand any more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gemmpipe.core import schema as columns
from gemmpipe.core.artifact import read_runs, sidecar_path
from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.device import gpu_device, gpu_kind, target_device
from gemmpipe.core.errors import EnvironmentProblem, UserError, check_at_least
from gemmpipe.core.files import named_files
from gemmpipe.family import Family, GemmSpec, Implementation
from gemmpipe.family.guard import PluginError
from gemmpipe.formats.native import report_path
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.history import native_tables
from gemmpipe.stages.rows import problem_frame, untimed_row
from gemmpipe.stages.screen.candidates import CandidateFilter
from gemmpipe.tables.merge import Row
from gemmpipe.tables.recorded import UnusableRow, candidate_of_row, libtype_of
from gemmpipe.tables.store import ParsedTable, is_timed, parse_table
from gemmpipe.tables.tunableop import is_results, read_results, tuned_gfx
from gemmpipe.tables.unite import TableEntry, entries_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A row's problem and, unless there is a reason against it, its candidate and who computes it."""

    problem: Problem
    device: Device
    spec: GemmSpec | None = None
    implementation: Implementation | None = None
    candidate: Candidate | None = None
    reason: str = ""


def winners(context: Context, rows: Iterable[Row], device_for: Callable[[Row], Device]) -> Iterator[Winner]:
    """A winner a row, in order; `device_for` says which device the row is for."""
    for row in rows:
        device = device_for(row)
        problem = context.family.problem(tuple((c.name, row[c.name]) for c in context.family.key_columns))
        try:
            yield _winner(context, row, problem, device)
        except (UnusableRow, UserError) as error:
            yield Winner(problem=problem, device=device, reason=str(error))


def _winner(context: Context, row: Row, problem: Problem, device: Device) -> Winner:
    spec = context.family.spec(problem)
    label = libtype_of(row, context.family)
    implementation = context.implementation(label)
    if not is_timed(row):
        raise UnusableRow(f"time: us is {row.get('us')}, no time that was measured")
    if implementation is None:
        raise UnusableRow(f"backend: no '{label}' among the backends of this run")
    if context.device == device and (missing := implementation.unavailable(device)):
        raise UnusableRow(f"backend: {label}: {missing}")
    candidate = candidate_of_row(implementation, row, spec, device)
    return Winner(problem=problem, device=device, spec=spec, implementation=implementation, candidate=candidate)


def baseline_candidates(context: Context, spec: GemmSpec, most: int) -> Iterator[tuple[Implementation, Candidate]]:
    """The library paths that a winner is held against: the first `most` of each label of the family's baseline."""
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
            (implementation, candidate) for candidate in islice(candidate_filter.valid_candidates(listed), most)
        )


@dataclass(frozen=True, kw_only=True)
class Load(Stage):
    """Reads tuned tables.

    `of: inputs` gives every row of `inputs=` as a selection: who comes next decides which stay. `of: table` gives
    the rows of `table=` that are for this run's device (or its targets), as problems with a shortlist each: the
    recorded winner and the first `baseline_candidates` candidates of each library that is the baseline.
    """

    read: Literal["inputs", "table"]
    baselines: int

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("selections", "problems", "shortlist")
    reads: ClassVar[tuple[str, ...]] = ("inputs", "table", "target")

    def __post_init__(self) -> None:
        check_at_least(0, baselines=self.baselines)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The rows. Raises UserError for a table that cannot be read, or that is also written."""
        given = {"inputs": context.inputs, "table": context.table}
        other = "table" if self.read == "inputs" else "inputs"
        if given[other]:
            raise UserError(f"{other}: this pipeline starts from {self.read}=, expected that alone")
        if not given[self.read]:
            example = "'inputs=[a.csv,b.csv]'" if self.read == "inputs" else "table=outputs/tuned/NAME.csv"
            raise UserError(f"{self.read}: missing, expected tuned tables, as in {example}")
        files = named_files(self.read, context.inputs or str(context.table))
        if self.read == "table":
            return self._of_table(files, context)
        files = _without_output(files, context)
        if context.targets and not any(is_results(path) for path in files):
            raise UserError("target: tables say their devices themselves, expected none but for TunableOp's files")
        entries: list[TableEntry] = []
        for path in files:
            found, contents = _read(path, context)
            context.events.emit("line", f"load: {path}: {contents}")
            entries += found
        return {
            "selections": selections_frame(context.family, entries),
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
        selections = selections_frame(context.family, entries)
        selections["problem"] = [winner.problem.id for winner in found]
        selections["candidate"] = [winner.candidate.id if winner.candidate else None for winner in found]
        selections["reason"] = [winner.reason for winner in found]
        problems = {winner.problem.id: winner.problem for winner in found}
        return {
            "selections": selections,
            "problems": problem_frame(context.family, problems.values()),
            "shortlist": _shortlist(found, self.baselines if context.device.kind != "none" else 0, context),
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
    beside = {each.resolve() for table in written for each in (sidecar_path(table), report_path(table))}
    for path in files:
        if path.resolve() in beside:
            raise UserError(f"inputs: '{path}' is where a file beside the output goes, expected another output=")
    return [path for path in files if not any(table.exists() and table.samefile(path) for table in written)]


def _read(path: Path, context: Context) -> tuple[list[TableEntry], str]:
    """The rows of a table, and its contents in words."""
    sheet = _tunableop(path, context) if is_results(path) else parse_table(path, context.family)
    try:
        runs = read_runs(sidecar_path(path))
    except UserError as error:
        context.events.emit("warning", f"{error}; left out")
        runs = {}
    return entries_of(path, context.family, sheet, runs), _contents(sheet)


def _tunableop(path: Path, context: Context) -> ParsedTable:
    """The winners of a result file of PyTorch's TunableOp."""
    found = read_results(path, context.family, _tuned_on(path, context))
    for reason, count in found.left_out.most_common():
        context.events.emit("line", f"load: {path}: {count:,} left out: {reason}")
    return ParsedTable(extra=(), missing_columns=(), rows=found.rows, lines=found.lines)


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


def _contents(sheet: ParsedTable) -> str:
    """`90 rows (90 sm_90/132), no column bpreshuffle, kept _tag`."""
    said = ", ".join(f"{count:,} {place}" for place, count in sorted(_places(sheet.rows).items()))
    lacking = (
        f"; filled, since it has no such column: {', '.join(sheet.missing_columns)}" if sheet.missing_columns else ""
    )
    extra = f"; kept, though unknown: {', '.join(sheet.extra)}" if sheet.extra else ""
    odd = f"; left out, as spreadsheets take them for formulas: cells of {', '.join(sheet.formula_columns)}"
    return (
        f"{len(sheet.rows):,} rows{f' ({said})' if said else ''}{lacking}{extra}{odd if sheet.formula_columns else ''}"
    )


def _places(rows: Iterable[Row]) -> Counter[str]:
    return Counter(f"{row['gfx']}/{row['cu_num']}" for row in rows)


def _wanted(entries: Sequence[TableEntry], path: Path, context: Context) -> tuple[list[TableEntry], str]:
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
        listed |= (
            {c: i for i, c in baseline_candidates(context, winner.spec, most) if c != winner.candidate} if most else {}
        )
        for candidate, implementation in listed.items():
            library = candidate.backend in context.family.baseline
            context.journal.kernel_names[candidate.id] = implementation.kernel_name(candidate.knobs)
            rows.append(untimed_row(winner.problem.id, candidate, "library" if library else "incumbent"))
    return pd.DataFrame(rows, columns=list(columns.SHORTLIST))


def selections_frame(family: Family, entries: Iterable[TableEntry]) -> "pd.DataFrame":
    """Entries as selections: a problem's own each, columns as they are in the table, and `table.RECORDED`."""
    import pandas as pd

    names = ["gfx", "cu_num", *(column.name for column in family.key_columns), *columns.RESULT]
    rows = [(*map(entry.row.get, names), "", entry.place, entry.extra) for entry in entries]
    # As objects: numbers stay what they were, and None stays None.
    return pd.DataFrame(rows, columns=[*names, "format", *columns.RECORDED], dtype=object)
