"""Searches in a replayed space: each asks once, ends, and the cheap one finds what the dear one finds."""

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
    hunt: SearchSession, times: Mapping[Candidate, float | None], order: random.Random
) -> dict[Candidate, Trial]:
    """Answer every request from `times` (None: it fails), in any order and in bits; each candidate's last trial."""
    results: dict[Candidate, Trial] = {}
    waiting: list[TrialRequest] = []
    asked: set[TrialRequest] = set()
    for _ in range(10_000):
        for request in hunt.ask():
            assert request not in asked, "asked for twice"
            asked.add(request)
            waiting.append(request)
        if hunt.finished:
            assert not waiting
            return results
        assert waiting, "it neither asks nor ends"
        order.shuffle(waiting)
        count = order.randint(1, len(waiting))
        told = [_answer(request, times) for request in waiting[:count]]
        del waiting[:count]
        results |= {t.candidate: t for t in told}
        hunt.tell(told)
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
    # Those that passed the same looks are ranked by time: the winner and the near ones are the same.
    fastest = sorted((t, c.id) for c, t in space.items() if t is not None)[:KEEP]
    assert [c.id for c in chosen[1]] == [name for _, name in fastest]
    assert [c.id for c in chosen[0]] == [name for _, name in fastest]


@pytest.mark.parametrize("start", [HALVING.start, EXHAUSTIVE.start])
@pytest.mark.parametrize("count", [0, 1, KEEP, KEEP + 1])
def test_small_spaces(start: Callable[[SearchProblem], SearchSession], count: int) -> None:
    times: dict[Candidate, float | None] = {c: 10.0 + i for i, c in enumerate(_candidates(count))}
    assert len(_replay(start(subject(list(times))), times, random.Random(0))) == count


def test_halving_looks_longer_at_fewer() -> None:
    times: dict[Candidate, float | None] = {c: 100.0 + i for i, c in enumerate(_candidates(256))}
    hunt, looked = HALVING.start(subject(list(times))), []
    while not hunt.finished:
        requests = hunt.ask()
        looked.append((len(requests), requests[0].launches))
        hunt.tell([_answer(r, times) for r in requests])
    assert looked == [(256, 1), (64, 4), (16, 16)]


def test_halving_leaves_the_slow_behind() -> None:
    times: dict[Candidate, float | None] = {c: 10.0 * 2**i for i, c in enumerate(_candidates(12))}
    search: Search = HALVING
    results = _replay(search.start(subject(list(times))), times, random.Random(0))
    assert [t.launches for t in sorted(results.values(), key=lambda t: t.time_us or 0)] == [4, 4, *[1] * 10]
