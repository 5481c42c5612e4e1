"""trials.jsonl: the append-only truth of a run; everything else is derived from it."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from gemmpipe import journalled
from gemmpipe.data import BuildFacts, Candidate, Trial
from gemmpipe.errors import EnvironmentProblem, UserError
from gemmpipe.paths import no_link

NAME = "trials.jsonl"
_SYNC_EVERY_S = 1.0
_TRIES = 100  # to begin again in a folder that is being deleted
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """The writer: one line a row, flushed a row, fsynced about once a second. Only the driver has one."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`/trials.jsonl for appending; a line cut off by a kill is ended so that it spoils no other.

        Raises EnvironmentProblem when the folder cannot be written, UserError when another run writes this journal.
        """
        self.path = folder / NAME
        self._known: dict[str, tuple[str, ...]] = {}
        self.kernel_names: dict[str, str] = {}
        """By candidate id; goes into the row that introduces a candidate."""
        self.builds: dict[tuple[str, str], tuple[str, ...]] = {}
        """By (problem id, candidate id): what had to be compiled; goes there too."""
        self._synced = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
            if not _ends_whole(self.path):
                self._file.write("\n")
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{self.path}: another gemmpipe is still at work on this run") from None
        except OSError as error:
            raise EnvironmentProblem(f"{self.path}: cannot write the journal: {error.strerror}") from None

    def _open(self) -> None:
        self._file: IO[str] = open(self.path, "a+", encoding="utf-8", opener=no_link)  # noqa: SIM115 (as long as the run)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends

    def write(self, row: str, **values: object) -> None:
        """Append one row of the kind `row`. Raises EnvironmentProblem when the disk is full."""
        try:
            self._file.write(_ENCODE({"row": row, **values}) + "\n")
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC_EVERY_S:
                self.sync()
        except OSError as error:
            raise EnvironmentProblem(f"{self.path}: cannot write the journal: {error.strerror}; resume=last") from None

    def launch(self, stage: str, problem: str, candidates: list[Candidate]) -> None:
        """Before the first launch of these candidates in a worker."""
        for candidate in candidates:
            self._introduce(candidate, problem)
        self.write("launch", stage=stage, problem=problem, candidates=[c.id for c in candidates])

    def trial(self, trial: Trial) -> None:
        """After a candidate's attempt, however it ended."""
        self._introduce(trial.candidate, trial.problem)
        row: dict[str, object] = {
            "stage": trial.stage,
            "problem": trial.problem,
            "candidate": trial.candidate.id,
            "status": str(trial.status),
            "launches": trial.launches,
            "samples_us": list(trial.samples_us),
        }
        if trial.look != trial.launches:
            row["asked"] = trial.asked
        if trial.err_ratio is not None:
            row["err_ratio"] = trial.err_ratio
        if trial.extra_weight_bytes:
            row["extra_weight_bytes"] = trial.extra_weight_bytes
        if trial.shared:
            row["shared"] = True
        if trial.error:
            row["error"] = trial.error
        if trial.tuning is not None:
            row["tuning"] = asdict(trial.tuning)
        self.write("trial", **row)

    def build(self, build: str, facts: BuildFacts) -> None:
        """After a build, however it ended."""
        self.write(
            "build",
            id=build,
            compile_s=round(facts.compile_s, 3),
            shared_bytes=facts.shared_bytes,
            registers=facts.registers,
            spills=facts.spills,
            error=facts.error,
        )

    def _introduce(self, candidate: Candidate, problem: str) -> None:
        """Write who a candidate is, again where a problem wants it compiled otherwise."""
        builds = self.builds.get((problem, candidate.id), ())
        if self._known.get(candidate.id) == builds:
            return
        self._known[candidate.id] = builds
        name = self.kernel_names.get(candidate.id, candidate.backend)
        row: dict[str, object] = {"id": candidate.id, "backend": candidate.backend, "knobs": candidate.knobs}
        self.write("candidate", **row, kernel=name, **({"builds": list(builds)} if builds else {}))

    def sync(self) -> None:
        """Put everything written so far on the disk; under its name, should somebody have deleted that meanwhile."""
        if not self.path.exists():
            self._write_again()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _write_again(self) -> None:
        """A new file of this name with all that was written; the old one is held until it stands."""
        held = self._file
        held.seek(0)
        text = held.read()
        for attempt in range(_TRIES):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
                break
            except FileNotFoundError:  # the folder is being deleted right now
                if attempt == _TRIES - 1:
                    raise
        self._file.write(text)
        self._file.flush()
        held.close()

    def close(self) -> None:
        """Sync and close; closing twice is fine. Rows that a full disk refused were told when they were written."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.flush()
                self.sync()
            with contextlib.suppress(OSError):
                self._file.close()


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return True
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


@dataclass(kw_only=True)
class Record:
    """A journal read back: the last trial of each (stage, problem, candidate, look), and finished finals."""

    sessions: list[Mapping[str, object]] = field(default_factory=list)
    problems: list[Mapping[str, object]] = field(default_factory=list)
    finished: set[tuple[str, str]] = field(default_factory=set)
    """(stage, problem) whose `done` row stands."""
    cut: set[str] = field(default_factory=set)
    """Problems whose search was cut short."""
    homes: dict[str, str] = field(default_factory=dict)
    """By problem id: the device (UUID or name) that its candidates were timed on."""
    kernel_names: dict[str, str] = field(default_factory=dict)
    """By candidate id."""
    builds: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """By (problem id, candidate id), the builds that it needed."""
    facts: dict[str, BuildFacts] = field(default_factory=dict)
    """By build id, what compiling it gave."""
    skipped: list[int] = field(default_factory=list)
    """Numbers of lines that could not be read."""
    _trials: dict[tuple[str, str], dict[tuple[str, int], Trial]] = field(default_factory=dict)
    """By (stage, problem), then (candidate, look), the last written last."""

    def add(self, trial: Trial) -> None:
        """Take a trial, written after all that are here."""
        trials = self._trials.setdefault((trial.stage, trial.problem), {})
        key = (trial.candidate.id, trial.look)
        trials.pop(key, None)
        trials[key] = trial

    def find(self, stage: str, problem: str, candidate: Candidate, launches: int) -> Trial | None:
        """The finished trial of exactly this request, or the failure that ended this candidate's attempts."""
        trials = self._trials.get((stage, problem), {})
        return trials.get((candidate.id, launches)) or trials.get((candidate.id, 0))

    def of(self, stage: str, problem: str) -> list[Trial]:
        """The last trial of each candidate of one problem at one stage."""
        return list({t.candidate: t for t in self._trials.get((stage, problem), {}).values()}.values())

    @property
    def count(self) -> int:
        """How many trials there are."""
        return sum(len(trials) for trials in self._trials.values())


