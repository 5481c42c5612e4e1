"""`gemmpipe runs`: the runs under outputs/runs, newest first."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.core.errors import UserError, printable, suggest_or_list
from gemmpipe.core.paths import RUNS
from gemmpipe.core.shell import shell_quote
from gemmpipe.core.text_table import Column, aligned, cut, terminal_width, total_width
from gemmpipe.core.units import duration_text
from gemmpipe.report.run_folder import (
    FINISHED,
    RunFolder,
    describe_run,
    groups,
    newest_demo,
    run_folders,
    state_word,
)
from gemmpipe.report.speedup import marked_speedup_text

HELP = """gemmpipe runs [n=20] [pipeline=NAME] [json=true]

Lists the runs under outputs/runs of this folder, newest first; the runs of a sweep stand together. `problems` counts
solved problems of all, or those that were tuned already (reused) where nothing had to be timed. A state is finished,
partial (some problems are not solved: the budget ended, or no candidate was valid), failed (none is), interrupted
(Ctrl-C or a signal), running (a process writes its journal), killed (its process ended without a manifest) or damaged
(its manifest.json cannot be read); resume=FOLDER continues all but finished and running ones. `speed-up` is the mean
over the best library, of the products that do not stay with it (~ from a shared device); `time` is that of all
sessions, `arguments` what was typed after the pipeline's name, which the folder begins with: in a line of their own
where a table of all columns is too wide.

  n=20            the number of runs to list; 0 for all
  pipeline=tune   the runs of one pipeline only
  json=true       a JSON list with every fact of each run
"""
_INDENT = "  "
_LEAST_ARGUMENTS = 30
"""Characters of the arguments that are worth a column."""
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
        if (demo := newest_demo()) and not given["pipeline"]:
            print(f"replayed by gemmpipe demo, never 'last': gemmpipe show {shell_quote(str(demo))}")
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
    return _table([printable(name) for name, _ in rows], [run for _, run in rows], width)


def _table(names: Sequence[str], runs: Sequence[RunFolder | None], width: int) -> list[str]:
    """A line for each run; if its arguments do not fit, a second one with them, or with all but the folder."""
    facts = _columns(names, runs)
    typed = tuple(_arguments(run) if run else "" for run in runs)
    room = width - total_width(facts) - len(_INDENT)
    if room >= min(_LEAST_ARGUMENTS, max(map(len, typed))):
        return aligned([*facts, Column(title="arguments", cells=typed, is_text=True)], width)
    if room < -len(_INDENT):
        return [text for name, run in zip(names, runs, strict=True) for text in _narrow(name, run, width)]
    header, *rows = aligned(facts, width)
    below = (cut(f"{_INDENT}{text}", width) if text else "" for text in typed)
    return [header, *(text for pair in zip(rows, below, strict=True) for text in pair if text)]


def _narrow(name: str, run: RunFolder | None, width: int) -> list[str]:
    """A run in two lines for a narrow terminal: the folder, whole, then its state, problems, time and arguments."""
    if run is None:
        return [name]
    facts = (state_word(run), _problems(run), _speedup(run), duration_text(run.total_s), _arguments(run))
    return [name, cut(f"{_INDENT}{'  '.join(fact for fact in facts if fact)}", width)]


def _short(folder: Path) -> str:
    return str(folder.relative_to(RUNS))


def _columns(names: Sequence[str], runs: Sequence[RunFolder | None]) -> list[Column]:
    """The columns before the arguments."""

    def column(title: str, text: Callable[[RunFolder], str], *, is_text: bool = False) -> Column:
        return Column(title=title, cells=tuple(text(run) if run else "" for run in runs), is_text=is_text)

    return [
        Column(title="folder", cells=tuple(names), is_text=True),
        column("state", state_word, is_text=True),
        column("problems", _problems),
        column("speed-up", _speedup),
        column("time", lambda run: duration_text(run.total_s)),
    ]


def _speedup(run: RunFolder) -> str:
    return "" if run.speedup is None else marked_speedup_text(run.speedup, shared=run.approximate)


def _arguments(run: RunFolder) -> str:
    """The arguments after `gemmpipe PIPELINE`, which the folder names: the shortest description of a run."""
    return printable(run.command).removeprefix("gemmpipe ").removeprefix(run.pipeline).strip()


def _problems(run: RunFolder) -> str:
    if run.reused:
        return f"{run.reused:,} reused"
    if run.state == FINISHED and not run.chooses:
        # It chooses nothing: capture, compare, verify. A budget may have left some.
        return f"{run.problems - run.left:,}/{run.problems:,}" if run.left else f"{run.problems or ''}"
    return f"{run.solved:,}/{run.problems:,}" if run.problems else ""
