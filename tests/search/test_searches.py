"""Searches on given times: each asks once and ends, and halving finds the result of exhaustive search."""

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_setup import EXHAUSTIVE, halving, subject

from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.search import Search, SearchProblem, SearchSession, TrialRequest
from gemmpipe.stages.screen.shortlist import shortlist

HALVING = halving()
KEEP = 5


def _candidates(count: int) -> list[Candidate]:
    return [Candidate.of("triton", {"n": i}) for i in range(count)]


def _replay(
    session: SearchSession, times: Mapping[Candidate, float | None], order: random.Random
) -> dict[Candidate, Trial]:
    """Answer requests from `times` (None: a failure) in any order and in parts; returns each candidate's last trial."""
    results: dict[Candidate, Trial] = {}
    waiting: list[TrialRequest] = []
    asked: set[TrialRequest] = set()
    for _ in range(10_000):
        for request in session.ask():
            assert request not in asked, "asked for twice"
            asked.add(request)
            waiting.append(request)
        if session.finished:
            assert not waiting
            return results
        assert waiting, "it neither asks nor ends"
        order.shuffle(waiting)
        count = order.randint(1, len(waiting))
        trials = [_answer(request, times) for request in waiting[:count]]
        del waiting[:count]
        results |= {t.candidate: t for t in trials}
        session.tell(trials)
    raise AssertionError("no end")


def _answer(request: TrialRequest, times: Mapping[Candidate, float | None]) -> Trial:
    time_us = times[request.candidate]
    return Trial(
        stage="screen",
        problem="p",
        candidate=request.candidate,
        status=Status.DIED if time_us is None else Status.OK,
        launches=0 if time_us is None else request.launches,
        samples_us=() if time_us is None else (time_us,) * request.launches,
    )


TIMES = st.lists(st.none() | st.floats(1, 1e6), max_size=200)


@settings(max_examples=150)
@given(times=TIMES, seed=st.integers())
def test_halving_finds_what_exhaustive_search_finds(times: list[float | None], seed: int) -> None:
    space = dict(zip(_candidates(len(times)), times, strict=True))
    chosen = []
    for search in (HALVING, EXHAUSTIVE):
        results = _replay(search.start(subject(list(space))), space, random.Random(seed))
        assert set(results) == set(space), "every candidate is looked at"
        kept = shortlist(results, keep=KEEP, margin_pct=float("inf"))
        timed = [c for c, t in space.items() if t is not None]
        assert len(kept) == min(KEEP, len(timed)), "never fewer than the finalists wanted"
        chosen.append(kept)
    # Candidates of the same rungs are ranked by time: the winner and the nearest ones are the same.
    fastest = sorted((t, c.id) for c, t in space.items() if t is not None)[:KEEP]
    assert [c.id for c in chosen[1]] == [name for _, name in fastest]
    assert [c.id for c in chosen[0]] == [name for _, name in fastest]


@pytest.mark.parametrize("start", [HALVING.start, EXHAUSTIVE.start])
@pytest.mark.parametrize("count", [0, 1, KEEP, KEEP + 1])
def test_small_spaces(start: Callable[[SearchProblem], SearchSession], count: int) -> None:
    times: dict[Candidate, float | None] = {c: 10.0 + i for i, c in enumerate(_candidates(count))}
    assert len(_replay(start(subject(list(times))), times, random.Random(0))) == count


def test_halving_times_fewer_with_more_launches() -> None:
    times: dict[Candidate, float | None] = {c: 100.0 + i for i, c in enumerate(_candidates(256))}
    session, rungs = HALVING.start(subject(list(times))), []
    while not session.finished:
        requests = session.ask()
        rungs.append((len(requests), requests[0].launches))
        session.tell([_answer(r, times) for r in requests])
    assert rungs == [(256, 1), (64, 4), (16, 16)]


def test_halving_prunes_slow_candidates() -> None:
    times: dict[Candidate, float | None] = {c: 10.0 * 2**i for i, c in enumerate(_candidates(12))}
    search: Search = HALVING
    results = _replay(search.start(subject(list(times))), times, random.Random(0))
    assert [t.launches for t in sorted(results.values(), key=lambda t: t.time_us or 0)] == [4, 4, *[1] * 10]
