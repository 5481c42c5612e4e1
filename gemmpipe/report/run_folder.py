"""Runs on disk: their folders, state, problems, device, time and command, read without torch or pandas.

A run's folder may come from someone else: its files are read with limits.
"""

import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmpipe.core.errors import EXIT_INTERRUPTED, UserError
from gemmpipe.core.files import MAX_MANIFEST_BYTES, open_regular, read_cells, read_object, read_regular
from gemmpipe.core.paths import DEMOS, MANIFEST, PROBLEMS, RUNS, SELECTIONS
from gemmpipe.core.shell import shell_join
from gemmpipe.journal import NAME as JOURNAL

REUSED = "reused.csv"
"""The rows of a tuned table that answer a run whose problems were all tuned already."""
FINISHED, INTERRUPTED, RUNNING, KILLED = "finished", "interrupted", "running", "killed"
_MAX_HYDRA_BYTES = 1_000_000
_MAX_LINE_BYTES = 1_000_000
_SOURCE_STAGE = "capture"
"""The stage that takes problems from the source that `shapes` names."""
_SELECT_STAGE = "select"
"""The stage that solves problems."""
_CHOICE = re.compile(r"^      (kernel|shapes): ([\w.-]+)$", re.MULTILINE)
"""Hydra's record of the chosen options. A regular expression, since PyYAML takes 0.1 s per file."""
_PROBLEM_ROW, _DONE_ROW = b'{"row":"problem",', b'{"row":"done",'
SWEEP = "multirun.yaml"
"""Hydra's file in the folder of a sweep."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The facts of one run."""

    folder: Path
    pipeline: str
    state: str
    """`finished`, `interrupted`, `running` or `killed`."""
    exit_code: int | None
    """None without a manifest of the run's last session."""
    started: str
    """ISO time, UTC."""
    kernel: str
    shapes: str
    device: str
    solved: int
    problems: int
    wall_s: float
    """Seconds of the last session; up to its last journal row where it has not ended."""
    total_s: float
    """Seconds of all sessions: `wall_s`, and that of earlier sessions that ended."""
    command: str
    sweep: Path | None
    """The folder of the sweep that the run is part of."""
    reused: int = 0
    """The problems that were tuned already, of a run that had nothing to time."""
    chooses: bool = False
    """True for a run that solves problems, also if it ended before the first; False for capture, compare, verify."""
    left: int = 0
    """The problems that `cpu_budget_s` left, which `resume=` continues with."""
    speedup: float | None = None
    """The geometric mean over the best library, of the products that do not stay with it; 1 if all do; else None."""
    approximate: bool = False
    """True if times of the speed-up were taken while other processes used the device."""


def is_run(folder: Path) -> bool:
    """True if a folder has a run's journal or manifest."""
    return (folder / JOURNAL).is_file() or (folder / MANIFEST).is_file()


def run_folders(root: Path = RUNS, pipeline: str = "") -> list[Path]:
    """The folders of all runs under `root`, including those of sweeps, newest first; of one pipeline if it is named."""
    found = [path for path in root.glob(f"{pipeline or '*'}/*") if path.is_dir()]
    runs = [path for path in found if is_run(path)]
    for sweep in (path for path in found if (path / SWEEP).is_file()):
        runs += [path for path in sweep.iterdir() if path.is_dir() and is_run(path)]
    return sorted(runs, key=lambda path: (_group_name(path, root), _job_number(path)), reverse=True)


def newest_demo() -> Path | None:
    """The folder of the newest run of `gemmpipe demo`, which is apart from the others; None without one."""
    return next(iter(run_folders(DEMOS.parent, DEMOS.name)), None)


def _group_name(folder: Path, root: Path) -> str:
    """The name of a run's or its sweep's folder, which is the time of its start."""
    return folder.relative_to(root).parts[1]


def _job_number(folder: Path) -> tuple[int, str]:
    """Later runs of a sweep sort first; names without a number by text."""
    number = folder.name.partition("_")[0]
    return int(number) if number.isdecimal() and len(number) < 9 else -1, folder.name


