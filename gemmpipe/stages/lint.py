"""The lint stages: check engines' configuration files, and compare timed entries with the engines' defaults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends.engine import EngineBackend, EngineImplementation
from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import TIMED, Candidate, Device, Knobs, Problem, Scalar
from gemmpipe.core.errors import UserError, check_at_least, suggest
from gemmpipe.engines.launch import DENSE, EXPERTS
from gemmpipe.engines.packages import ENGINES, SGLANG, VLLM
from gemmpipe.family import KernelDefaults
from gemmpipe.family.dtypes import native_fp8
from gemmpipe.family.problem import make_problem, merge_duplicates
from gemmpipe.formats.engine_filenames import EngineFileName
from gemmpipe.formats.engine_json import EngineJson, Sglang, Vllm
from gemmpipe.formats.engine_knobs import check_entry
from gemmpipe.formats.engine_lint import LintedFile, findings_of, lint
from gemmpipe.formats.findings import ERROR, NOTE, WARNING, Finding, summary
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.rows import TrialRow, row_samples_us, trials_by_candidate, untimed_row

if TYPE_CHECKING:
    import pandas as pd

_FORMATS: Mapping[str, EngineJson] = {VLLM: Vllm(device_name=None), SGLANG: Sglang(device_name=None)}
_ENTRIES = ("problem", "path", "M", "entry", "default")
_FINDINGS = ("file", "key", "severity", "text", "remedy")


@dataclass(frozen=True, kw_only=True)
class Lint(Stage):
    """Checks the files at `paths`; `timed`: also times each entry at its M in the finals, with the engine's default.

    `model_dim` and `topk` complete the product of an experts' file, as its name does not have them.
    """

    paths: tuple[str, ...]
    engine: str | None
    timed: bool
    model_dim: int | None
    topk: int | None

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("problems", "shortlist", "entries", "findings")
    needs_device_info: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least(1, model_dim=self.model_dim, topk=self.topk)
        if self.engine is not None and self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine}, expected vllm or sglang{suggest(self.engine, ENGINES)}")

    def check(self, context: Context) -> None:
        """Raises UserError without a path."""
        if not self.paths:
            raise UserError("lint: no path; expected configuration files of an engine, or folders of them")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns `findings`; `entries`, the timed ones; and the shortlist of their finals. Sets their problems.

        An error makes the run end with exit code 1. Raises UserError for a path that does not exist.
        """
        import pandas as pd

        from gemmpipe.core.schema import SHORTLIST

        present = () if context.device.kind == "cpu" else (context.device.name,)
        files = lint([Path(path).expanduser() for path in self.paths], self.engine, present)
        timing = _Timing(lint=self, context=context)
        for file in files if self.timed else ():
            timing.add(file)
        found = [*findings_of(files), *timing.notes]
        report_findings(found, context)
        context.events.emit("line", summary(len(files), found))
        rows = [(str(f.path), f.key, f.severity, f.text, f.remedy) for f in found]
        context.problems[:] = merge_duplicates(timing.problems)
        return {
            "shortlist": pd.DataFrame(list(timing.shortlist.values()), columns=list(SHORTLIST)),
            "entries": pd.DataFrame(timing.entries, columns=list(_ENTRIES)),
            "findings": pd.DataFrame(rows, columns=list(_FINDINGS)),
        }


def report_findings(findings: list[Finding], context: Context) -> None:
    """Prints each finding; files with an error make the run end with exit code 1."""
    for finding in findings:
        context.events.emit("line", finding.line)
    broken = dict.fromkeys(str(finding.path) for finding in findings if finding.severity == ERROR)
    context.unsolved.extend(path for path in broken if path not in context.unsolved)


