"""Problems, trials and candidates as table rows, and back; and messages about problems without a selection."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gemmpipe.backends import missing_reason
from gemmpipe.core import schema
from gemmpipe.core.data import FINALS, SCREENING, Candidate, Problem, Status, Trial, canonical_json
from gemmpipe.core.errors import UserError, quoted_repr, shortened
from gemmpipe.core.events import counted
from gemmpipe.family import Family
from gemmpipe.family.problem import parse_key_value
from gemmpipe.journal import Record
from gemmpipe.search import Search
from gemmpipe.stages import Context
from gemmpipe.stages.screen.candidates import EXCLUDED_COLUMNS, CandidateSummary
from gemmpipe.templates.params import NO_GPU

if TYPE_CHECKING:
    from collections.abc import Hashable

    import pandas as pd

    from gemmpipe.stages import EngineTarget


def problem_frame(family: Family, problems: Iterable[Problem]) -> "pd.DataFrame":
    """The problems table."""
    import pandas as pd

    keys = [c.name for c in family.key_columns]
    rows = [{"problem": p.id, **dict(p.key), "weight": p.weight, "layer": p.layer} for p in problems]
    return pd.DataFrame(rows, columns=["problem", *keys, "weight", "layer"])


def problems_of(family: Family, frame: "pd.DataFrame") -> list[Problem]:
    """The problems of a problems table."""
    rows: list[Mapping[Hashable, object]] = frame.to_dict("records")  # type: ignore[assignment]
    return [
        family.problem(
            tuple((c.name, _plain(row[c.name])) for c in family.key_columns),  # type: ignore[misc]
            weight=float(row["weight"]),  # type: ignore[arg-type]
            layer=str(row["layer"]),
        )
        for row in rows
    ]


def _plain(value: object) -> object:
    """A numpy scalar as a Python one, so that ids and JSON stay the same; None for a missing value of pandas."""
    plain = value.item() if hasattr(value, "item") else value
    return None if plain != plain else plain


def config_text(candidate: Candidate) -> str:
    """The `config` cell: the knobs as canonical JSON."""
    return canonical_json(candidate.knobs)


def trial_frame(trials: Sequence[Trial], kernel_names: Mapping[str, str]) -> "pd.DataFrame":
    """The trials table; `kernel_names` by candidate id."""
    import pandas as pd

    rows = []
    for trial in trials:
        samples = sorted(trial.samples_us)
        rows.append(
            {
                "problem": trial.problem,
                "candidate": trial.candidate.id,
                "libtype": trial.candidate.backend,
                "config": config_text(trial.candidate),
                "kernelName": kernel_names.get(trial.candidate.id, trial.candidate.backend),
                "stage": trial.stage,
                "status": str(trial.status),
                "us": trial.time_us,
                "p20_us": quantile(samples, 0.2),
                "p80_us": quantile(samples, 0.8),
                "launches": trial.launches,
                "samples_us": trial.samples_us,
                "full_clocks_us": trial.full_clocks_us,
                "err_ratio": trial.err_ratio,
                "extra_weight_bytes": trial.extra_weight_bytes,
                "shared": trial.shared,
                "no_dependent_launch": trial.no_dependent_launch,
                "error": trial.error,
            }
        )
    return pd.DataFrame(rows, columns=list(schema.TRIALS))


TrialRow = Mapping[str, object]
"""A row of the trials table, by column."""


def trials_by_candidate(trials: "pd.DataFrame") -> dict[tuple[str, str], TrialRow]:
    """The rows of a trials table by (problem id, candidate id)."""
    rows: list[TrialRow] = trials.to_dict("records")  # type: ignore[assignment]
    return {(str(row["problem"]), str(row["candidate"])): row for row in rows}


def row_time_us(trial: TrialRow | None) -> float | None:
    """The time of a row; None without a row or a time."""
    us = trial["us"] if trial is not None else None
    return None if us is None or us != us else float(str(us))


def row_samples_us(trial: TrialRow) -> tuple[float, ...]:
    """The samples of a row, in the order of the rounds."""
    return tuple(trial["samples_us"])  # type: ignore[arg-type]


def excluded_frame(summaries: Sequence[CandidateSummary], kernel_names: Mapping[str, str]) -> "pd.DataFrame":
    """The trials table of excluded candidates, which were not tried."""
    import pandas as pd

    columns = {name: [cell for s in summaries for cell in s.excluded[name]] for name in EXCLUDED_COLUMNS}
    frame = pd.DataFrame(dict.fromkeys(schema.TRIALS), index=range(len(columns["candidate"])), dtype=object)
    frame = frame.assign(**columns, stage=SCREENING, launches=0, extra_weight_bytes=0, shared=False)
    frame["no_dependent_launch"] = False
    frame["problem"] = [s.problem.id for s in summaries for _ in s.excluded["candidate"]]
    names = zip(columns["candidate"], columns["libtype"], strict=True)
    frame["kernelName"] = [kernel_names.get(candidate, libtype) for candidate, libtype in names]
    frame["samples_us"] = [()] * len(frame)
    return frame


def untimed_row(problem: str, candidate: Candidate, role: str) -> dict[str, object]:
    """The shortlist row of a candidate that goes to the finals without screening."""
    return {
        "problem": problem,
        "candidate": candidate.id,
        "libtype": candidate.backend,
        "config": config_text(candidate),
        "role": role,
        "status": "",
        "us": None,
        "reason": "",
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The quantile at `share` of sorted values (nearest rank); None without a value."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def candidate_of(libtype: str, config: str) -> Candidate:
    """The candidate of a row's `libtype` and `config` cells. Raises ValueError for an invalid config."""
    knobs = json.loads(config)
    if not isinstance(knobs, dict):
        raise ValueError(f"config is {type(knobs).__name__}, expected a JSON object")
    return Candidate.of(libtype, knobs)


