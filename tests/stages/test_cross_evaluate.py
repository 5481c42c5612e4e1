"""Trials of the candidates that the nearest Ms and the other routings found."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from search_setup import SPEC

from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.core.spec import Experts
from gemmpipe.stages.screen.shortlist import cross_evaluate

A, B, C = (Candidate.of("triton", {"n": n}) for n in range(3))


def _state(
    m: int,
    times: dict[Candidate, float],
    *,
    n: int = 64,
    fit: tuple[Candidate, ...] = (A, B, C),
    routing: str | None = None,
) -> Any:
    problem = Problem(family="x", key=(("M", m), ("N", n), ("routing", routing)))
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
    experts = None if routing is None else Experts(count=8, topk=2, inner=n, routing=routing)
    spec = replace(SPEC, m=m, n=n, experts=experts)
    ids = frozenset(c.id for c in fit)
    built = {c.id: () for c in (A, B, C)}
    return SimpleNamespace(
        problem=problem,
        results=results,
        summary=SimpleNamespace(ids=ids, spec=spec),
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


def test_the_fastest_under_each_routing_is_timed_under_the_others_of_the_same_product() -> None:
    uniform, skewed, captured = (
        _state(m, times, routing=routing)
        for m, times, routing in ((8, {A: 5.0}, "uniform"), (8, {B: 4.0, C: 9.0}, "skewed"), (8, {C: 3.0}, "3/1/0.4"))
    )
    larger = _state(512, {C: 9.0}, routing="skewed")
    context: Any = SimpleNamespace(
        search=SimpleNamespace(budget_trials=None), implementation=lambda label: SimpleNamespace()
    )
    found = [
        (state.problem["routing"], state.problem.rows, {r.candidate for r in requests})
        for state, requests in cross_evaluate([uniform, skewed, captured, larger], context)
    ]
    by_shape = [("skewed", 512, {B})]
    assert sorted(found, key=str) == sorted(
        [("uniform", 8, {B, C}), ("skewed", 8, {A}), ("3/1/0.4", 8, {A, B}), *by_shape], key=str
    )
