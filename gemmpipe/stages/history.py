"""Results of earlier runs: trials that are not repeated, trials and choices that searches learn from, incumbents.

An incumbent is the choice of the output table for this device, timed again next to the new candidates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe import journal
from gemmpipe.core.data import SCREENING, Candidate, Device, Problem, Scalar, Trial
from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.problem import make_problem
from gemmpipe.formats import Format
from gemmpipe.journal import Record
from gemmpipe.search.history import History
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store
from gemmpipe.tables.merge import CUT_SHORT, SHARED_CPU, SHARED_GPU, RowPreference, rows_by_key

_SAME_VERSIONS = ("python", "torch", "triton", "cuda", "hip")
FORMER_POLICIES = {"cpu": "host interleaved", "gpu": "graph cold interleaved"}
"""Kind of device -> the timing method of journals that do not name it; launches on a GPU ran back to back."""


def method(policy: object) -> tuple[str, ...]:
    """The parts of a policy that describe the timing method, without those on other processes and budgets."""
    return tuple(word for word in str(policy).split() if word not in (SHARED_GPU, SHARED_CPU, CUT_SHORT))


@dataclass(frozen=True, kw_only=True)
class TrialCache:
    """This run's finished trials, then those of earlier runs of the same kernels, versions and device."""

    own: Record
    prior_records: Sequence[Record] = ()
    kernel_names: Mapping[str, str] = field(default_factory=dict)
    """By candidate id, with the hash of the kernel's current source."""

    def find(self, stage: str, problem: str, candidate: Candidate, launches: int) -> Trial | None:
        """The finished trial of this request, or the failure that ended the candidate's attempts."""
        found = self.own.find(stage, problem, candidate, launches)
        for record in self.prior_records if found is None else ():
            if record.kernel_names.get(candidate.id) == self.kernel_names.get(candidate.id):
                found = found or record.find(stage, problem, candidate, launches)
        return found


@dataclass(frozen=True, kw_only=True)
class PriorRuns:
    """The journals that a run learns from."""

    family: Family
    device: Device
    records: tuple[Record, ...] = ()

    def comparable(self, versions: Mapping[str, object], policy: str) -> tuple[Record, ...]:
        """Journals with times that are comparable to this run's: same device, versions and timing method."""
        return tuple(r for r in self.records if all(self._same(session, versions, policy) for session in r.sessions))

    def _same(self, session: Mapping[str, object], versions: Mapping[str, object], policy: str) -> bool:
        device: Mapping[str, object] = session["device"]  # type: ignore[assignment]
        before: Mapping[str, object] = session["versions"]  # type: ignore[assignment]
        machine = (device["gfx"], device["cu_num"], device.get("shared", False))
        former = FORMER_POLICIES["cpu" if self.device.kind == "cpu" else "gpu"]
        same = machine == (self.device.gfx, self.device.cu_num, self.device.shared)
        same = same and method(session.get("policy") or former) == method(policy)
        return same and all(before.get(name) == versions.get(name) for name in _SAME_VERSIONS)

    def fill_history(self, history: History) -> None:
        """Adds the trials of the same family and architecture to the history."""
        for record in self.records:
            arch = {session["device"]["gfx"] for session in record.sessions}  # type: ignore[index]
            if arch != {self.device.gfx}:
                continue
            history.facts |= record.facts
            for row in record.problems:
                if str(row["id"]).split(" ")[0] == self.family.name:
                    self._add_problem(history, record, str(row["id"]), row["key"])  # type: ignore[arg-type]

    def _add_problem(self, history: History, record: Record, name: str, key: Mapping[str, Scalar]) -> None:
        trials = record.of(SCREENING, name)
        builds = {t.candidate.id: record.builds.get((name, t.candidate.id), ()) for t in trials}
        problem = self.family.problem(tuple(key.items()))
        history.add_problem(problem, self.family.spec(problem), builds)
        for trial in trials:
            history.learn(trial)


def prior_runs(folders: Sequence[str], family: Family, device: Device) -> PriorRuns:
    """Reads the journals of these run folders. Raises UserError for a folder without one."""
    records = []
    for folder in folders:
        if not (Path(folder) / journal.NAME).is_file():
            raise UserError(f"search.journals: {folder}: no {journal.NAME} there; expected the folder of a run")
        records.append(journal.read(Path(folder)))
    return PriorRuns(family=family, device=device, records=tuple(records))


def unfinished_runs(tables: Sequence[Path], family: Family, runs: Path) -> list[str]:
    """Folders below `runs` (`<pipeline>/<run id>`) of the runs that wrote cut-short rows of these tables."""
    ids = {
        str(row.get("run_id"))
        for path in tables
        if path.is_file()
        for row in store.read(path, family)
        if CUT_SHORT in str(row.get("policy"))
    }
    found = [path.parent for name in sorted(ids) for path in sorted(runs.glob(f"*/{name}/{journal.NAME}"))]
    return [str(path) for path in found]


def add_table_winners(history: History, tables: Sequence[Path], family: Family, device: Device) -> None:
    """Adds the choices of tuned tables for this architecture: a search on a near problem starts with them."""
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    for path in tables:
        rows = [row for row in (store.read(path, family) if path.is_file() else ()) if row.get("config")]
        for best, *_ in rows_by_key(rows, family, RowPreference(device=device.name)).values():
            if best["gfx"] == device.gfx:
                key = {c.name: best[c.name] for c in family.key_columns}
                problem: Problem = make_problem(family, key, defaults, device.gfx, str(path))
                known = history.add_problem(problem, family.spec(problem))
                known.winner = candidate_of(str(best["libtype"]), str(best["config"]))


def native_tables(family: Family, output: Path, formats: Iterable[Format]) -> list[Path]:
    """The native tables of this output folder, written already or not."""
    return [path for each in formats if (path := each.table(family, output)) is not None]


def incumbents_of(
    family: Family, device: Device, output: Path, formats: Iterable[Format]
) -> dict[str, tuple[Candidate, ...]]:
    """The output's choices by problem id; rows without a config (another tool's) are skipped.

    Raises UserError for a broken table.
    """
    tables = [path for path in native_tables(family, output, formats) if path.is_file()]
    rows = [row for path in tables for row in store.read(path, family) if row.get("config")]
    found: dict[str, tuple[Candidate, ...]] = {}
    for best, *_ in rows_by_key(rows, family, RowPreference(device=device.name)).values():
        if (best["gfx"], best["cu_num"]) != (device.gfx, device.cu_num):
            continue
        key = tuple((c.name, best[c.name]) for c in family.key_columns)
        candidate = candidate_of(str(best["libtype"]), str(best["config"]))
        found[family.problem(key).id] = (candidate,)
    return found
