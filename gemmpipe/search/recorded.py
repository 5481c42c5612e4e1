"""Recorded spaces: raw times of all candidates of some problems, for evaluating searches without a GPU."""

import json
import lzma
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gemmpipe import journal
from gemmpipe.core.data import SCREENING, BuildFacts, Candidate, Device, Problem, Scalar, Status, median
from gemmpipe.core.errors import UserError, one_line, quoted_repr, shortened, suggest_or_list
from gemmpipe.core.files import is_number, open_regular, read_cells, read_regular
from gemmpipe.core.paths import MANIFEST
from gemmpipe.family import KernelDefaults, load_family, shipped_families
from gemmpipe.family.problem import make_problem
from gemmpipe.journal.reading import checked_text

_VERSION = 1
_TICK_US = 0.032  # the resolution of a device event; times are stored as multiples of it
_MAX_CHARACTERS = 200_000_000
"""Characters of a recorded space; 20,000 candidates take two million."""
_CSV_SHAPE = ("M", "N", "K")
_CSV_RESULT = ("time_us", "compile_s", "registers", "spills", "shared_bytes", "status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of timing a candidate: raw samples, or a failure."""

    status: Status
    samples_us: tuple[float, ...]
    builds: tuple[str, ...]

    @property
    def time_us(self) -> float | None:
        """The median sample; None for a failure."""
        return median(self.samples_us) if self.samples_us else None


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedSpace:
    """One family's space on one device."""

    family: str
    device: Device
    first_launch_s: float
    """Mean time of a candidate's first launch, with loading it."""
    facts: Mapping[str, BuildFacts]
    problems: Mapping[Problem, Mapping[Candidate, Outcome]]
    recorded_at: str = ""
    """ISO time of the recording run; empty where the file does not have it."""
    command: str = ""
    """The command of the recording run."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the recording run."""


def condense(run_dir: Path, target: Path, backends: tuple[str, ...]) -> None:
    """Write the trials of these backends in a run's journal as a compact file.

    JSON lines in xz: `recording`, then `build`s, `candidate`s, and `problem`s with results [candidate, [builds],
    status, ticks of the median, [ticks of each sample above it]].
    """
    record = journal.read(run_dir)
    manifest = json.loads(read_regular(run_dir / MANIFEST, "a run's manifest", _MAX_CHARACTERS))
    session = record.sessions[-1]
    spent = [r["busy_s"].get("first_launch", 0.0) for r in manifest["resources"]]
    header = {
        "row": "recording",
        "version": _VERSION,
        "family": str(record.problems[0]["id"]).split(" ")[0],
        "device": {**session["device"], "uuid": ""},  # type: ignore[dict-item]
        "versions": session["versions"],
        "time": session["time"],
        "command": shlex.join(["gemmpipe", str(session["pipeline"]), *map(str, session["overrides"])]),  # type: ignore[call-overload]
        "first_launch_s": round(sum(spent) / max(1, record.count), 6),
        "tick_us": _TICK_US,
    }
    body = _Condenser(record, backends)
    problems = [body.problem(row) for row in record.problems]
    lines = [header, *body.builds(), *body.candidates(), *problems]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    target.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


class _Condenser:
    def __init__(self, record: journal.Record, backends: tuple[str, ...]) -> None:
        self._record = record
        self._backends = backends
        self._build: dict[str, int] = {}
        self._candidate: dict[Candidate, int] = {}

    def problem(self, row: Mapping[str, object]) -> dict[str, object]:
        trials = [t for t in self._record.of(SCREENING, str(row["id"])) if t.candidate.backend in self._backends]
        results = []
        for trial in sorted(trials, key=lambda t: repr(t.candidate.items)):
            ticks = [round(s / _TICK_US) for s in trial.samples_us]
            middle = sorted(ticks)[len(ticks) // 2] if ticks else 0
            builds = self._record.builds.get((trial.problem, trial.candidate.id), ())
            results.append(
                [
                    self._candidate.setdefault(trial.candidate, len(self._candidate)),
                    [self._build.setdefault(b, len(self._build)) for b in builds],
                    str(trial.status),
                    middle,
                    [t - middle for t in ticks],
                ]
            )
        return {"row": "problem", "key": row["key"], "results": results}

    def builds(self) -> list[dict[str, object]]:
        unknown = BuildFacts(compile_s=0.0, shared_bytes=None, registers=None, spills=None)
        return [{"row": "build", **asdict(self._record.facts.get(b, unknown))} for b in self._build]

    def candidates(self) -> list[dict[str, object]]:
        return [{"row": "candidate", "backend": c.backend, "knobs": c.knobs} for c in self._candidate]


def read(path: Path, chosen: str = "") -> RecordedSpace:
    """Read a recorded space: a condensed file, or a CSV with M, N, K, knobs, time_us, compile_s and static facts.

    Its family is a shipped one or `chosen`: a file must not name modules to import. Raises UserError for anything else.
    """
    known = (*shipped_families(), *([chosen] if chosen else []))
    try:
        recording = _read_csv(path, known) if path.suffix == ".csv" else _read_condensed(path, known)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"search.recorded: {path}: cannot be read: {error}") from None
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f"search.recorded: {path}: not a recorded space: {shortened(one_line(error))}") from None
    for problem, outcomes in recording.problems.items():
        if all(outcome.time_us is None for outcome in outcomes.values()):
            raise UserError(
                f"search.recorded: {path}: none of {len(outcomes)} candidates of {problem.id} has a time; expected"
                " timed backends: python tests/benchmarks/condense.py RUN_DIR OUT BACKEND ..."
            )
    if not recording.problems:
        raise UserError(f"search.recorded: {path}: not a recorded space: it has no problems")
    return recording