def read_manifest(folder: Path) -> dict[str, object]:
    """The manifest of a run. Raises UserError, which names the command that writes it again, for a damaged one."""
    try:
        return read_object(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except UserError as error:
        resume = shell_join(["gemmpipe", f"resume={folder}"])
        raise UserError(f"{error}: the file is damaged; {resume} writes it again") from None


def unended_text(folder: Path) -> str:
    """What to do with a run that has no manifest: it is still at work, or its process ended."""
    if _is_locked(folder / JOURNAL):
        return "the run is still at work"
    return f"the run has not ended; {shell_join(['gemmpipe', f'resume={folder}'])} continues it"


def damage(folder: Path) -> str:
    """The error of a manifest that cannot be read, and the command that writes it again; empty for none."""
    if (folder / MANIFEST).is_file():
        try:
            read_manifest(folder)
        except UserError as error:
            return str(error)
    return ""


def read_session(folder: Path) -> Mapping[str, object]:
    """The first row of a run's journal: time, device, versions; empty for a missing or damaged one."""
    with contextlib.suppress(OSError, ValueError, UserError, RecursionError):
        with open_regular(folder / JOURNAL, "a run's journal") as stream:
            row = json.loads(stream.readline(_MAX_LINE_BYTES))
        if isinstance(row, dict) and row.get("row") == "session":
            return row
    return {}


def describe_run(folder: Path) -> RunFolder:
    """The facts of a run. Damaged or missing files leave their facts empty: a list of runs must not end at one."""
    session, manifest = read_session(folder), manifest_or_empty(folder)
    state = _state(folder, manifest)
    choices = _choices(folder)
    solved, problems = _progress(folder, ended=state in (FINISHED, INTERRUPTED) and wrote_tables(manifest))
    pipeline = _text(manifest.get("pipeline") or session.get("pipeline")) or folder.parent.name
    overrides = manifest.get("overrides") or session.get("overrides")
    typed = [_text(each) for each in overrides] if isinstance(overrides, list) else []
    started = _text(session.get("time"))
    code = manifest.get("exit_code")
    ended = manifest if state in (FINISHED, INTERRUPTED) else {}
    wall_s = _wall_s(folder, ended, started, running=state == RUNNING)
    speedup, approximate = _speedup(ended)
    earlier_s = manifest.get("earlier_wall_s" if ended else "wall_s")
    return RunFolder(
        folder=folder,
        pipeline=pipeline,
        state=state,
        exit_code=code if isinstance(code, int) and state in (FINISHED, INTERRUPTED) else None,
        started=started,
        kernel=choices.get("kernel", ""),
        shapes=choices.get("shapes", "") if _takes_shapes(manifest) else "",
        device=_device_name(session),
        solved=solved,
        problems=problems,
        wall_s=wall_s,
        total_s=wall_s + (float(earlier_s) if isinstance(earlier_s, int | float) else 0.0),
        command=shell_join(["gemmpipe", pipeline, *typed]),
        sweep=folder.parent if (folder.parent / SWEEP).is_file() else None,
        reused=_whole(_reused(manifest).get("problems")),
        left=len(left) if isinstance(left := ended.get("left"), list) else 0,
        chooses=_SELECT_STAGE in (_chain(manifest) or ()) or (folder / SELECTIONS).is_file(),
        speedup=speedup,
        approximate=approximate,
    )


def state_word(run: RunFolder) -> str:
    """The state as every command names it: also `damaged` for a manifest that cannot be read.

    A finished run that did not solve all problems is `partial`, and `failed` if it solved none of them; one that
    chooses nothing (compare, verify) is `partial` if its budget left problems.
    """
    if run.state == KILLED and damage(run.folder):
        return "damaged"
    if run.state == FINISHED and not run.chooses and run.left:
        return "partial"
    if run.state != FINISHED or run.reused or not run.chooses or run.solved >= run.problems:
        return run.state
    return "partial" if run.solved or not run.exit_code else "failed"


def _speedup(manifest: Mapping[str, object]) -> tuple[float | None, bool]:
    """(the mean speed-up of all products that are compared, True if some were timed on a shared device)."""
    figures = manifest.get("figures")
    regimes = figures.get("regimes") if isinstance(figures, dict) else None
    known = [each for each in regimes if isinstance(each, dict)] if isinstance(regimes, list) else []
    logs, count = 0.0, 0
    for spread in (each["speedup"] for each in known if isinstance(each.get("speedup"), dict)):
        mean, products = spread.get("mean"), _whole(spread.get("count"))
        if isinstance(mean, int | float) and 0 < mean < math.inf:
            logs, count = logs + products * math.log(mean), count + products
    if count:
        return math.exp(logs / count), any(_whole(each.get("shared")) for each in known)
    stays = any(_whole(each.get("stay")) for each in known)
    shared = _whole(figures.get("shared")) if isinstance(figures, dict) else 0
    return (1.0 if stays else None), bool(stays and shared)


def has_trials(folder: Path) -> bool:
    """True if a run's journal has rows after the first one, which every run writes."""
    return _count_rows(folder) > 1


def can_resume(folder: Path) -> bool:
    """True if a run began, or was stopped before it did: by a signal (exit code in the manifest), or killed."""
    rows = _count_rows(folder)
    if rows != 1:
        return rows > 1
    if not (folder / MANIFEST).exists():
        return True
    return manifest_or_empty(folder).get("exit_code") == EXIT_INTERRUPTED


def only_listed(folder: Path) -> bool:
    """True for a run that finished and only lists problems (`capture`): nothing is left to do."""
    manifest = manifest_or_empty(folder)
    return _chain(manifest) == [_SOURCE_STAGE] and _state(folder, manifest) == FINISHED


def _count_rows(folder: Path) -> int:
    """The number of rows of a run's journal: 0, 1, or 2 for more."""
    with contextlib.suppress(FileNotFoundError, UserError), open_regular(folder / JOURNAL, "a run's journal") as stream:
        return bool(stream.readline(_MAX_LINE_BYTES)) + bool(stream.readline(_MAX_LINE_BYTES))
    return 0


def _takes_shapes(manifest: Mapping[str, object]) -> bool:
    """False for a run whose problems are those of tables (merge, verify): the option `shapes` is not used."""
    chain = _chain(manifest)
    return chain is None or _SOURCE_STAGE in chain


def _chain(manifest: Mapping[str, object]) -> list[object] | None:
    """The stages of a run; None where its manifest does not list them."""
    config = manifest.get("config")
    chain = config.get("chain") if isinstance(config, dict) else None
    return chain if isinstance(chain, list) else None


def _reused(manifest: Mapping[str, object]) -> Mapping[str, object]:
    reused = manifest.get("reused")
    return reused if isinstance(reused, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9 else 0


def nothing_timed(folder: Path) -> str:
    """Why a run has no choices of its own, and where they are; empty unless its problems were all tuned already."""
    reused = _reused(manifest_or_empty(folder))
    count = _whole(reused.get("problems"))
    if not count:
        return ""
    table, listed = _text(reused.get("table")), reused.get("runs")
    names = {_text(each) for each in listed} if isinstance(listed, list) else set()
    runs = [each for each in run_folders() if each.name in names and (each / SELECTIONS).is_file()]
    places = [f"the run that timed them ({runs[0]})"] if runs else []
    places += [f"their table ({table})"] if Path(table).is_file() else []
    expected = f"; expected {' or '.join(places)}" if places else ""
    how_many = "the problem was" if count == 1 else f"all {count:,} problems were"
    return f"nothing was timed there, {how_many} tuned already{expected}"


def manifest_or_empty(folder: Path) -> Mapping[str, Any]:
    """A run's manifest; empty for a missing or damaged one."""
    with contextlib.suppress(UserError):
        return read_manifest(folder)
    return {}


def wrote_tables(manifest: Mapping[str, object]) -> bool:
    """False without a manifest, and where a second signal ended the run before it wrote its tables."""
    return bool(manifest) and manifest.get("aborted") is not True


def _text(value: object) -> str:
    """A text of an untrusted file in one printable line."""
    return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else ""


def _device_name(session: Mapping[str, object]) -> str:
    device = session.get("device")
    return _text(device.get("name")) if isinstance(device, dict) else ""


def _choices(folder: Path) -> dict[str, str]:
    """The names of the chosen options of `kernel` and `shapes`."""
    with contextlib.suppress(OSError, UserError, UnicodeDecodeError):
        text = read_regular(folder / ".hydra" / "hydra.yaml", "a run's configuration", _MAX_HYDRA_BYTES).decode()
        return dict(_CHOICE.findall(text))
    return {}


def _state(folder: Path, manifest: Mapping[str, object]) -> str:
    """The state of a run; a journal with rows newer than the manifest is of a resumed session without an end."""
    if _is_locked(folder / JOURNAL):
        return RUNNING
    if not manifest:
        return KILLED
    if _is_newer(folder / JOURNAL, folder / MANIFEST):
        return KILLED
    return INTERRUPTED if manifest.get("exit_code") == EXIT_INTERRUPTED else FINISHED


_SAME_END_NS = 60 * 10**9
"""A run syncs its journal after its manifest: within a minute both are of the same end."""


def _is_newer(path: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns > other.stat().st_mtime_ns + _SAME_END_NS
    return False


def _is_locked(journal: Path) -> bool:
    """True if a process writes this journal: it holds the lock until it ends.

    Only a journal with a row is asked, since its writer has the lock by then: a run that starts finds no other lock.
    """
    with contextlib.suppress(OSError, UserError), open_regular(journal, "a run's journal") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return False
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(stream, fcntl.LOCK_UN)
    return False


def _progress(folder: Path, *, ended: bool) -> tuple[int, int]:
    """(solved problems, problems): of the run's tables, or of its journal if it has not ended."""
    if ended and (folder / PROBLEMS).is_file():
        with contextlib.suppress(UserError):
            problems = sum(1 for _ in read_cells(folder / PROBLEMS)) - 1
            return _solved(folder / SELECTIONS), max(0, problems)
    problems = solved = 0
    with contextlib.suppress(OSError, UserError), open_regular(folder / JOURNAL, "a run's journal") as stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            problems += line.startswith(_PROBLEM_ROW)
            solved += line.startswith(_DONE_ROW) and b'"stage":"bench"' in line
    return min(solved, problems), problems


def _solved(selections: Path) -> int:
    """The number of problems with a selection of their own, not of a bucket."""
    if not selections.is_file():
        return 0
    lines = read_cells(selections)
    _, header = next(lines, (0, []))
    if "format" not in header:
        return 0
    column = header.index("format")
    return sum(len(cells) > column and not cells[column] for _, cells in lines)


def _wall_s(folder: Path, manifest: Mapping[str, object], started: str, *, running: bool) -> float:
    """The wall time in seconds; of a run without an end from its start until now, or to its journal's last row."""
    wall_s = manifest.get("wall_s")
    if isinstance(wall_s, int | float):
        return float(wall_s)
    with contextlib.suppress(ValueError, OSError, OverflowError):
        begin = datetime.datetime.fromisoformat(started)
        end_s = time.time() if running else (folder / JOURNAL).stat().st_mtime
        return max(0.0, end_s - begin.timestamp())
    return 0.0


def groups(folders: Sequence[Path]) -> Iterator[tuple[Path | None, list[Path]]]:
    """Runs in their order; those of one sweep together, with the sweep's folder."""
    taken: set[Path] = set()
    for folder in folders:
        sweep = folder.parent if (folder.parent / SWEEP).is_file() else None
        if sweep is None:
            yield None, [folder]
        elif sweep not in taken:
            taken.add(sweep)
            yield sweep, [each for each in folders if each.parent == sweep]
