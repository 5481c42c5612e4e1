"""`gemmpipe runs`: the runs under outputs/runs, newest first."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.core.errors import UserError, printable, suggest_or_list
from gemmpipe.core.paths import RUNS
from gemmpipe.core.text_table import Column, aligned, cut, terminal_width
from gemmpipe.core.units import duration_text
from gemmpipe.report.run_folder import FINISHED, KILLED, RunFolder, damage, describe_run, groups, run_folders

HELP = """gemmpipe runs [n=20] [pipeline=NAME] [json=true]

Lists the runs under outputs/runs of this folder, newest first; the runs of a sweep stand together. `problems` counts
solved problems of all, or those that were tuned already (reused) where nothing had to be timed. A state is finished,
partial (some problems are not solved: the budget ended, or no candidate was valid), failed (none is), interrupted
(Ctrl-C or a signal), running (a process writes its journal), killed (its process ended without a manifest) or damaged
(its manifest.json cannot be read); resume=FOLDER continues all but finished and running ones. `wall` is the time of all
sessions, `arguments` what was typed after the pipeline's name, which the folder begins with.

  n=20            the number of runs to list; 0 for all
  pipeline=tune   the runs of one pipeline only
  json=true       a JSON list with every fact of each run
"""
_ROOM_FOR_A_TABLE = 60
_DEFAULTS: Mapping[str, str] = {"n": "20", "pipeline": "", "json": "false"}


def run(line: CommandLine) -> int:
    """Print the list. Raises UserError for an unknown pipeline or option."""
    given = options(line, _DEFAULTS)
    if line.flags:
        raise UserError(f"runs: {line.flags[0][0]}: no flag of this command; expected {', '.join(_DEFAULTS)}=")
    limit, as_json = whole_number("n", given["n"]), is_true("json", given["json"])
    folders = run_folders(RUNS, _known_pipeline(given["pipeline"]))
    shown = folders[:limit] if limit else folders
    runs = {folder: describe_run(folder) for folder in shown}
    with naming_write_errors(STDOUT):
        if as_json:
            print(json.dumps([as_object(run) for run in runs.values()], indent=2))
            return 0
        for text in lines(runs, terminal_width()):
            print(text)
        if len(folders) > len(shown):
            print(f"{len(folders) - len(shown):,} more; n=0 lists all")
    return 0


def whole_number(key: str, text: str) -> int:
    """The number of an option. Raises UserError for another text."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{key}: '{text}' given; expected a whole number from 0")
    return int(text)


def is_true(key: str, text: str) -> bool:
    """The value of a switch. Raises UserError for anything but true or false."""
    if text.lower() not in ("true", "false"):
        raise UserError(f"{key}: '{text}' given; expected true or false")
    return text.lower() == "true"


def _known_pipeline(name: str) -> str:
    """The name of a pipeline with runs. Raises UserError for another one."""
    known = [path.name for path in RUNS.glob("*") if path.is_dir()]
    if name and name not in known:
        raise UserError(f"pipeline: no runs of '{name}' under {RUNS}{suggest_or_list(name, known)}")
    return name


def as_object(run: RunFolder) -> dict[str, object]:
    """The facts of a run for JSON; paths as text."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(run).items()}


def lines(runs: Mapping[Path, RunFolder], width: int) -> list[str]:
    """The table of runs, or the line for none."""
    if not runs:
        return [f"no runs under {RUNS}; gemmpipe kernel=... shapes=... makes one, gemmpipe demo shows a recorded one"]
    rows: list[tuple[str, RunFolder | None]] = []
    for sweep, folders in groups(list(runs)):
        if sweep is not None:
            rows.append((f"{_short(sweep)} (sweep)", None))
        rows += [(f"  {each.name}" if sweep else _short(each), runs[each]) for each in folders]
    if width < _ROOM_FOR_A_TABLE:
        return [text for name, run in rows for text in _narrow(printable(name), run, width)]
    return aligned(_columns([printable(name) for name, _ in rows], [run for _, run in rows]), width)


def _narrow(name: str, run: RunFolder | None, width: int) -> list[str]:
    """A run in two lines for a narrow terminal: the folder, whole, then its state, problems, time and arguments."""
    if run is None:
        return [name]
    facts = (_state(run), _problems(run), duration_text(run.total_s), _arguments(run))
    return [name, cut(f"  {'  '.join(fact for fact in facts if fact)}", width)]


def _short(folder: Path) -> str:
    return str(folder.relative_to(RUNS))


def _columns(names: Sequence[str], runs: Sequence[RunFolder | None]) -> list[Column]:
    def texts(title: str, cells: Iterable[str], importance: int) -> Column:
        return Column(title=title, cells=tuple(cells), is_text=True, importance=importance)

    def numbers(title: str, cells: Iterable[str], importance: int) -> Column:
        return Column(title=title, cells=tuple(cells), importance=importance)

    return [
        texts("folder", names, 0),
        texts("when (UTC)", (run.started[:16].replace("T", " ") if run else "" for run in runs), 1),
        texts("pipeline", (run.pipeline if run else "" for run in runs), 2),
        texts("kernel", (run.kernel if run else "" for run in runs), 5),
        texts("shapes", (run.shapes if run else "" for run in runs), 3),
        texts("device", (run.device if run else "" for run in runs), 4),
        numbers("problems", (_problems(run) if run else "" for run in runs), 7),
        texts("state", (_state(run) if run else "" for run in runs), 0),
        numbers("wall", (duration_text(run.total_s) if run else "" for run in runs), 6),
        texts("arguments", (_arguments(run) if run else "" for run in runs), 8),
    ]


def _arguments(run: RunFolder) -> str:
    """The arguments after `gemmpipe PIPELINE`, which the folder names: the shortest description of a run."""
    return printable(run.command).removeprefix("gemmpipe ").removeprefix(run.pipeline).strip()


def _state(run: RunFolder) -> str:
    """The state, or that its manifest is damaged; partial or failed for a finished run that did not solve all."""
    if run.state == KILLED and damage(run.folder):
        return "damaged"
    if run.state != FINISHED or run.reused or not run.chooses or run.solved >= run.problems:
        return run.state
    return "partial" if run.solved or not run.exit_code else "failed"


def _problems(run: RunFolder) -> str:
    if run.reused:
        return f"{run.reused:,} reused"
    if run.state == FINISHED and not run.chooses:
        return f"{run.problems:,}" if run.problems else ""  # it chooses nothing: capture, compare, verify
    return f"{run.solved:,}/{run.problems:,}" if run.problems else ""
