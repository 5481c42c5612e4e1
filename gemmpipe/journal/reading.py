"""The reader of a journal of an earlier session or of another run.

Every row is validated, since a journal may come from someone else or be damaged, and its values become cells of tables
and parts of file names. The `parse_*` functions raise ValueError, TypeError or KeyError; `read` skips such rows.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from gemmpipe.core.data import (
    ARCH_PATTERN,
    BuildFacts,
    Candidate,
    Device,
    Scalar,
    Status,
    Trial,
    Tuning,
    is_plausible_time_us,
)
from gemmpipe.core.files import is_formula, open_regular
from gemmpipe.journal.writer import NAME

Fields = Mapping[str, object]
_MAX_TEXT = 10_000
"""Characters of a text that becomes a cell of a table; readers of tables take cells of about 100,000."""
_MAX_COUNT = 2**31 - 1


def parse_device(values: object) -> Device:
    """The device in a `session` row."""
    found = Device(**cast(dict[str, object], values))  # type: ignore[arg-type]
    for name in (found.kind, found.name, found.gfx, found.uuid):
        table_name(name)
    for number in (found.shared_bytes, found.cache_bytes, found.warp_size, found.index):
        checked_count(number)
    if found.kind != "none" and (
        checked_count(found.cu_num) not in range(1, _MAX_COUNT) or not ARCH_PATTERN.fullmatch(found.gfx)
    ):
        raise ValueError(f"no device: {found.gfx}, {found.cu_num} units")
    return found


def parse_candidate(row: Fields) -> Candidate:
    """The candidate of a `candidate` row."""
    knobs = cast(Mapping[str, Scalar], row["knobs"])
    for name, value in knobs.items():
        checked_text(name)
        if isinstance(value, str):
            checked_text(value)
        elif not (value is None or isinstance(value, int) or math.isfinite(value)):
            raise ValueError(f"no knob: {value!r}")
    return Candidate.of(table_name(row["backend"]), knobs)


def parse_problem(row: Fields) -> Fields:
    """A checked `problem` row; callers that know the family check the key against its columns."""
    checked_text(row["id"]), checked_text(row["layer"])
    for name, value in cast(Mapping[str, Scalar], row["key"]).items():
        checked_text(name), checked_text(str(value))
    if isinstance(row["weight"], bool) or not 0 < float(cast(float, row["weight"])) < math.inf:
        raise ValueError(f"no weight: {row['weight']!r}")
    return row


def parse_facts(row: Fields) -> BuildFacts:
    """The facts of a `build` row."""
    numbers = (
        None if row[name] is None else checked_count(row[name]) for name in ("shared_bytes", "registers", "spills")
    )
    shared_bytes, registers, spills = numbers
    return BuildFacts(
        compile_s=_finite(row["compile_s"]),
        shared_bytes=cast(int, shared_bytes),
        registers=registers,
        spills=spills,
        error=str(row["error"]),
    )


def parse_trial(row: Fields, of: Candidate) -> Trial:
    """The trial of a `trial` row."""
    samples = tuple(cast(list[float], row["samples_us"]))
    if not all(map(is_plausible_time_us, samples)):
        raise ValueError(f"no times: {samples[:9]}")
    error = row.get("error", "")
    return Trial(
        stage=str(row["stage"]),
        problem=str(row["problem"]),
        candidate=of,
        status=Status(str(row["status"])),
        launches=checked_count(row["launches"]),
        requested_launches=checked_count(row.get("requested_launches", row.get("asked", 0))),
        samples_us=tuple(map(float, samples)),
        full_clocks_us=_time_us(row.get("full_clocks_us")),
        err_ratio=None if row.get("err_ratio") is None else _finite(row["err_ratio"]),
        extra_weight_bytes=checked_count(row.get("extra_weight_bytes", 0)),
        shared=row.get("shared") is True,
        no_dependent_launch=row.get("no_dependent_launch") is True,
        error=_encoded(str(error)) if error else "",
        tuning=_tuning(cast(Fields, row["tuning"])) if "tuning" in row else None,
    )


def parse_conditions(row: Fields) -> Fields:
    """The numbers of a `conditions` row by name (clocks in MHz, C, W, processes), and `device`."""
    numbers = {
        name: _finite(row[name])
        for name in ("sm_mhz", "memory_mhz", "temperature_c", "power_w", "processes")
        if row.get(name) is not None
    }
    return {"device": checked_text(row["device"]), **numbers}


def _time_us(value: object) -> float | None:
    if value is not None and not is_plausible_time_us(value):
        raise ValueError(f"no time: {value}")
    return cast(float | None, value)


def _tuning(row: Fields) -> Tuning:
    tried, of, compiled = (checked_count(row[name]) for name in ("tried", "of", "compiled"))
    return Tuning(seconds=_finite(row["seconds"]), tried=tried, of=of, compiled=compiled)


def checked_text(value: object) -> str:
    """One line of printable text, short enough for a table."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError(f"no line of text: {value!r}")
    return value


