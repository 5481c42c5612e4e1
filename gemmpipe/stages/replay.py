"""The replay stage: the quality of a search on recorded spaces, over many seeds, without a device."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gemmpipe.core.data import Candidate, Problem, median
from gemmpipe.core.errors import UserError, check_at_least
from gemmpipe.core.events import counted
from gemmpipe.family import GemmSpec, load_family
from gemmpipe.family.problem import group_by_shape
from gemmpipe.search import Search
from gemmpipe.search.history import History
from gemmpipe.search.recorded import Outcome, RecordedSpace
from gemmpipe.search.simulator import NEAR_BEST, SCREEN_LAUNCHES, SimulatedRun, score, simulate
from gemmpipe.search.simulator import ReplaySearch as ReplaySearch
from gemmpipe.stages import Context, Stage

if TYPE_CHECKING:
    import pandas as pd

Group = Sequence[tuple[Problem, GemmSpec]]


@dataclass(frozen=True, kw_only=True)
class Replay(Stage):
    """One row per problem: the median and worst ratio of the chosen time to the best, over the seeds, and the score."""

    keep: int

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("scores",)

    def __post_init__(self) -> None:
        check_at_least(1, keep=self.keep)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Replays every recording, problems that differ in M alone together."""
        import pandas as pd

        search = context.search
        if not isinstance(search, ReplaySearch):
            raise UserError(
                f"search: {type(search).__name__} given, expected search=replay (search@search.algorithm=NAME)"
            )
        rows: list[dict[str, object]] = []
        recordings = search.recordings(context.family.module)
        groups = [(recording, group) for recording in recordings for group in groups_of(recording)]
        context.events.emit("stage", "replay", total=len(groups), unit="problems")
        for done, (recording, group) in enumerate(groups):
            context.check()
            rows += replay_group(search, recording, group, self.keep)
            context.events.emit("progress", done=done + 1)
        scores = pd.DataFrame(rows)
        for line in lines(scores, search):
            context.events.emit("line", line)
        return {"scores": scores}


def groups_of(recording: RecordedSpace) -> Sequence[Group]:
    """Groups of problems that differ in M alone."""
    family = load_family(recording.family)
    problems = [(problem, family.spec(problem)) for problem in recording.problems]
    return group_by_shape(problems, lambda pair: replace(pair[0], rows_column=family.rows_column))


def replay_group(search: ReplaySearch, recording: RecordedSpace, group: Group, keep: int) -> list[dict[str, object]]:
    """Returns one row per problem of the group."""
    results: list[list[SimulatedRun]] = []
    for seed in range(search.seeds):
        history = History()
        if search.transfer:
            _add_transfer_history(history, recording, group)
        algorithm = _seeded(search.limited, seed)
        results.append(simulate(recording, group, algorithm, history, search.config_for(keep), seed))
    return [
        _row(recording, spec, [result[index] for result in results], search.compile_slots)
        for index, (_, spec) in enumerate(group)
    ]


def _seeded(search: Search, seed: int) -> Search:
    return replace(search, seed=seed) if hasattr(search, "seed") else search  # type: ignore[call-arg]


def _add_transfer_history(history: History, recording: RecordedSpace, group: Group) -> None:
    """Adds the trials that an earlier run on the other (N, K) would have recorded."""
    own = {problem for problem, _ in group}
    family = load_family(recording.family)
    history.facts |= recording.facts
    for problem, outcomes in recording.problems.items():
        if problem in own:
            continue
        known = history.add_problem(problem, family.spec(problem), {c.id: o.builds for c, o in outcomes.items()})
        known.times_us = {c: o.time_us for c, o in outcomes.items() if o.time_us is not None}


def _row(recording: RecordedSpace, spec: GemmSpec, replays: Sequence[SimulatedRun], slots: int) -> dict[str, object]:
    problem = replays[0].problem
    outcomes = recording.problems[problem]
    times = {c: o.time_us for c, o in outcomes.items() if o.time_us is not None}
    best_us = min(times.values())
    ratios = [times[r.chosen] / best_us if r.chosen else None for r in replays]
    reached = [r for r in ratios if r is not None]
    curves = [([m.at_s for m in r.trace], [_time(times, m.best) for m in r.trace]) for r in replays]
    return {
        "family": recording.family,
        "M": spec.m,
        "N": spec.n,
        "K": spec.k,
        "problem": problem.id,
        "candidates": len(outcomes),
        "evaluations": median(r.evaluations for r in replays),
        "seconds": median(r.trace[-1].at_s if r.trace else 0.0 for r in replays),
        "best_us": best_us,
        "ratio": median(reached) if reached else None,
        "worst": max(reached) if len(reached) == len(ratios) else None,
        "worst_seed": ratios.index(max(reached)) if len(reached) == len(ratios) else ratios.index(None),
        "within_1_pct": sum(r <= NEAR_BEST for r in reached) / len(ratios),
        "score": score(list(times.values()), _seconds_each(recording, outcomes, slots), curves),
    }


def _time(times: Mapping[Candidate, float], candidate: Candidate | None) -> float:
    return times[candidate] if candidate is not None else median(times.values())


def _seconds_each(recording: RecordedSpace, outcomes: Mapping[Candidate, Outcome], slots: int) -> float:
    """The cost of a candidate for random search: its share of the builds, its first launch and its timed launches."""
    compile_s = sum(recording.facts[b].compile_s for o in outcomes.values() for b in o.builds) / slots / len(outcomes)
    times = [o.time_us for o in outcomes.values() if o.time_us is not None]
    return compile_s + recording.first_launch_s + SCREEN_LAUNCHES * sum(times) / len(times) / 1e6


def lines(scores: "pd.DataFrame", search: ReplaySearch) -> list[str]:
    """The summary: a line per family, one over all, and the worst problem."""
    kind = type(search.algorithm).__name__.lower()
    found = []
    for name, part in [*scores.groupby("family", sort=False), ("all", scores)]:
        near = (part["ratio"] <= NEAR_BEST).mean()
        share = (part["evaluations"] / part["candidates"]).median()
        found.append(
            f"{name}: {kind} within 1 % of the best on {near:.1%} of {counted(len(part), 'problem')} (median of "
            f"{counted(search.seeds, 'seed')}; {part['within_1_pct'].mean():.1%} of all), at {share:.1%} of the "
            f"evaluations, score {part['score'].mean():.2f}"
        )
    worst = max(scores.to_dict("records"), key=_worst_ratio)
    by = "nothing found" if math.isinf(_worst_ratio(worst)) else f"{worst['worst']:.3f} times the best"
    found.append(f"worst: {by}, seed {worst['worst_seed']} of {worst['problem']}")
    return found


def _worst_ratio(row: "Mapping[Hashable, Any]") -> float:
    """The worst ratio of a problem; infinite where a seed found nothing."""
    worst = row["worst"]
    return math.inf if worst is None or math.isnan(worst) else float(worst)
