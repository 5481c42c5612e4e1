"""The data of a report from a run's folder: finished, running, interrupted or killed.

All files may be untrusted, and those of a run that was killed may be missing or end anywhere.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmpipe import journal
from gemmpipe.backends.same_size import computes_another_product
from gemmpipe.core.data import Trial, is_plausible_time_us
from gemmpipe.core.errors import UserError, printable, shortened, suggest_or_list
from gemmpipe.core.events import counted
from gemmpipe.core.files import is_number, read_cells
from gemmpipe.core.paths import SELECTIONS
from gemmpipe.family import load_family, shipped_families
from gemmpipe.journal import Record
from gemmpipe.report.data import Excluded, Gated, Resource, RunData, TimedBuild, TimedTrial
from gemmpipe.report.product_table import knob_text, product_frame
from gemmpipe.report.provisional import provisional_rows
from gemmpipe.report.run_folder import (
    FINISHED,
    INTERRUPTED,
    KILLED,
    RunFolder,
    damage,
    describe_run,
    manifest_or_empty,
    nothing_timed,
    state_word,
    wrote_tables,
)

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family

TRIALS, MEMORY_OPTIONS = "trials.csv", "memory_options.csv"
_EXCLUDED = frozenset({"unsupported", "pruned"})
_MAX_REASONS = 200
_RECORDED_SOURCES = ("TraceShapes", "LogShapes", "TunableopShapes")
"""Sources of problems that count calls of a running program."""
_CAPTURED_NAME = "captured"
"""In the name of the file that `python -m gemmpipe.capture` writes, with the calls of each product."""


def read_run(folder: Path, *, importable: frozenset[str] = frozenset()) -> RunData:
    """The data of a run. `importable`: names of families in the user's own folder.

    Raises UserError if the folder has no journal with problems, a family that is not known, or a run without times.
    """
    record, facts = journal.read(folder), describe_run(folder)
    manifest = manifest_or_empty(folder) if facts.state in (FINISHED, INTERRUPTED) else {}
    config = manifest.get("config")
    _check_times(record, facts, config)
    family = _family(record, manifest, folder, importable)
    has_tables = wrote_tables(manifest)
    chooses = facts.chooses or facts.state != FINISHED
    products, notes = _products(folder, family, record, manifest, ended=has_tables, chooses=chooses)
    trials = list(_timed_trials(record))
    options = list(_memory_options(folder)) if has_tables else []
    return RunData(
        family=family,
        origin=str(folder),
        state=facts.state,
        state_word=state_word(facts),
        products=products,
        problems=len({str(row["id"]) for row in record.problems}),
        trials=trials,
        builds=list(_builds(record)),
        conditions=list(_conditions(record)),
        excluded=_excluded(folder / TRIALS) if has_tables else (),
        recorded=_recorded_candidates(manifest),
        resources=list(_resources(manifest)),
        gated=_gated(options, record, products),
        memory_options=options,
        unsolved=_texts(manifest.get("unsolved")),
        undecided=_texts(manifest.get("undecided")),
        captured=_is_captured(config),
        has_times=any(entry.t_s is not None for entry in record.log),
        wall_s=_last_t_s(record) if facts.state == KILLED else facts.wall_s or None,
        total_s=facts.total_s or None,
        started=facts.started,
        command=printable(facts.command),
        exit_code=facts.exit_code,
        sessions=len(record.sessions),
        provenance={folder.name: _provenance(manifest, record)},
        config=config if isinstance(config, dict) else None,
        files=_texts(manifest.get("files")),
        notes=[
            *_replay_notes(manifest),
            *([f"{damaged}."] if (damaged := damage(folder)) else []),
            *notes,
            *_reading_notes(record, trials, facts),
        ],
    )


def _check_times(record: Record, facts: RunFolder, config: object) -> None:
    """Raises UserError for a finished run that chooses and times nothing, such as one that lists problems or merges."""
    if facts.state != FINISHED or not isinstance(config, dict) or "chain" not in config or facts.chooses:
        return
    if any(isinstance(entry.content, Trial) for entry in record.log):
        return
    tables = ", ".join(sorted(path.name for path in facts.folder.glob("*.csv")))
    named = f" (its tables: {tables})" if tables else ""
    raise UserError(f"{facts.folder}: a run of {facts.pipeline} times nothing{named}; expected one of tune or compare")


def _family(record: Record, manifest: Mapping[str, Any], folder: Path, importable: frozenset[str]) -> "Family":
    """The family of a run: shipped, or in the user's own folder. Raises UserError."""
    if not record.problems:
        if reason := nothing_timed(folder):
            raise UserError(f"{folder}: {reason}")
        if (folder / SELECTIONS).is_file():
            path = folder / journal.NAME
            raise UserError(
                f"{path}: no row of a problem, although the run has ended: the file is damaged; "
                f"{SELECTIONS} next to it and the run's tables still hold the choices"
            )
        raise UserError(f"{folder}: no problems in its journal yet; expected a run that has begun to time")
    name = str(record.problems[0]["id"]).split(" ")[0]
    config = manifest.get("config")
    kernel = config.get("kernel") if isinstance(config, dict) else None
    module = kernel.get("family") if isinstance(kernel, dict) else None
    known = {*shipped_families(), *importable}
    for each in (module, name):
        if isinstance(each, str) and each in known:
            return load_family(each)
    hint = suggest_or_list(name, known)
    raise UserError(f"{folder}: kernel family '{printable(name)}' is not known; pass --config-dir for your own{hint}")