def empty_frame(name: str) -> "pd.DataFrame":
    """An empty `shortlist` or `trials` table."""
    import pandas as pd

    return pd.DataFrame(columns=list({"shortlist": schema.SHORTLIST, "trials": schema.TRIALS}[name]))


def recorded_finals(
    family: Family, record: Record, targets: Sequence["EngineTarget"] = (), *, per_problem: bool = True
) -> "tuple[list[Problem], pd.DataFrame]":
    """The problems with finals that an earlier run finished, and the table of their trials, from its journal.

    The trials include the finals of `targets`, engines' functions, also at Ms between the problems'. Without finals of
    all candidates (`per_problem` is False), a problem is finished when those of the targets are. Raises UserError when
    the run tuned another family, or another key of it.
    """
    problems = {
        str(row["id"]): _recorded_problem(family, row)
        for row in record.problems
        if str(row["id"]).split(" ")[0] == family.name
    }
    if record.problems and not problems:
        other = str(record.problems[0]["id"]).split(" ")[0]
        raise UserError(f"reuse: that run tuned kernel={other}, this one is kernel={family.name}")
    wanted = [FINALS] if per_problem else [target.finals for target in targets]
    done = [p for name, p in problems.items() if all((finals, name) in record.finished for finals in wanted)]
    trials = [t for p in done for t in record.of(FINALS, p.id)]
    trials += [t for target in targets for t in record.at(target.finals)]
    return done, trial_frame(trials, record.kernel_names)


def _recorded_problem(family: Family, row: Mapping[str, object]) -> Problem:
    """The problem of a journal row. Raises UserError unless its key is the family's and matches its id."""
    given: Mapping[str, object] = row["key"]  # type: ignore[assignment]
    try:
        key = tuple(
            (
                column.name,
                parse_key_value(column, given.get(column.name) if column.optional else given[column.name], ""),
            )
            for column in family.key_columns
        )
    except (KeyError, UserError) as error:
        raise UserError(
            f"reuse: problem {quoted_repr(row['id'])} has no key of kernel={family.name}: {error}"
        ) from None
    problem = family.problem(key, weight=float(str(row["weight"])), layer=str(row["layer"]))
    if problem.id != row["id"]:
        text = f"reuse: problem {quoted_repr(row['id'])} has the key of '{shortened(problem.id)}'"
        raise UserError(f"{text}; expected a run of this version")
    return problem


_SHOWN = 3
_EXCLUDED = {str(Status.UNSUPPORTED), str(Status.PRUNED)}


def report_unsolved(problem: Problem, trials: "pd.DataFrame", gated: int, limit_pct: float, context: Context) -> None:
    """Notes a problem without a selection; `gated` of its finalists take more than `limit_pct` of weight memory.

    A problem with a search that a budget ended is undecided, not unsolved: the end of the run reports it.
    """
    if problem.id in context.cut_short:
        context.undecided.append(problem.id)
        return
    context.unsolved.append(problem.id)
    if gated:
        weight = f"more weight memory than stages.select.max_extra_weight_pct={limit_pct:g} allows"
        why = f"{counted(gated, 'candidate')} passed, but with {weight}"
    else:
        of = trials[trials["problem"] == problem.id]
        why = _failures(of) if len(of) else _no_candidates(problem, context)
    context.events.emit("warning", f"no valid candidate for {problem.id}: {why}")


def _no_candidates(problem: Problem, context: Context) -> str:
    """Why there are no candidates at all: what the backends lack here, or that the space has none for them."""
    own = {each.label for each in context.family.implementations} if context.device.kind == "cpu" else set()
    spec = context.family.spec(problem)
    reasons = {
        each.label: missing_reason(each, spec, context.device) or (NO_GPU if each.label in own else None)
        for each in context.implementations
    }
    if not reasons:
        return "the family has no kernels of these backends"
    if all(reasons.values()):
        return ", ".join(f"{label}: {reason}" for label, reason in reasons.items())
    return "no candidate of these backends in this space"


def _failures(trials: "pd.DataFrame") -> str:
    """The statuses of a problem's finalists, else of the candidates tried, else of all, with the commonest error."""
    tried = trials[~trials["status"].isin(_EXCLUDED)]
    furthest = next(part for part in (tried[tried["stage"] == "bench"], tried, trials) if len(part))
    counts = Counter(furthest["status"].tolist())
    errors = Counter(text for text in furthest["error"].tolist() if text)
    text = ", ".join(f"{number:,} {status}" for status, number in counts.most_common())
    return f"{text}; for example: {errors.most_common(1)[0][0]}" if errors else text


def undecided_line(problems: Sequence[str], search: Search, cpu_budget_s: float | None = None) -> str:
    """The line about problems with searches that ended before a valid candidate was found."""
    shown = ", ".join(problems[:_SHOWN]) + (f" and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else "")
    budgets = {"search.budget_trials": search.budget_trials, "search.budget_s": search.budget_s}
    if not any(value is not None for value in budgets.values()):
        budgets["cpu_budget_s"] = cpu_budget_s
    spent = " and ".join(f"{name}={value:g}" for name, value in budgets.items() if value is not None)
    left = f"{spent or 'a budget'} left {counted(len(problems), 'problem')} without a valid candidate so far"
    return f"select: {left}: {shown}"
