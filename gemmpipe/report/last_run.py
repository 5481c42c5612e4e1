"""The run that a user names: a folder, or `last`, the newest run that has what a command needs.

`last~1` is the run before that one, and so on, as in git. Every command that takes these names asks `last_run` with a
condition of this module; the newest run is the one whose file `Condition.dated_by` was written last.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.errors import UserError, suggest
from gemmpipe.core.events import counted
from gemmpipe.core.files import read_cells, suggest_path
from gemmpipe.core.paths import MANIFEST, RUNS, SELECTIONS
from gemmpipe.journal import NAME as JOURNAL
from gemmpipe.report.run_folder import (
    FINISHED,
    INTERRUPTED,
    KILLED,
    REUSED,
    RUNNING,
    SWEEP,
    can_resume,
    describe_run,
    is_run,
    newest_demo,
    only_listed,
    run_folders,
    unended_text,
)

LAST = "last"
"""The name of the newest run."""
_EARLIER = f"{LAST}~"
"""How the name of an earlier run begins; the number of newer ones follows."""
_MOST_DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The condition that a run must meet to be the last one for a command."""

    run: str
    """The runs that meet it, for the error."""
    dated_by: str
    """The file of a run that every such run has; its time of change orders them."""
    holds: Callable[[Path], bool]


def _has_selections(folder: Path) -> bool:
    """True for a run with a choice for a problem or for a bucket of a format. A damaged file has none."""
    if (folder / SELECTIONS).is_file():
        with contextlib.suppress(UserError):
            return len(list(itertools.islice(read_cells(folder / SELECTIONS), 2))) > 1
    return False


def _has_choices(folder: Path) -> bool:
    """False for runs that only list problems, merge tables, fail, or find all problems tuned already."""
    return (folder / SELECTIONS).is_file() and describe_run(folder).solved > 0


def _has_products(folder: Path) -> bool:
    """True for a run with problems that has solved some, or still may."""
    facts = describe_run(folder)
    return bool(facts.problems and (facts.solved or facts.state != FINISHED))


def _has_products_or_runs(folder: Path) -> bool:
    return _has_products(folder) or describe_run(folder).state == RUNNING


def _has_own_results(folder: Path) -> bool:
    """False for a run without results of its own.

    It merged tables, listed problems alone, found all of them tuned, or was interrupted before it chose anything.
    """
    if (folder / SELECTIONS).is_file():
        return True
    timed_before = (folder / REUSED).is_file() or only_listed(folder)
    facts = describe_run(folder)
    return not timed_before and bool(facts.problems) and facts.state != INTERRUPTED


def _has_more_to_do(folder: Path) -> bool:
    return can_resume(folder) and not only_listed(folder)


def _can_be_reused(folder: Path) -> bool:
    facts = describe_run(folder)
    return _has_more_to_do(folder) and (facts.chooses or facts.state != FINISHED)


WITH_CHOICES = Condition(run="finished run with choices", dated_by=MANIFEST, holds=_has_choices)
"""For `show` and `diff`: with a choice for a problem."""
WITH_SELECTIONS = Condition(run="finished run with choices", dated_by=MANIFEST, holds=_has_selections)
"""For `export` and `doctor run=`: also with choices of an engine's format alone."""
WITH_PRODUCTS = Condition(run="run with products", dated_by=JOURNAL, holds=_has_products)
"""For `report`: also a run that has not ended."""
TO_WATCH = Condition(run="run with products", dated_by=JOURNAL, holds=_has_products_or_runs)
"""For `report --watch`: also a run that still lists its problems."""
RESUMABLE = Condition(run="run that can be resumed", dated_by=JOURNAL, holds=_has_more_to_do)
"""For `resume=`: runs that ended without a problem, or only listed them, do not count."""
REUSABLE = Condition(run="run that can be reused", dated_by=JOURNAL, holds=_can_be_reused)
"""For `reuse=`: neither do finished runs that choose nothing (`verify`, `compare`)."""
WITH_OWN_RESULTS = Condition(run="finished run", dated_by=MANIFEST, holds=_has_own_results)
ENDED = Condition(run="finished run", dated_by=MANIFEST, holds=lambda folder: True)
"""For `gemmpipe.load`, after WITH_OWN_RESULTS."""


def names_last(name: str) -> bool:
    """True for `last` and `last~N`, also with an N that is no number."""
    return name == LAST or name.startswith(_EARLIER)


