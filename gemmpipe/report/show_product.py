"""One product of a run as text: its candidates by time, its finals, and why others left."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemmpipe.core.data import Trial, canonical_json
from gemmpipe.core.errors import UserError, printable, suggest_or_list
from gemmpipe.core.events import counted
from gemmpipe.core.text_table import Column, aligned, cut
from gemmpipe.core.units import three_digits, time_text
from gemmpipe.report.attention import records
from gemmpipe.report.data import TABLE, RunData
from gemmpipe.report.diff_text import knobs_text
from gemmpipe.report.lines import wrapped
from gemmpipe.report.results import PADDED
from gemmpipe.report.show_text import choice_columns, legend_lines, product_object
from gemmpipe.report.tables import origin_text
from gemmpipe.report.trial_frame import (
    ProblemTrials,
    by_problem,
    is_choice,
    memory_reason,
    memory_text,
    ranked,
    statuses,
)

_MAX_LISTED = 5
_NEAR = 10


@dataclass(frozen=True, kw_only=True)
class ShownProduct:
    """One product of a run or a table."""

    data: RunData
    problem: str
    row: Mapping[Any, Any] | None
    """Its choice; None for a product without one."""
    trials: ProblemTrials | None
    """None in a table, which holds choices alone."""


def find_product(data: RunData, wanted: Mapping[str, str], options: Iterable[str] = ()) -> ShownProduct:
    """The only product with these values of key columns; names in any case, dtypes with or without `torch.`.

    `options`: the other arguments of the command, for the message of an unknown one.

    Raises UserError for an unknown column, for no product and for several.
    """
    names = {column.name.lower(): column.name for column in data.family.key_columns}
    for key in wanted:
        if key.lower() not in names:
            known = [*names.values(), *options]
            raise UserError(f"show: {key}: no option or key column of {data.family.name}{suggest_or_list(key, known)}")
    parts = by_problem(data.trials)
    rows = {str(row["problem"]): row for row in records(data.products)}
    found = [name for name in dict.fromkeys([*rows, *parts]) if _matches(name, wanted)]
    given = " ".join(f"{key}={value}" for key, value in wanted.items())
    if not found:
        raise UserError(f"show: {_no_product([*rows, *parts], wanted, given)}; in {data.origin}")
    if len(found) > 1:
        differing, shown = _differing(found), map(_cells, found[:_MAX_LISTED])
        listed = "; ".join(" ".join(f"{name}={cells[name]}" for name in differing) for cells in shown)
        more = " ..." if len(found) > _MAX_LISTED else ""
        raise UserError(f"show: {counted(len(found), 'product')} with {given}; expected one of them: {listed}{more}")
    return ShownProduct(data=data, problem=found[0], row=rows.get(found[0]), trials=parts.get(found[0]))


def _no_product(problems: Sequence[str], wanted: Mapping[str, str], given: str) -> str:
    """Why no product has these values: the first value that none has among those in the run, else the sizes."""
    for key, value in wanted.items():
        cells = ({name.lower(): cell for name, cell in _cells(each).items()} for each in problems)
        values = dict.fromkeys(each[key.lower()] for each in cells if key.lower() in each)
        if value.lower().removeprefix("torch.") not in map(str.lower, values):
            return f"no product with {key}={value}{suggest_or_list('', values)}"
    one = _cells(problems[0]) if problems else {}
    known = " ".join(f"{name}={cell}" for name, cell in one.items() if name.lower() in map(str.lower, wanted))
    return f"no product with {given}; expected one such as {known}"


def _differing(problems: Sequence[str]) -> list[str]:
    """The key columns in which these products differ."""
    cells = [_cells(problem) for problem in problems]
    return [name for name in cells[0] if len({each.get(name) for each in cells}) > 1]


def _cells(problem: str) -> dict[str, str]:
    """The key columns of a problem's id."""
    return dict(item.partition("=")[::2] for item in problem.split(" ")[1:])


def _matches(problem: str, wanted: Mapping[str, str]) -> bool:
    """True if a problem's id has these values."""
    cells = _cells(problem)
    lowered = {name.lower(): value.lower() for name, value in cells.items()}
    return all(lowered.get(key.lower(), "") == value.lower().removeprefix("torch.") for key, value in wanted.items())