def _products(
    folder: Path, family: "Family", record: Record, manifest: Mapping[str, Any], *, ended: bool, chooses: bool
) -> tuple["pd.DataFrame", list[str]]:
    """The selected products; where the run has selected none yet, or never does, the fastest valid candidates."""
    config = manifest.get("config")
    config = config if isinstance(config, dict) else None
    if ended and (folder / SELECTIONS).is_file():
        rows: list[Mapping[str, Any]] = [{**row, "chosen_by": "select"} for row in _rows(folder / SELECTIONS)]
        return product_frame(rows, family, config), []
    rows = list(provisional_rows(record, family))
    note = "The run has selected nothing: what is shown as its choice is the fastest valid candidate so far"
    if not chooses:
        note = "This run chooses nothing: what is shown as its choice is the fastest valid candidate"
    unfinished = sum(row["chosen_by"] != "finals" for row in rows)
    note += f", for {counted(unfinished, 'product')} by the times of the search alone" if unfinished else ""
    return product_frame(rows, family, config), [f"{note}."]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a run's table. Raises UserError for one that is damaged."""
    lines = read_cells(path)
    _, header = next(lines, (0, []))
    for number, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"{path}:{number}: {len(cells)} cells, expected {len(header)} as in the header")
        yield dict(zip(header, cells, strict=True))


def _offsets(record: Record) -> list[float]:
    """The seconds of all earlier sessions, by session: times of a resumed run continue from there."""
    ends = [0.0] * (len(record.sessions) + 1)
    for entry in record.log:
        ends[entry.session] = max(ends[entry.session], entry.t_s or 0.0)
    return [sum(ends[:index]) for index in range(len(ends))]


def _last_t_s(record: Record) -> float | None:
    """When the last row of the last session was written, in seconds since it began; a copied file has another time."""
    return (
        max((entry.t_s or 0.0 for entry in record.log if entry.session == len(record.sessions) - 1), default=0) or None
    )


def _timed_trials(record: Record) -> Iterator[TimedTrial]:
    offsets = _offsets(record)
    for entry in record.log:
        if isinstance(entry.content, Trial):
            t_s = None if entry.t_s is None else offsets[entry.session] + entry.t_s
            yield TimedTrial(trial=entry.content, t_s=t_s)


def _builds(record: Record) -> Iterator[TimedBuild]:
    offsets = _offsets(record)
    for entry in record.log:
        if isinstance(entry.content, str) and (facts := record.facts.get(entry.content)) is not None:
            yield TimedBuild(
                t_s=None if entry.t_s is None else offsets[entry.session] + entry.t_s,
                compile_s=facts.compile_s,
                registers=facts.registers,
                spills=facts.spills,
                shared_bytes=facts.shared_bytes,
                error=facts.error,
            )


def _conditions(record: Record) -> Iterator[Mapping[str, Any]]:
    offsets = _offsets(record)
    for entry in record.log:
        if isinstance(entry.content, Mapping):
            t_s = None if entry.t_s is None else offsets[entry.session] + entry.t_s
            yield {**entry.content, "t_s": t_s}


def _excluded(path: Path) -> list[Excluded]:
    """The configurations of trials.csv that were not tried, counted by backend and kind of reason."""
    if not path.is_file():
        return []
    counts: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], str] = {}
    for row in _rows(path):
        if row.get("status") not in _EXCLUDED or row.get("launches") != "0":
            continue
        error = row.get("error", "")
        key = (row.get("libtype", ""), error.partition(":")[0], row["status"])
        counts[key] += 1
        examples.setdefault(key, error)
    return [
        Excluded(backend=key[0], reason=key[1], status=key[2], count=count, example=examples[key])
        for key, count in counts.most_common(_MAX_REASONS)
    ]


def _resources(manifest: Mapping[str, Any]) -> Iterator[Resource]:
    """The resources of a manifest; entries that are none are left out."""
    listed = manifest.get("resources")
    for each in listed if isinstance(listed, list) else ():
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            busy_s = {str(name): _seconds(spent) for name, spent in each["busy_s"].items()}
            wall_s, idle_s = _seconds(each["wall_s"]), _seconds(each["idle_s"])
            yield Resource(name=str(each["name"]), wall_s=wall_s, busy_s=busy_s, idle_s=idle_s)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(value)
    return float(value)