def _known_family(name: str, known: Sequence[str], path: Path) -> str:
    if name not in known:
        expected = f"expected a shipped one, or kernel= with its own{suggest_or_list(shortened(str(name)), known)}"
        raise UserError(f"search.recorded: {path}: family {quoted_repr(name)}; {expected}")
    return name


def _read_condensed(path: Path, known: Sequence[str]) -> RecordedSpace:
    rows = list(_json_rows(path))
    header = rows[0]
    if header["version"] != _VERSION:
        raise UserError(f"search.recorded: {path}: version {quoted_repr(header['version'])}, expected {_VERSION}")
    family = _known_family(header["family"], known, path)
    builds = [r for r in rows if r["row"] == "build"]
    facts = {f"b{i}": BuildFacts(**{k: v for k, v in r.items() if k != "row"}) for i, r in enumerate(builds)}
    candidates = [Candidate.of(r["backend"], r["knobs"]) for r in rows if r["row"] == "candidate"]
    problems = {}
    for row in (r for r in rows if r["row"] == "problem"):
        outcomes = {}
        for candidate, needed, status, middle, above in row["results"]:
            outcomes[candidates[candidate]] = Outcome(
                status=Status(status),
                samples_us=tuple((middle + tick) * header["tick_us"] for tick in above),
                builds=tuple(f"b{b}" for b in needed),
            )
        problems[Problem(family=family, key=tuple(row["key"].items()))] = outcomes
    return RecordedSpace(
        family=family,
        device=Device(**header["device"]),
        first_launch_s=header["first_launch_s"],
        facts=facts,
        problems=problems,
        recorded_at=checked_text(header.get("time", "")),
        command=checked_text(header.get("command", "")),
        versions={checked_text(k): checked_text(v) for k, v in header.get("versions", {}).items()},
    )


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a condensed file; limited, since kilobytes may unpack to gigabytes."""
    left = _MAX_CHARACTERS
    with open_regular(path, "a recorded space") as packed, lzma.open(packed, "rt", encoding="utf-8") as stream:
        while line := stream.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise UserError(f"search.recorded: {path}: more than {_MAX_CHARACTERS:,} characters unpacked")
            yield json.loads(line)


def _read_csv(path: Path, known: Sequence[str]) -> RecordedSpace:
    """Read a CSV with one sample per row; the file name is DEVICE_FAMILY, with an optional `_llama...` suffix."""
    device, _, family = path.stem.partition("_")
    family = _known_family(family.rpartition("_llama")[0] or family, known, path)
    loaded, defaults = load_family(family), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    facts: dict[str, BuildFacts] = {}
    problems: dict[Problem, dict[Candidate, Outcome]] = {}
    for row in _csv_rows(path):
        knobs = {k: v for k, v in row.items() if k not in (*_CSV_SHAPE, *_CSV_RESULT)}
        candidate = Candidate.of("triton", knobs)
        problem = make_problem(loaded, {name: row[name] for name in _CSV_SHAPE}, defaults, "sm_90", str(path))
        # A build serves all problems; only its first row has the compilation time.
        build = candidate.id
        if build not in facts:
            facts[build] = BuildFacts(**{name: row[name] for name in _CSV_RESULT[1:5]})  # type: ignore[arg-type]
        samples = (float(row["time_us"]),) if row["status"] == "ok" else ()  # type: ignore[arg-type]
        outcome = Outcome(status=Status(str(row["status"])), samples_us=samples, builds=(build,))
        problems.setdefault(problem, {})[candidate] = outcome
    hopper = Device(
        kind="cuda",
        index=0,
        name=device,
        gfx="sm_90",
        cu_num=132,
        shared_bytes=232448,
        cache_bytes=62914560,
        warp_size=32,
    )
    return RecordedSpace(family=family, device=hopper, first_launch_s=0.0005, facts=facts, problems=problems)


def _csv_rows(path: Path) -> Iterator[dict[str, Scalar]]:
    lines = read_cells(path)
    _, header = next(lines, (1, []))
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"search.recorded: {path}:{line}: {len(cells)} cells, expected {len(header)}")
        yield {name: _number(text) for name, text in zip(header, cells, strict=True)}


def _number(text: str) -> Scalar:
    if not is_number(text):
        return text
    return int(text) if text.lstrip("+-").isdigit() else float(text)
