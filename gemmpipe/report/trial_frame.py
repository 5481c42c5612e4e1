"""Trials of a run by problem: times, best so far, the effect of knobs, and finalists that need more memory."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemmpipe.core.data import TIMED, Candidate, Trial, canonical_json
from gemmpipe.core.events import counted
from gemmpipe.core.units import bytes_text, time_text
from gemmpipe.report.data import TimedTrial

SEARCH, FINALS = "screen", "bench"


@dataclass(frozen=True, kw_only=True)
class ProblemTrials:
    """The trials of one problem, in the order of writing."""

    problem: str
    search: Sequence[TimedTrial]
    finals: Sequence[TimedTrial]

    def times_us(self) -> dict[Candidate, float]:
        """The last time of each candidate: of the finals where it has one, else of the search."""
        found: dict[Candidate, float] = {}
        for each in (*self.search, *self.finals):
            if each.trial.status in TIMED and each.trial.time_us is not None:
                found[each.trial.candidate] = each.trial.time_us
        return found

    def of_backends(self, names: Collection[str]) -> "ProblemTrials | None":
        """The trials of these backends alone; None if none of them has a time."""
        kept = replace(
            self,
            search=[each for each in self.search if each.trial.candidate.backend in names],
            finals=[each for each in self.finals if each.trial.candidate.backend in names],
        )
        return kept if kept.times_us() else None

    def best_so_far(self) -> list[tuple[int, float | None, float]]:
        """(number of the trial, seconds, best time in us so far) at each improvement of the search, and at its end."""
        best = math.inf
        found: list[tuple[int, float | None, float]] = []
        for number, each in enumerate(self.search, 1):
            us = each.trial.time_us if each.trial.status in TIMED else None
            if us is not None and us < best:
                best = us
                found.append((number, each.t_s, best))
        if found and found[-1][0] != len(self.search):
            found.append((len(self.search), self.search[-1].t_s, best))
        return found


def by_problem(trials: Iterable[TimedTrial]) -> dict[str, ProblemTrials]:
    """The trials of each problem with a timed candidate, in the order of their first trial."""
    search: dict[str, list[TimedTrial]] = defaultdict(list)
    finals: dict[str, list[TimedTrial]] = defaultdict(list)
    for each in trials:
        if each.trial.stage in (SEARCH, FINALS):
            (search if each.trial.stage == SEARCH else finals)[each.trial.problem].append(each)
    names = dict.fromkeys([*search, *finals])
    found = {name: ProblemTrials(problem=name, search=search[name], finals=finals[name]) for name in names}
    return {name: part for name, part in found.items() if part.times_us()}


def ranked(trials: Iterable[TimedTrial]) -> list[Trial]:
    """The last timed trial of each candidate: full times first, then by time."""
    last: dict[Candidate, Trial] = {each.trial.candidate: each.trial for each in trials}
    timed = [trial for trial in last.values() if trial.status in TIMED and trial.time_us is not None]
    return sorted(timed, key=lambda trial: (trial.status != "ok", trial.time_us or 0.0, trial.candidate.id))


def is_choice(trial: Trial, row: Mapping[Any, Any] | None) -> bool:
    """True for a trial of the choice of a row with `libtype` and `config`."""
    candidate = trial.candidate
    return row is not None and (candidate.backend, canonical_json(candidate.knobs)) == (row["libtype"], row["config"])


def memory_text(trial: Trial) -> str:
    """`+12.0 MiB`, what a candidate needs in addition to the stored weight; empty for nothing."""
    return f"+{bytes_text(trial.extra_weight_bytes)}" if trial.extra_weight_bytes else ""


def memory_reason(finals: Sequence[Trial], row: Mapping[Any, Any] | None) -> str:
    """Why faster finalists that keep a copy of the weight are not the choice; empty where there are none."""
    chosen = next((trial for trial in finals if is_choice(trial, row)), None)
    if chosen is None or chosen.time_us is None:
        return ""
    faster = [
        trial
        for trial in finals
        if trial.status == "ok"
        and (trial.time_us or math.inf) < chosen.time_us
        and trial.extra_weight_bytes > chosen.extra_weight_bytes
    ]
    if not faster:
        return ""
    best = min(faster, key=lambda trial: trial.time_us or math.inf)
    which = counted(len(faster), "faster finalist") + (", the fastest" if len(faster) > 1 else ":")
    return (
        f"{which} {time_text(best.time_us)} with {memory_text(best)} for the weight, "
        "more than stages.select.max_extra_weight_pct allows"
    )


@dataclass(frozen=True, kw_only=True)
class KnobValue:
    """The effect of a knob's value, over the problems where a candidate with it was timed."""

    value: str
    slowdown: float
    """Geometric mean over problems of the best time with the value over the best time of all candidates."""
    problems: int
    candidates: int
    wins: int
    """Problems with the fastest candidate at this value."""


def knob_effects(parts: Iterable[ProblemTrials]) -> list[tuple[str, list[KnobValue]]]:
    """The values of each knob and their effect; the knob with the largest effect first.

    The backend counts as a knob. A knob with a single value is left out.
    """
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    candidates: Counter[tuple[str, str]] = Counter()
    wins: Counter[tuple[str, str]] = Counter()
    for part in parts:
        times = part.times_us()
        best = min(times.values())
        least: dict[tuple[str, str], float] = {}
        for candidate, us in times.items():
            for item in knob_items(candidate):
                candidates[item] += 1
                least[item] = min(us, least.get(item, math.inf))
        for item, us in least.items():
            logs[item].append(math.log(us / best))
            wins[item] += us == best
    knobs: dict[str, list[KnobValue]] = defaultdict(list)
    for (name, value), ratios in logs.items():
        mean = math.exp(sum(ratios) / len(ratios))
        found = KnobValue(
            value=value, slowdown=mean, problems=len(ratios), candidates=candidates[name, value], wins=wins[name, value]
        )
        knobs[name].append(found)
    several = [
        (name, sorted(values, key=lambda each: value_order(each.value)))
        for name, values in knobs.items()
        if len(values) > 1
    ]
    return sorted(several, key=lambda item: (-importance(item[1]), item[0]))


def importance(values: Sequence[KnobValue]) -> float:
    """How much a knob matters: the mean over its values of their slow-down, weighted by problems."""
    weight = sum(each.problems for each in values)
    return math.exp(sum(each.problems * math.log(each.slowdown) for each in values) / weight)


def knob_items(candidate: Candidate) -> list[tuple[str, str]]:
    """(knob, value as text) of a candidate; its backend counts as a knob."""
    knobs = [(name, "none" if value in ("", None) else str(value)) for name, value in candidate.items]
    return [("backend", candidate.backend), *knobs]


def value_order(value: str) -> tuple[bool, float, str]:
    """The key that sorts values of a knob: numbers, then texts."""
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, value


def statuses(part: ProblemTrials) -> list[tuple[str, str, int, str]]:
    """(stage, status, candidates, an error) of the candidates that did not finish with a full time."""
    counts: Counter[tuple[str, str]] = Counter()
    errors: dict[tuple[str, str], str] = {}
    for stage, trials in (("search", part.search), ("finals", part.finals)):
        last: Mapping[Candidate, Trial] = {each.trial.candidate: each.trial for each in trials}
        for trial in last.values():
            key = (stage, str(trial.status))
            counts[key] += 1
            if trial.error:
                errors.setdefault(key, trial.error)
    return [(stage, status, count, errors.get((stage, status), "")) for (stage, status), count in counts.most_common()]