def read(folder: Path) -> Record:
    """Read `folder`/trials.jsonl; lines that are no JSON, or not ours, are skipped and counted."""
    record = Record()
    known = _Known()
    for number, row in _rows(folder / NAME, record.skipped):
        try:
            _take(row, record, known)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            record.skipped.append(number)
    return record


def _rows(path: Path, skipped: list[int]) -> Iterator[tuple[int, dict[str, object]]]:
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                skipped.append(number)
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                skipped.append(number)


@dataclass(kw_only=True)
class _Known:
    """Who was introduced so far, and what each had to have compiled where it was introduced last."""

    candidates: dict[str, Candidate] = field(default_factory=dict)
    builds: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _take(row: dict[str, object], record: Record, known: _Known) -> None:
    match row["row"]:
        case "session":
            journalled.device(row["device"])
            record.sessions.append(row)
        case "problem":
            record.problems.append(journalled.problem(row))
        case "candidate":
            name, kernel = str(row["id"]), journalled.text(row.get("kernel", row["backend"]))
            builds = tuple(map(str, row.get("builds", ())))  # type: ignore[call-overload]
            known.candidates[name] = journalled.candidate(row)
            known.builds[name], record.kernel_names[name] = builds, kernel
        case "cut":
            record.cut.add(str(row["problem"]))
        case "whole":
            record.cut.discard(str(row["problem"]))
        case "build":
            record.facts[str(row["id"])] = journalled.facts(row)
        case "home":
            record.homes[str(row["problem"])] = str(row["device"])
        case "done":
            record.finished.add((str(row["stage"]), str(row["problem"])))
        case "trial":
            name = str(row["candidate"])
            trial = journalled.trial(row, known.candidates[name])
            record.add(trial)
            if builds := known.builds[name]:
                record.builds[trial.problem, trial.candidate.id] = builds