def _gated(options: Sequence[Mapping[str, Any]], record: Record, products: "pd.DataFrame") -> list[Gated]:
    """Finalists faster than the choice, with extra weight memory: the fastest of each problem, by their gain."""
    found = [_gated_option(row) for row in options] or _gated_finalists(record, products)
    fastest = {each.problem: each for each in sorted(found, key=lambda each: -each.time_us)}
    return sorted(fastest.values(), key=lambda each: each.time_us / (each.chosen_us or each.time_us))


def _gated_option(row: Mapping[str, Any]) -> Gated:
    return Gated(
        problem=row["problem"],
        backend=row["libtype"],
        config=knob_text(row["config"]),
        time_us=row["us"],
        chosen_us=row["chosen_us"],
        extra_weight_bytes=int(row["extra_weight_bytes"]),
        limit_pct=row["extra_weight_pct"],
    )


def _memory_options(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of memory_options.csv with numbers; those without are left out."""
    for row in _rows(folder / MEMORY_OPTIONS) if (folder / MEMORY_OPTIONS).is_file() else ():
        names = ("us", "chosen_us", "extra_weight_bytes", "extra_weight_pct")
        texts = [row.get(name, "") for name in names]
        if all(map(is_number, texts)):
            us, chosen_us, extra_bytes, limit_pct = map(float, texts)
            plausible = is_plausible_time_us(us) and is_plausible_time_us(chosen_us)
            if plausible and 0 < extra_bytes < 1e15 and 0 < limit_pct < 1e9:
                yield {
                    **{name: row.get(name, "") for name in ("problem", "libtype", "config")},
                    **dict(zip(names, (us, chosen_us, extra_bytes, limit_pct), strict=True)),
                    "speedup": chosen_us / us,
                    "shared": row.get("shared") == "True",
                }


def _gated_finalists(record: Record, products: "pd.DataFrame") -> list[Gated]:
    """From the trials, where the run has no table of them."""
    chosen = {str(p): us for p, us in zip(products["problem"], products["us"], strict=True)} if len(products) else {}
    found: list[Gated] = []
    for trial in record.at("bench"):
        us, chosen_us = trial.time_us, chosen.get(trial.problem)
        if us is None or str(trial.status) != "ok" or not trial.extra_weight_bytes:
            continue
        if computes_another_product(trial.candidate):
            continue
        if chosen_us is None or us < chosen_us:
            gated = Gated(
                problem=trial.problem,
                backend=trial.candidate.backend,
                config=", ".join(f"{name}={value}" for name, value in trial.candidate.items),
                time_us=us,
                chosen_us=chosen_us,
                extra_weight_bytes=trial.extra_weight_bytes,
            )
            found.append(gated)
    return found


def _texts(value: object) -> list[str]:
    return [printable(str(each)) for each in value] if isinstance(value, list) else []


def _provenance(manifest: Mapping[str, Any], record: Record) -> Mapping[str, Any]:
    """The versions, device and conditions: of the manifest, else of the last session."""
    found = manifest.get("provenance")
    if isinstance(found, dict):
        return found
    if not record.sessions:
        return {}
    session = record.sessions[-1]
    device = session.get("device")
    name = device.get("name") if isinstance(device, dict) else None
    return {
        "device": name,
        **{key: session[key] for key in ("time", "versions", "conditions") if key in session},
    }


def _replay_notes(manifest: Mapping[str, Any]) -> list[str]:
    """The note of a replay (gemmpipe demo), so that its times are not taken for measured ones."""
    replayed = manifest.get("replayed")
    if not isinstance(replayed, dict):
        return []
    device, day = (printable(shortened(str(replayed.get(name) or "unknown"), 60)) for name in ("device", "recorded"))
    return [f"A replay: all times were recorded on an {device} on {day[:10]}; nothing was measured in this run."]


def _recorded_candidates(manifest: Mapping[str, Any]) -> int:
    """The number of configurations of a replay's recording; 0 for a run."""
    replayed = manifest.get("replayed")
    count = replayed.get("candidates") if isinstance(replayed, dict) else None
    return count if isinstance(count, int) and 0 < count < 10**9 else 0


def _is_captured(config: object) -> bool:
    """True if the problems are recorded calls of a program."""
    shapes = config.get("shapes") if isinstance(config, dict) else None
    if not isinstance(shapes, dict):
        return False
    source = str(shapes.get("_target_", "")).rpartition(".")[2]
    return source in _RECORDED_SOURCES or (source == "CsvShapes" and _CAPTURED_NAME in str(shapes.get("path", "")))


def _reading_notes(record: Record, trials: Sequence[TimedTrial], facts: RunFolder) -> list[str]:
    notes = []
    if record.skipped:
        notes.append(f"{counted(len(record.skipped), 'line')} of the journal could not be read and is left out.")
    if not trials:
        why = ": the run repeated the selection of another run" if facts.solved else ": no candidate was timed"
        notes.append(f"The journal has no trials{why if facts.state == FINISHED else ' yet'}.")
    elif all(each.t_s is None for each in trials):
        notes.append("The journal is of version 0.1.0 or earlier: its rows have no times.")
    return notes
