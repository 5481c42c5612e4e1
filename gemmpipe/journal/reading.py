"""A journal read back: what an earlier session of a run, or another run, has written."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gemmpipe.data import BuildFacts, Candidate, Trial
from gemmpipe.files.regular import open_regular
from gemmpipe.journal import rows
from gemmpipe.journal.writing import NAME

_LONGEST_LINE = 10_000_000
"""Bytes; a trial of 100,000 samples takes two million."""


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

    def at(self, stage: str) -> list[Trial]:
        """The last trial of each candidate of every problem at one stage."""
        return [trial for at, problem in self._trials if at == stage for trial in self.of(stage, problem)]

    @property
    def count(self) -> int:
        """How many trials there are; a run that only decided again from an earlier one has none."""
        return sum(len(trials) for trials in self._trials.values())


def read(folder: Path, after: Record | None = None) -> Record:
    """Read `folder`/trials.jsonl; lines that are no JSON, or not ours, are skipped and counted.

    after: another run's, which this one went on from; what is read is added to it.
    """
    record = Record() if after is None else after
    record.skipped = []
    known = _Known()
    for number, row in _lines(folder / NAME, record.skipped):
        try:
            _take(row, record, known)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            record.skipped.append(number)
    return record


def _lines(path: Path, skipped: list[int]) -> Iterator[tuple[int, dict[str, object]]]:
    if not path.exists():
        return
    with open_regular(path, "a run's journal") as stream:
        for number, line in enumerate(_bounded(stream), 1):
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


def _bounded(stream: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is longer than any of ours its first bytes, which are no row."""
    while line := stream.readline(_LONGEST_LINE):
        yield line
        while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            line = stream.readline(_LONGEST_LINE)


@dataclass(kw_only=True)
class _Known:
    """Who was introduced so far, and what each had to have compiled where it was introduced last."""

    candidates: dict[str, Candidate] = field(default_factory=dict)
    builds: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _take(row: dict[str, object], record: Record, known: _Known) -> None:
    match row["row"]:
        case "session":
            rows.device(row["device"])
            record.sessions.append(row)
        case "problem":
            record.problems.append(rows.problem(row))
        case "candidate":
            name, kernel = str(row["id"]), rows.name_of(row.get("kernel", row["backend"]))
            builds = tuple(map(str, row.get("builds", ())))  # type: ignore[call-overload]
            known.candidates[name] = rows.candidate(row)
            known.builds[name], record.kernel_names[name] = builds, kernel
        case "cut":
            record.cut.add(str(row["problem"]))
        case "whole":
            record.cut.discard(str(row["problem"]))
        case "build":
            record.facts[str(row["id"])] = rows.facts(row)
        case "home":
            record.homes[str(row["problem"])] = str(row["device"])
        case "done":
            record.finished.add((str(row["stage"]), str(row["problem"])))
        case "trial":
            name = str(row["candidate"])
            trial = rows.trial(row, known.candidates[name])
            record.add(trial)
            if builds := known.builds[name]:
                record.builds[trial.problem, trial.candidate.id] = builds
