"""Searches of a fraction of the candidates: number of trials, required candidates, budgets, neighbors."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_setup import PROBLEM, looks, subject

from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.family import GemmSpec
from gemmpipe.search import Search, SearchSession
from gemmpipe.search.gaussian_process import Gaussian
from gemmpipe.search.history import History, distance
from gemmpipe.search.neighbors import NeighborIndex
from gemmpipe.search.simple import Random

LIMITS = {"budget_s": None, "budget_trials": None, "journals": ()}
GUIDED = {
    "seeds": 8,
    "steps": 8,
    "neighbor_steps": 4,
    "transfer_rows": 64,
    "transfer_winners": 2,
    "seed": 0,
    "rungs": looks(first_launches=2),
}
SPEC = GemmSpec(m=64, n=1024, k=1024, x_dtype="bfloat16", w_dtype="bfloat16", out_dtype="bfloat16")
SPACE = [
    Candidate.of("triton", {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 64, "num_warps": w, "num_stages": s})
    for m in (16, 32, 64, 128)
    for n in (32, 64, 128)
    for w in (4, 8)
    for s in (2, 3, 4, 5)
]


def _gaussian(fraction: float, min_trials: int, stop_margin: float) -> Gaussian:
    sizes = {"trial_fraction": fraction, "min_trials": min_trials, **LIMITS}
    return Gaussian(exploration=1.5, stop_margin=stop_margin, **sizes, **GUIDED)  # type: ignore[arg-type]


def _searches(fraction: float, min_trials: int) -> list[Search]:
    sizes = {"trial_fraction": fraction, "min_trials": min_trials, **LIMITS}
    searches: list[Search] = [
        Random(seed=0, rungs=looks(), **sizes),  # type: ignore[arg-type]
        _gaussian(fraction, min_trials, math.inf),
    ]
    try:
        import sklearn  # noqa: F401

        from gemmpipe.search.forest import Forest
    except ImportError:
        return searches
    return [*searches, Forest(good_fraction=0.2, trees=20, **sizes, **GUIDED)]  # type: ignore[arg-type]


def _time_us(candidate: Candidate) -> float:
    """Convex in the knobs, with the minimum at 64 x 128, 8 warps, 4 stages."""
    best = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "num_warps": 8, "num_stages": 4}
    knobs = candidate.knobs
    return 10.0 * (1 + sum(abs(int(str(knobs[k])) - v) / v for k, v in best.items()))


def _run(session: SearchSession, rng: random.Random, fail_pct: int = 0) -> dict[Candidate, Trial]:
    results: dict[Candidate, Trial] = {}
    while not session.finished:
        requests = list(session.ask())
        assert requests, "it neither asks nor ends"
        rng.shuffle(requests)
        for request in requests:
            bad = rng.randrange(100) < fail_pct
            trial = Trial(
                stage="screen",
                problem="p",
                candidate=request.candidate,
                status=Status.DIED if bad else Status.OK,
                launches=0 if bad else request.launches,
                samples_us=() if bad else (_time_us(request.candidate),) * request.launches,
            )
            results[request.candidate] = trial
            session.tell([trial])
    return results


@settings(max_examples=12)
@given(st.integers(0, 96), st.floats(0.05, 1.0), st.integers(1, 40), st.sampled_from([0, 40, 100]), st.integers())
def test_a_fraction_and_all_required_candidates_are_timed(
    count: int, fraction: float, min_trials: int, fail_pct: int, seed: int
) -> None:
    space = SPACE[:count]
    given_ = space[-2:]
    for search in _searches(fraction, min_trials):
        session = search.start(subject(space, required=given_, spec=SPEC))
        results = _run(session, random.Random(seed), fail_pct)
        wanted = min(count, max(min_trials, round(fraction * count)))
        assert set(given_) <= set(results)
        assert len(results) == max(wanted, len(given_)), type(search).__name__


def test_choices_of_the_same_product_under_other_conditions_are_all_tried_first() -> None:
    """Those of other sizes are limited by transfer_winners, which is 2 here."""
    history, wide = History(), replace(SPEC, n=2048)
    for i, spec in enumerate([wide, SPEC, SPEC, wide, SPEC, SPEC, wide]):
        other = replace(PROBLEM, key=(*PROBLEM.key, ("condition", f"c{i}")))
        history.add_problem(other, spec).winner = SPACE[10 + 7 * i]
    session = _gaussian(0.25, 8, math.inf).start(subject(SPACE, spec=SPEC, history=history))
    first = [request.candidate for request in session.ask()]
    assert first[:4] == [SPACE[10 + 7 * i] for i in (1, 2, 4, 5)]
    assert set(first[4:6]) == {SPACE[10], SPACE[31]}
    assert SPACE[52] not in first[:6]


@pytest.mark.parametrize("index", range(3))
def test_the_minimum_is_found_with_a_quarter_of_the_trials(index: int) -> None:
    searches = _searches(0.25, 8)
    if index >= len(searches):
        pytest.skip("scikit-learn is not installed")
    results = _run(searches[index].start(subject(SPACE, spec=SPEC)), random.Random(1))
    best = min(t.time_us or 0 for t in results.values())
    assert (best == 10.0) == (index > 0), "random search does not; those that learn do"


def test_it_ends_early_if_no_other_candidate_can_be_the_fastest() -> None:
    asked = {}
    for stop_margin in (math.inf, 0.1, 0.0):
        results = _run(_gaussian(1.0, 8, stop_margin).start(subject(SPACE, spec=SPEC)), random.Random(1))
        assert min(t.time_us or 0 for t in results.values()) == 10.0
        asked[stop_margin] = len(results)
    assert len(SPACE) == asked[math.inf] > asked[0.1] >= asked[0.0] >= GUIDED["seeds"]  # type: ignore[operator]


def test_a_negative_stop_margin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_margin"):
        _gaussian(1.0, 8, -0.1)


def test_known_winners_come_first() -> None:
    known = History()
    near = subject(SPACE, spec=SPEC, history=known)
    known.problems.clear()
    from dataclasses import replace

    other = replace(near.problem, key=(("M", 2), ("N", 2), ("K", 3)))
    known.add_problem(other, replace(SPEC, m=128)).winner = SPACE[37]
    session = _searches(0.1, 4)[1].start(near)
    assert session.ask()[0].candidate == SPACE[37]


def test_other_dtypes_do_not_transfer() -> None:
    from dataclasses import replace

    assert distance(SPEC, replace(SPEC, m=128)) == 1
    assert distance(SPEC, replace(SPEC, x_dtype="float16")) == float("inf")


def test_a_neighbor_has_one_knob_at_the_next_value() -> None:
    around = NeighborIndex(SPACE, {c: i for i, c in enumerate(SPACE)}).neighbors(0)
    changed = [{k for k, v in SPACE[i].items if SPACE[0].knobs[k] != v} for i in around]
    assert sorted(next(iter(c)) for c in changed) == ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages", "num_warps"]
    assert all(len(c) == 1 for c in changed)


def test_a_neighbor_skips_missing_values_or_changes_a_second_knob() -> None:
    """Tiles of 112 columns have exactly seven slots, clusters as many programs as splits."""
    tiles = [
        (64, 4, 1, 1),
        (128, 4, 1, 1),
        (256, 4, 1, 1),
        (112, 7, 1, 1),
        (192, 5, 1, 1),
        (128, 4, 2, 2),
        (128, 4, 5, 5),
    ]
    knobs = ("BLOCK_SIZE_N", "num_stages", "NUM_KSPLIT", "CLUSTER_SIZE")
    space = [Candidate.of("gluon", dict(zip(knobs, each, strict=True))) for each in tiles]
    near = NeighborIndex(space, {c: i for i, c in enumerate(space)})

    def around(tile: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {tiles[i] for i in near.neighbors(tiles.index(tile))}  # type: ignore[arg-type]

    assert {(64, 4, 1, 1), (256, 4, 1, 1), (128, 4, 2, 2)} <= around((128, 4, 1, 1))
    assert {(128, 4, 1, 1), (192, 5, 1, 1)} <= around((112, 7, 1, 1))
    assert around((128, 4, 2, 2)) == {(128, 4, 1, 1), (128, 4, 5, 5)}


def test_an_ended_search_requests_no_new_candidate() -> None:
    for search in _searches(0.5, 8):
        session = search.start(subject(SPACE, spec=SPEC))
        first = list(session.ask())
        half = first[: len(first) // 2]
        for request in half:
            samples = (_time_us(request.candidate),) * request.launches
            session.tell([Trial(stage="screen", problem="p", candidate=request.candidate, status=Status.OK,
                             launches=request.launches, samples_us=samples)])  # fmt: skip
        session.end(len(first) - len(half))
        later = _run(session, random.Random(0))
        assert set(later) <= {r.candidate for r in half}