def last_run(
    name: str, conditions: tuple[Condition, ...], where: str, expected: str, pipeline: str | None = None
) -> Path:
    """The run named `last` or `last~N`: the newest one, or that before N newer ones, of one pipeline if it is named.

    The runs are those that meet the first of the conditions that any run meets. Raises UserError, which begins with
    `where` and ends with what is `expected`, if there is none or if there are too few.
    """
    newer = _newer(name, where)
    folders = run_folders(RUNS, pipeline or "")
    root = RUNS / pipeline if pipeline else RUNS
    for condition in conditions:
        dated = [folder for folder in folders if (folder / condition.dated_by).is_file()]
        dated.sort(key=lambda folder: (folder / condition.dated_by).stat().st_mtime_ns, reverse=True)
        found = list(itertools.islice(filter(condition.holds, dated), newer + 1))
        if len(found) > newer:
            return found[newer]
        if found:
            oldest = LAST if len(found) == 1 else f"{_EARLIER}{len(found) - 1}"
            there = counted(len(found), condition.run, condition.run.replace("run", "runs", 1))
            raise UserError(f"{where}: only {there} under {root}; expected at most {oldest}, or {expected}")
    unended = _unended(folders) if conditions[-1].dated_by == MANIFEST else ""
    raise UserError(f"{where}: no {conditions[-1].run} under {root}; expected {expected}{unended}")


def _newer(name: str, where: str) -> int:
    """The number of newer runs in a name: 0 for `last`, N for `last~N`. Raises UserError for another text."""
    if name == LAST:
        return 0
    text = name.removeprefix(_EARLIER)
    if not (text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS):
        raise UserError(f"{where}: no whole number after ~; expected such as {_EARLIER}1, the run before the last one")
    return int(text)


def _unended(folders: Sequence[Path]) -> str:
    """The clause about the run that `resume=last` continues, if it was interrupted or killed; empty for none."""
    started = [folder for folder in folders if (folder / JOURNAL).is_file() and _has_more_to_do(folder)]
    newest = max(started, key=lambda folder: (folder / JOURNAL).stat().st_mtime_ns, default=None)
    state = describe_run(newest).state if newest is not None else FINISHED
    return f"; {newest} was {state}, and gemmpipe resume=last continues it" if state in (INTERRUPTED, KILLED) else ""


def find_finished(name: str, command: str, words: tuple[str, ...] = (LAST,)) -> Path:
    """The folder of the finished run that a user names: a folder, `last` for the newest with choices, or `last~N`.

    `words`: those that the command takes instead of a folder. Raises UserError if there is none.
    """
    if names_last(name):
        demo = newest_demo()
        expected = f"the folder of a run{f', such as that of gemmpipe demo, {demo}' if demo else ''}"
        return last_run(name, (WITH_CHOICES,), f"{command}: {name}", expected)
    folder = named_folder(name, f"{command}: {name}")
    if not folder.is_dir():
        expected = "the folder of a run, or 'last'" if words == (LAST,) else "a run, a table, 'last' or 'shipped'"
        raise UserError(f"{command}: {name}: no such folder; expected {expected}{suggest_run(name, words)}")
    if (folder / SWEEP).is_file():
        runs = sorted(path.name for path in folder.iterdir() if is_run(path))
        example = f", such as {folder / runs[0]}" if runs else ""
        raise UserError(f"{command}: {name}: the folder of a sweep; expected one of its runs{example}")
    if not (folder / MANIFEST).is_file():
        hint = unended_text(folder) if is_run(folder) else f"not the folder of a run{_example(folder)}"
        raise UserError(f"{command}: {name}: no {MANIFEST}: {hint}; expected a finished run")
    return folder


def _example(folder: Path) -> str:
    """A run in a folder of runs, such as `outputs/runs/tune`."""
    inner = sorted((path for path in folder.iterdir() if is_run(path)), reverse=True)
    return f", such as {inner[0]}" if inner else ""


def suggest_run(name: str, words: tuple[str, ...] = (LAST,)) -> str:
    """The clause "; did you mean 'last'?" with the run, as `gemmpipe runs` prints it, or the file named most alike."""
    runs = [str(folder.relative_to(RUNS)) for folder in run_folders()]
    _, tilde, number = name.partition("~")
    earlier = [f"{_EARLIER}{number}"] if tilde else []
    return suggest(name, [*earlier, *words, *runs]) or suggest_path(Path(name))


def named_folder(name: str, where: str) -> Path:
    """The path of a name: itself, or below the folder of runs, as `gemmpipe runs` prints it.

    Raises UserError, which begins with `where`, for the home directory of an unknown user.
    """
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # ~USER of an unknown user
        raise UserError(f"{where}: no such home directory; expected the folder of a run, or 'last'") from None
    return folder if folder.exists() or not (RUNS / folder).is_dir() else RUNS / folder
