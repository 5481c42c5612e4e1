"""The state of one problem in screen: each open request gets one result, in any order of results."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_setup import EXHAUSTIVE, PROBLEM, SPEC, halving, subject

from gemmpipe.core.data import Build, Candidate, Status, Trial
from gemmpipe.journal import Record
from gemmpipe.search import Search
from gemmpipe.stages.screen.candidates import CandidateSummary, SpaceReport
from gemmpipe.stages.screen.search_pool import SessionStarted
from gemmpipe.stages.screen.state import ProblemState

HALVING = halving(keep_fraction=0.5, max_launches=4, cutoff=10.0)
CANDIDATES = tuple(Candidate.of("triton", {"n": i}) for i in range(12))


def _build(name: int) -> Build:
    return Build(kernel=f"k:{name}", source_hash="", signature=(), constants=(), aligned=(), options=())


def _state(search: Search, builds: dict[Candidate, list[int]], record: Record | None = None) -> ProblemState:
    ids = frozenset(c.id for c in builds)
    summary = CandidateSummary(problem=PROBLEM, spec=SPEC, ids=ids, required=(), excluded={}, report=SpaceReport())
    started = SessionStarted(
        summary=summary,
        session=search.start(subject(list(builds), keep=3)),
        builds={c.id: tuple(_build(n) for n in names) for c, names in builds.items()},
        kernel_names={},
    )
    return ProblemState(started, record or Record())


def _trial(candidate: Candidate, launches: int) -> Trial:
    failed = launches == 0
    return Trial(
        stage="screen",
        problem=PROBLEM.id,
        candidate=candidate,
        status=Status.DIED if failed else Status.OK,
        launches=launches,
        samples_us=() if failed else (10.0 + int(str(candidate.knobs["n"])),),
    )


def _drive(state: ProblemState, builds: set[int], broken: set[int], seed: int, fail_pct: int) -> list[Trial]:
    """Builds and times in any order, with repeated results; returns all trials that the state accounts for."""
    order = random.Random(seed)
    built: dict[str, str] = {}
    to_build = sorted(builds)
    order.shuffle(to_build)
    running = []
    trials: list[Trial] = []
    for _ in range(1000):
        trials += state.take_requests(built)
        while state.ready and order.random() < 0.7:
            running.append(state.ready.popleft())
        if state.finished:
            return trials
        if to_build and order.random() < 0.5:
            name = to_build.pop()
            built[_build(name).id] = "it does not compile" if name in broken else ""
            trials += state.build_finished(_build(name).id, built[_build(name).id])
        if running and order.random() < 0.5:
            request = running.pop(order.randrange(len(running)))
            trial = _trial(request.candidate, 0 if order.randrange(100) < fail_pct else request.launches)
            trials += state.tell([trial])
            assert state.tell([trial]) == [], "a result counts once"
    raise AssertionError("no end")


@settings(max_examples=150)
@given(
    needs=st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), max_size=12),
    broken=st.sets(st.integers(0, 5)),
    search=st.sampled_from([HALVING, EXHAUSTIVE]),
    seed=st.integers(),
    fail_pct=st.sampled_from([0, 30, 100]),
)
def test_each_request_is_answered_once(
    needs: list[list[int]], broken: set[int], search: Search, seed: int, fail_pct: int
) -> None:
    builds = dict(zip(CANDIDATES, needs, strict=False))
    state = _state(search, builds)
    trials = _drive(state, {n for names in needs for n in names}, broken, seed, fail_pct)
    assert state.pending == 0
    assert set(state.results) == set(builds)
    counts = Counter((t.candidate, t.launches) for t in trials)
    assert max(counts.values(), default=1) == 1
    for candidate, names in builds.items():
        failed = state.results[candidate].status is Status.COMPILE_ERROR
        assert failed == bool(broken & set(names)), "a candidate fails with its build and with no other"
        if failed:
            assert state.results[candidate].error == "it does not compile"


@pytest.mark.parametrize("search", [HALVING, EXHAUSTIVE])
def test_a_resumed_problem_requests_nothing_that_is_known(search: Search) -> None:
    builds: dict[Candidate, list[int]] = {c: [] for c in CANDIDATES}
    first = _state(search, builds)
    trials = _drive(first, set(), set(), 0, 20)
    for cut in range(len(trials) + 1):
        record = Record()
        for trial in trials[:cut]:
            record.add(trial)
        state = _state(search, builds, record)
        resumed = _drive(state, set(), set(), 0, 0)
        assert not {(t.candidate, t.launches) for t in resumed} & {(t.candidate, t.launches) for t in trials[:cut]}
        assert set(state.results) == set(first.results)


def test_a_job_without_results_fails_its_candidates() -> None:
    state = _state(EXHAUSTIVE, {c: [] for c in CANDIDATES[:2]})
    state.take_requests({})
    state.tell([_trial(CANDIDATES[0], 2)])
    (missing,) = state.missing_results(CANDIDATES[:2])
    assert (missing.candidate, missing.status, missing.error) == (CANDIDATES[1], Status.DIED, "no result")
    assert state.tell([missing]) == [missing]
    assert state.finished
