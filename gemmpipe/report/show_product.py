"""One product of a run as text: its candidates by time, its finals, and why others left."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemmpipe.core.data import TIMED, Candidate, Trial, canonical_json
from gemmpipe.core.errors import UserError, printable, suggest_or_list
from gemmpipe.core.events import counted
from gemmpipe.core.units import bytes_text, time_text
from gemmpipe.report.attention import records
from gemmpipe.report.data import TABLE, RunData
from gemmpipe.report.diff_text import knobs_text
from gemmpipe.report.lines import wrapped
from gemmpipe.report.show_text import choice_columns, legend_lines, product_object
from gemmpipe.report.tables import origin_text
from gemmpipe.report.text_table import Column, aligned, cut
from gemmpipe.report.trial_frame import ProblemTrials, by_problem, statuses

_MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class ShownProduct:
    """One product of a run or a table."""

    data: RunData
    problem: str
    row: Mapping[Any, Any] | None
    """Its choice; None for a product without one."""
    trials: ProblemTrials | None
    """None in a table, which holds choices alone."""


def find_product(data: RunData, wanted: Mapping[str, str]) -> ShownProduct:
    """The only product with these values of key columns; names in any case, dtypes with or without `torch.`.

    Raises UserError for an unknown column, for no product and for several.
    """
    names = {column.name.lower(): column.name for column in data.family.key_columns}
    for key in wanted:
        if key.lower() not in names:
            raise UserError(f"show: {key}: no key column of {data.family.name}{suggest_or_list(key, names.values())}")
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
    """Why no product has these values: the first value that none has with those that there are, else the sizes."""
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
    if shown.trials is None:
        if shown.row is not None and shown.data.state == TABLE:
            yield from wrapped(printable(origin_text(shown.row)), width, "    ")
        yield "a table holds the choice alone" if shown.data.state == TABLE else "no candidate has a time"
        return
    finals = _ranked(shown.trials.finals)
    if finals:
        early = sum(trial.status != "ok" for trial in finals)
        left = f"; the last {early:,} left the race early" if early else ""
        yield from ("", f"finals: {counted(len(finals), 'candidate')}{left}")
        yield from aligned(_columns(finals, shown), width)
        yield from _memory_lines(finals, shown, width)
    search = _ranked(shown.trials.search)
    yield from ("", f"search: {counted(len(search), 'candidate')} timed, the fastest {min(most, len(search)):,}")
    yield from aligned(_columns(search[:most], shown), width)
    others = [each for each in statuses(shown.trials) if each[1] != "ok"]
    if others:
        yield ""
    for stage, status, count, error in others:
        reason = f": {' '.join(error.split())}" if error else ""
        yield cut(printable(f"{stage}: {count:,} {status}{reason}"), width)


def _ranked(trials: Sequence[Any]) -> list[Trial]:
    """The last timed trial of each candidate: full times first, then by time."""
    last: dict[Candidate, Trial] = {each.trial.candidate: each.trial for each in trials}
    timed = [trial for trial in last.values() if trial.status in TIMED and trial.time_us is not None]
    return sorted(timed, key=lambda trial: (trial.status != "ok", trial.time_us or 0.0, trial.candidate.id))


def _columns(trials: Sequence[Trial], shown: ShownProduct) -> list[Column]:
    best_us = min((trial.time_us for trial in trials if trial.time_us), default=1.0)
    chosen = _chosen(shown)
    marks = ["*" if _name(t) == chosen else "" for t in trials]
    copies = tuple(f"+{bytes_text(t.extra_weight_bytes)}" if t.extra_weight_bytes else "" for t in trials)
    memory = [Column(title="weight memory", cells=copies)] if any(copies) else []
    return [
        Column(title="", cells=tuple(marks), is_text=True),
        Column(title="time", cells=tuple(time_text(trial.time_us) for trial in trials)),
        Column(title="of best", cells=tuple(f"{(trial.time_us or 0.0) / best_us:.3f}" for trial in trials)),
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


def _memory_lines(trials: Sequence[Trial], shown: ShownProduct, width: int) -> Iterator[str]:
    """Why faster candidates that keep a copy of the weight are not the choice."""
    chosen = next((t for t in trials if _name(t) == _chosen(shown)), None)
    if chosen is None or chosen.time_us is None:
        return
    faster = [t for t in trials if t.time_us is not None and t.time_us < chosen.time_us]
    if any(t.extra_weight_bytes > chosen.extra_weight_bytes for t in faster):
        text = "faster ones need more memory for the weight than stages.select.max_extra_weight_pct allows"
        yield from wrapped(text, width, "    ")


def _name(trial: Trial) -> tuple[str, str]:
    return trial.candidate.backend, canonical_json(trial.candidate.knobs)


def _chosen(shown: ShownProduct) -> tuple[str, str]:
    return ("", "") if shown.row is None else (str(shown.row["libtype"]), str(shown.row["config"]))


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
                "t_s": each.t_s,
                "error": each.trial.error,
            }
            for each in trials
        ],
    }
