"""Trials of the candidates that the nearest Ms found."""

from types import SimpleNamespace
from typing import Any

from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.stages.screen.shortlist import cross_evaluate

A, B, C = (Candidate.of("triton", {"n": n}) for n in range(3))


def _state(m: int, times: dict[Candidate, float], *, n: int = 64, fit: tuple[Candidate, ...] = (A, B, C)) -> Any:
    problem = Problem(family="x", key=(("M", m), ("N", n)))
    results = {
        c: Trial(
            stage="screen",
            problem=problem.id,
            candidate=c,
            status=Status.OK,
            launches=6,
            requested_launches=12,
            samples_us=(time_us,),
        )
        for c, time_us in times.items()
    }
    ids = frozenset(c.id for c in fit)
    built = {c.id: () for c in (A, B, C)}
    return SimpleNamespace(
        problem=problem,
        results=results,
        summary=SimpleNamespace(ids=ids),
        cut_short=False,
        builds=built,
        kernel_names={},
    )


def _requested(*states: Any, budget_trials: int | None = None) -> dict[int, list[tuple[Candidate, int]]]:
    context: Any = SimpleNamespace(
        search=SimpleNamespace(budget_trials=budget_trials), implementation=lambda label: SimpleNamespace()
    )
    return {
        state.problem.rows: [(r.candidate, r.launches) for r in requests]
        for state, requests in cross_evaluate(list(states), context)
    }


def test_the_fastest_of_the_nearest_ms_gets_as_many_launches_as_the_others() -> None:
    found = _requested(_state(1, {A: 5.0}), _state(2, {B: 4.0, C: 9.0}), _state(4, {C: 3.0}), _state(8, {C: 3.0}))
    assert found == {1: [(B, 12), (C, 12)], 2: [(A, 12)], 4: [(A, 12), (B, 12)], 8: [(B, 12)]}


def test_candidates_that_are_timed_or_unfit_or_of_other_products_are_left_out() -> None:
    assert _requested(_state(1, {A: 5.0, B: 6.0}), _state(2, {A: 7.0, B: 4.0})) == {}
    assert _requested(_state(1, {A: 5.0}, fit=(A, C)), _state(2, {B: 4.0, A: 9.0})) == {}
    assert _requested(_state(1, {A: 5.0}), _state(2, {B: 4.0}, n=128)) == {}
    assert _requested(_state(1, {}), _state(2, {B: 4.0})) == {}, "a search that ended before it timed anything"


def test_a_budget_of_trials_allows_no_extra_ones() -> None:
    pair = _state(1, {A: 5.0}), _state(2, {B: 4.0})
    assert _requested(*pair, budget_trials=1) == {}
    pair[0].cut_short = True
    assert _requested(*pair) == {2: [(A, 12)]}