class _Timing:
    """The entries to time, and notes about files that cannot be timed."""

    def __init__(self, *, lint: Lint, context: Context) -> None:
        self._lint, self._context = lint, context
        self.notes: list[Finding] = []
        self.problems: list[Problem] = []
        self.shortlist: dict[tuple[str, str], dict[str, object]] = {}
        self.entries: list[tuple[str, str, int, str, str]] = []

    def add(self, file: LintedFile) -> None:
        """Adds a file's entries, or a note where they cannot be timed."""
        reason = self._untimed_reason(file.name)
        if reason is None and file.name is not None:
            reason = self._entries(file, file.name)
        if reason is not None:
            remedy = "the checks without a device are done"
            self.notes.append(Finding(path=file.path, severity=NOTE, text=f"not timed: {reason}", remedy=remedy))

    def _untimed_reason(self, name: EngineFileName | None) -> str | None:
        if name is None:
            return "its name has no product"
        if name.kind not in (DENSE, EXPERTS) or name.down:
            return "no function that reads this kind of file can be timed"
        if name.kind == EXPERTS and (self._lint.model_dim is None or self._lint.topk is None):
            return "its name does not have the whole product; model_dim= and topk= complete it"
        device = _FORMATS[name.engine].device_of(self._context.device)
        if self._context.device.kind != "cpu" and name.device not in (device, self._context.device.name):
            return f"it is for {name.device}, this device is {device}"
        return None

    def _entries(self, file: LintedFile, name: EngineFileName) -> str | None:
        """Adds the entries of a file. Returns the reason where there is none, else None."""
        context = self._context
        found = EngineBackend(engine=name.engine).implementations(context.family)
        if not found:
            return f"{name.engine} has no function for kernel={context.family.name}; expected another kernel="
        before = len(self.entries)
        for m, given in file.entries.items():
            try:
                sizes, defaults = self._sizes(name, m), self._defaults(name)
                problem = make_problem(context.family, sizes, defaults, context.device.gfx, str(file.path))
            except UserError as error:
                return f"{error}; expected another kernel="
            spec = context.family.spec(problem)
            own_name = _FORMATS[name.engine].file_name(spec, name.device)
            if own_name != name.expected:
                return f"kernel={context.family.name} reads {own_name}; kernel.dtype= and kernel.key.*= choose another"
            default = found[0].default(spec, context.device)
            knobs = _runnable(found[0], given, name, problem=problem, context=context)
            if default is not None and knobs is not None:
                self._add(file.path, problem, m, found[0], knobs, default)
        return None if len(self.entries) > before else "no entry runs here, or the engine's default is unknown"

    def _defaults(self, name: EngineFileName) -> KernelDefaults:
        """The user's, with the dtype of the file's name where the user gives none."""
        defaults = self._context.defaults
        if defaults.dtype is None and name.dtype.startswith("fp8"):
            return replace(defaults, dtype=native_fp8(self._context.device.gfx))
        return defaults

    def _sizes(self, name: EngineFileName, m: int) -> Mapping[str, Scalar]:
        if name.kind == DENSE:
            return {"M": m, "N": name.sizes[0], "K": name.sizes[1]}
        sizes: dict[str, Scalar] = {"token": m, "expert": name.sizes[0], "inter_dim": name.sizes[1]}
        return {**sizes, "model_dim": self._lint.model_dim, "topk": self._lint.topk}

    def _add(
        self, path: Path, problem: Problem, m: int, engine: EngineImplementation, knobs: Knobs, default: Knobs
    ) -> None:
        spec, device = self._context.family.spec(problem), self._context.device
        both = [Candidate.of(engine.label, engine.normalise(spec, each, device)) for each in (knobs, default)]
        self.problems.append(problem)
        for candidate in both:
            self.shortlist[problem.id, candidate.id] = untimed_row(problem.id, candidate, "incumbent")
        self.entries.append((problem.id, str(path), m, both[0].id, both[1].id))


def _runnable(
    engine: EngineImplementation,
    given: Mapping[str, object],
    name: EngineFileName,
    *,
    problem: Problem,
    context: Context,
) -> Knobs | None:
    """The knobs of an entry to be timed, or None where they cannot run here."""
    if any(severity == ERROR for severity, _, _ in check_entry(given, name)) or given.get("USE_TMA"):
        return None
    knobs: dict[str, Scalar] = {"num_warps": 4, "num_stages": _default_num_stages(context.device)}
    knobs |= {k: v for k, v in given.items() if isinstance(v, str | int | float) and k != "USE_TMA"}
    spec = context.family.spec(problem)
    fits = engine.unsupported_reason(spec, engine.normalise(spec, knobs, context.device), context.device) is None
    return knobs if fits or engine.unavailable_reason() is None else None


def _default_num_stages(device: Device) -> int:
    """Triton's default for an entry without `num_stages`."""
    return 2 if device.vendor == "amd" else 3


@dataclass(frozen=True, kw_only=True)
class LintTimings(Stage):
    """Reports entries slower than the engine's default by more than `slower_pct`, paired by round."""

    slower_pct: float

    needs: ClassVar[tuple[str, ...]] = ("entries", "trials")
    gives: ClassVar[tuple[str, ...]] = ("slower",)

    def __post_init__(self) -> None:
        check_at_least(0, slower_pct=self.slower_pct)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns `slower`, a row per finding; an entry that fails when it is timed is an error."""
        import pandas as pd

        trials = trials_by_candidate(tables["trials"])
        found = list(self._findings(tables["entries"].to_dict("records"), trials))  # type: ignore[arg-type]
        report_findings(found, context)
        context.events.emit("line", summary(tables["entries"]["path"].nunique(), found).replace("lint:", "timed:"))
        rows = [(str(f.path), f.key, f.severity, f.text, f.remedy) for f in found]
        return {"slower": pd.DataFrame(rows, columns=list(_FINDINGS))}

    def _findings(
        self, entries: list[Mapping[str, object]], trials: Mapping[tuple[str, str], TrialRow]
    ) -> Iterator[Finding]:
        for row in entries:
            path, key = Path(str(row["path"])), str(row["M"])
            entry = trials.get((str(row["problem"]), str(row["entry"])))
            default = trials.get((str(row["problem"]), str(row["default"])))
            if entry is None or default is None or str(default["status"]) not in TIMED:
                continue
            if str(entry["status"]) not in TIMED:
                text = f"fails on this device: {entry['status']}: {entry['error']}"
                yield Finding(path=path, key=key, severity=ERROR, text=text, remedy="delete or tune this entry")
                continue
            ratio = paired_ratio(row_samples_us(entry), row_samples_us(default))
            if row["entry"] != row["default"] and ratio.low > 1 and ratio.median > 1 + self.slower_pct / 100:
                text = (
                    f"takes {entry['us']:.2f} us, {ratio.median:.2f} times the engine's default "
                    f"({ratio.low:.2f} to {ratio.high:.2f})"
                )
                yield Finding(path=path, key=key, severity=WARNING, text=text, remedy="tune this M")