def table_name(value: object) -> str:
    """A name for tables: a line of text that is no spreadsheet formula."""
    found = checked_text(value)
    if is_formula(found):
        raise ValueError(f"no name: {found!r}")
    return found


def checked_count(value: object) -> int:
    """An integer from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"no count: {value!r}")
    return value


def _finite(value: object) -> float:
    number = float(cast(float, value))
    if not 0 <= number < math.inf:
        raise ValueError(f"no number: {value!r}")
    return number


def _encoded(value: str) -> str:
    """A text, possibly of several lines; raises UnicodeEncodeError for a lone surrogate, which cannot be written."""
    value.encode()
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A trial, a build (its id) or the conditions of a device, as one of the rows with a time."""

    session: int
    """Index of the session in `Record.sessions`."""
    t_s: float | None
    """Seconds since the session began; None in journals of version 0.1.0 and earlier."""
    content: Trial | str | Fields


_MAX_LINE_BYTES = 10_000_000
"""A trial of 100,000 samples takes 2,000,000 bytes."""


@dataclass(kw_only=True)
class Record:
    """The content of a journal: the last trial of each (stage, problem, candidate, launches), and finished finals."""

    sessions: list[Mapping[str, object]] = field(default_factory=list)
    problems: list[Mapping[str, object]] = field(default_factory=list)
    finished: set[tuple[str, str]] = field(default_factory=set)
    """(stage, problem id) with a `done` row."""
    cut_short: set[str] = field(default_factory=set)
    """Ids of problems with an incomplete search."""
    assignments: dict[str, str] = field(default_factory=dict)
    """By problem id: the device (UUID or name) on which its candidates were timed."""
    kernel_names: dict[str, str] = field(default_factory=dict)
    """Kernel names by candidate id."""
    builds: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Build ids by (problem id, candidate id)."""
    facts: dict[str, BuildFacts] = field(default_factory=dict)
    """Facts by build id."""
    log: list[Entry] = field(default_factory=list)
    """Every trial, build and state of a device, in order of writing."""
    skipped: list[int] = field(default_factory=list)
    """Numbers of lines that could not be read."""
    _trials: dict[tuple[str, str], dict[tuple[str, int], Trial]] = field(default_factory=dict)
    """By (stage, problem), then (candidate, launches), in order of writing."""

    def add(self, trial: Trial) -> None:
        """Add a trial that was written after all trials so far."""
        trials = self._trials.setdefault((trial.stage, trial.problem), {})
        key = (trial.candidate.id, trial.effective_launches)
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
        """Number of trials; a run that only repeats the selection of an earlier one has none."""
        return sum(len(trials) for trials in self._trials.values())


def read(folder: Path, after: Record | None = None) -> Record:
    """Read `folder`/trials.jsonl; invalid lines are skipped, and their numbers are in `skipped`.

    after: the record of the run that this one continues; the journal's content is added to it.
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
    """The lines; an overlong line is cut to its first bytes, which are no valid row."""
    while line := stream.readline(_MAX_LINE_BYTES):
        yield line
        while len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = stream.readline(_MAX_LINE_BYTES)


@dataclass(kw_only=True)
class _Known:
    """The candidates introduced so far by id, and the builds in the last `candidate` row of each."""

    candidates: dict[str, Candidate] = field(default_factory=dict)
    builds: dict[str, tuple[str, ...]] = field(default_factory=dict)


_OLD_KINDS = {"cut": "cut_short", "whole": "complete", "home": "assignment"}
"""Kinds of rows in earlier journals, which also have `asked` for `requested_launches`."""


def _take(row: dict[str, object], record: Record, known: _Known) -> None:
    kind = row["row"]
    match _OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind:
        case "session":
            parse_device(row["device"])
            record.sessions.append(row)
        case "problem":
            record.problems.append(parse_problem(row))
        case "candidate":
            name, kernel = str(row["id"]), table_name(row.get("kernel", row["backend"]))
            builds = tuple(map(str, row.get("builds", ())))  # type: ignore[call-overload]
            known.candidates[name] = parse_candidate(row)
            known.builds[name], record.kernel_names[name] = builds, kernel
        case "cut_short":
            record.cut_short.add(str(row["problem"]))
        case "complete":
            record.cut_short.discard(str(row["problem"]))
        case "build":
            record.facts[str(row["id"])] = parse_facts(row)
            record.log.append(_entry(row, record, str(row["id"])))
        case "conditions":
            record.log.append(_entry(row, record, parse_conditions(row)))
        case "assignment":
            record.assignments[str(row["problem"])] = str(row["device"])
        case "done":
            record.finished.add((str(row["stage"]), str(row["problem"])))
        case "trial":
            name = str(row["candidate"])
            trial = parse_trial(row, known.candidates[name])
            entry = _entry(row, record, trial)
            record.add(trial)
            record.log.append(entry)
            if builds := known.builds[name]:
                record.builds[trial.problem, trial.candidate.id] = builds


def _entry(row: Fields, record: Record, content: Trial | str | Fields) -> Entry:
    t_s = None if row.get("t") is None else _finite(row["t"])
    return Entry(session=max(0, len(record.sessions) - 1), t_s=t_s, content=content)