def product_lines(shown: ShownProduct, width: int, most: int) -> Iterator[str]:
    """The product in lines of at most `width` characters, with at most `most` candidates of the search."""
    yield from wrapped(printable(shown.problem), width, "    ")
    if shown.row is not None:
        yield ""
        yield from aligned(choice_columns(shown.data, [shown.row]), width)
        yield from (part for text in legend_lines([shown.row]) for part in wrapped(text, width, "    "))
        if shown.row["library"] == PADDED:
            yield from wrapped("the library's time is that of the multiple of 4 to which it pads M", width, "    ")
    if shown.trials is None:
        if shown.row is not None and shown.data.state == TABLE:
            yield from wrapped(printable(origin_text(shown.row)), width, "    ")
        yield "a table holds the choice alone" if shown.data.state == TABLE else "no candidate has a time"
        return
    finals = ranked(shown.trials.finals)
    if finals:
        early = sum(trial.status != "ok" for trial in finals)
        left = f"; the last {early:,} left the race early" if early else ""
        yield from ("", f"finals: {counted(len(finals), 'candidate')}{left}")
        yield from aligned(_columns(finals, shown), width)
        if reason := memory_reason(finals, shown.row):
            yield from wrapped(reason, width, " " * 4)
    search = ranked(shown.trials.search)
    yield from ("", f"search: {counted(len(search), 'candidate')} timed, the fastest {min(most, len(search)):,}")
    yield from aligned(_columns(search[:most], shown), width)
    others = [each for each in statuses(shown.trials) if each[1] != "ok"]
    if others:
        yield ""
    for stage, status, count, error in others:
        reason = f": {' '.join(error.split())}" if error else ""
        yield cut(printable(f"{stage}: {count:,} {status}{reason}"), width)


def _multiple_text(multiple: float) -> str:
    """A time over the best one: `1.034` near it, where differences count, else three digits."""
    return f"{multiple:.3f}" if multiple < _NEAR else three_digits(multiple)


def _columns(trials: Sequence[Trial], shown: ShownProduct) -> list[Column]:
    best_us = min((trial.time_us for trial in trials if trial.time_us), default=1.0)
    marks = ["*" if is_choice(t, shown.row) else "" for t in trials]
    copies = tuple(map(memory_text, trials))
    memory = [Column(title="weight memory", cells=copies)] if any(copies) else []
    full = tuple("" if t.full_clocks_us is None else time_text(t.full_clocks_us) for t in trials)
    clocks = [Column(title="full clocks", cells=full, importance=3)] if any(full) else []
    return [
        Column(title="", cells=tuple(marks), is_text=True),
        Column(title="time", cells=tuple(time_text(trial.time_us) for trial in trials)),
        Column(title="of best", cells=tuple(_multiple_text((trial.time_us or 0.0) / best_us) for trial in trials)),
        *clocks,
        *memory,
        Column(title="samples", cells=tuple(str(len(trial.samples_us)) for trial in trials), importance=1),
        Column(title="status", cells=tuple(str(trial.status) for trial in trials), is_text=True, importance=2),
        Column(title="backend", cells=tuple(trial.candidate.backend for trial in trials), is_text=True),
        Column(
            title="configuration (* is the choice)",
            cells=tuple(knobs_text(canonical_json(trial.candidate.knobs)) for trial in trials),
            is_text=True,
        ),
    ]


def as_object(shown: ShownProduct) -> dict[str, object]:
    """The product for JSON: its choice and all its trials, times in microseconds."""
    trials = [] if shown.trials is None else [*shown.trials.search, *shown.trials.finals]
    return {
        "problem": shown.problem,
        "choice": None if shown.row is None else product_object(shown.row, shown.data),
        "trials": [
            {
                "stage": each.trial.stage,
                "status": str(each.trial.status),
                "backend": each.trial.candidate.backend,
                "config": each.trial.candidate.knobs,
                "us": each.trial.time_us,
                "samples_us": list(each.trial.samples_us),
                "full_clocks_us": each.trial.full_clocks_us,
                "t_s": each.t_s,
                "error": each.trial.error,
            }
            for each in trials
        ],
    }
