"""Screening: numbers of launches, and candidates that are pruned after one launch."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from failing_jobs import PROBLEM, TIMER, Cells, OverlappingClock, PacedClock, by_kind, candidate, screen

from gemmpipe.bench.jobs import RUNNING_SEVERAL, SETTING_UP, WorkerContext
from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.setup import ProblemSetup, WorkerBench
from gemmpipe.bench.timer import CpuClock, TimedCall
from gemmpipe.core.data import Status
from gemmpipe.search import TrialRequest


def test_screening_runs_the_requested_launches(context: WorkerContext, cells: Cells) -> None:
    found = by_kind(screen("right", "raise_bind", "raise_launch", "untouched").run(context))
    assert {kind: t.status for kind, t in found.items()} == {
        "right": Status.OK,
        "untouched": Status.OK,  # bench checks, screen does not
        "raise_bind": Status.LAUNCH_ERROR,
        "raise_launch": Status.LAUNCH_ERROR,
    }
    assert re.fullmatch(r"\S+/faulty\.py:\d+: RuntimeError: this kernel cannot", found["raise_launch"].error)
    assert found["raise_launch"].time_us is None
    assert found["untouched"].launches in (2, 3)  # three after a disturbance
    assert cells.positions == [SETTING_UP, 0, 1, 2, 3, RUNNING_SEVERAL]


def test_a_single_candidate_is_in_flight_all_the_time(context: WorkerContext, cells: Cells) -> None:
    screen("right").run(context)
    assert cells.positions == [SETTING_UP, 0, 0]


def test_short_launches_are_screened_in_blocks(context: WorkerContext, bench: WorkerBench) -> None:
    timer = replace(TIMER, block_us=1e6)
    for clock, launches, samples in ((CpuClock(), 3, 3), (OverlappingClock(), 16, 2)):
        bench.launch_counts.clear()
        bench.single_launch_us.clear()
        [trial] = screen("right", launches=3, timer=timer).run(replace(context, clock=clock))
        block = launches // samples
        # One more sample after a disturbance.
        assert (trial.launches, len(trial.samples_us)) in [(launches + i * block, samples + i) for i in (0, 1)]
        [launched] = bench.launch_counts.values()
        assert launched >= launches, "all launches are counted"
    [trial] = screen("right", launches=40, timer=timer).run(replace(context, clock=OverlappingClock()))
    assert (trial.launches, len(trial.samples_us)) in [(40, 5), (48, 6)], "all requested launches"


def test_slow_candidates_have_no_blocks(paced: WorkerContext) -> None:
    requests = tuple(TrialRequest(candidate=candidate("right", pace_ms=pace), launches=3) for pace in (0, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=replace(TIMER, block_us=1e6))
    quick, slow = job.run(paced)
    assert (quick.launches, slow.launches) == (16, 3)


def test_a_candidate_that_is_far_behind_has_one_sample_in_each_search(paced: WorkerContext) -> None:
    """E.g. one with registers in memory, in an exhaustive search: it would take most of the time."""
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=3) for p in (2.0, 2.01, 2.02, 2.03, 4.0, 20.0)
    )
    *near, far = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER).run(paced)
    assert {(t.status, len(t.samples_us)) for t in near} == {(Status.OK, 3)}
    assert (far.status, far.launches, len(far.samples_us)) == (Status.PRUNED, 1, 1)


@pytest.mark.parametrize("first_rung", [True, False])
def test_the_first_rung_of_a_slow_candidate_is_one_launch(
    paced: WorkerContext, bench: WorkerBench, first_rung: bool
) -> None:
    paces = (3.0, 3.01, 3.02, 3.03, 3.04, 9.0)
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=3, first_rung=first_rung) for p in paces
    )
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER)
    *near, far = job.run(paced)
    assert {t.status for t in near} == {Status.OK}
    assert {len(t.samples_us) for t in near} == {3}
    assert (far.status, far.launches) == ((Status.PRUNED, 1) if first_rung else (Status.OK, 3))
    assert far.effective_launches == 3, "the request is answered, also in a resumed run"
    assert far.time_us == 9_000
    # The first launch, a single launch, and the samples.
    assert bench.launch_counts[PROBLEM.id, far.candidate.id] == (2 if first_rung else 5)


def test_a_launch_outside_of_a_graph_may_take_somewhat_longer(paced: WorkerContext) -> None:
    """Than that of a kernel with dependent launch: 3.5 us are 1.75 times 2 us, 20 us are far behind."""
    job = ScreenJob(
        stage="screen",
        problem=PROBLEM,
        requests=tuple(
            TrialRequest(candidate=candidate("right", pace_ms=p), launches=3, first_rung=True)
            for p in (0.002, 0.00201, 0.00202, 0.00203, 0.0035, 0.0045, 0.02)
        ),
        timer=replace(TIMER, block_us=30),
    )
    trials = job.run(paced)
    assert [t.status for t in trials] == [*[Status.OK] * 6, Status.PRUNED]
    assert {t.launches // len(t.samples_us) for t in trials[:6]} == {8}, "all in blocks of equal length"


class DisturbedClock(PacedClock):
    """Adds a disturbance of 2 ms to the blocks with these numbers."""

    def __init__(self, *disturbed: int) -> None:
        self._disturbed, self._passed = disturbed, 0

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        first, self._passed = self._passed, self._passed + len(blocks)
        times = super().blocks(blocks, least_us)
        return [
            t + 2_000 / len(b) if first + i in self._disturbed else t
            for i, (t, b) in enumerate(zip(times, blocks, strict=True))
        ]


@pytest.mark.parametrize(("disturbed", "samples"), [((), [2, 2]), ((3,), [2, 3]), ((1,), [2, 2])])
def test_a_disturbed_sample_does_not_change_the_choice(
    paced: WorkerContext, disturbed: tuple[int, ...], samples: list[int]
) -> None:
    """Blocks 0 and 1 are a single launch of each, 2 to 5 the samples of both in turn."""
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=2, first_rung=True) for p in (0.011, 0.01)
    )
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER, library=frozenset({"faulty"}))
    trials = job.run(replace(paced, clock=DisturbedClock(*disturbed)))
    assert [t.status for t in trials] == [Status.OK] * 2
    assert [t.time_us for t in trials] == pytest.approx([11, 10])
    assert [len(t.samples_us) for t in trials] == samples


def test_too_few_candidates_define_no_pace(paced: WorkerContext) -> None:
    """Results are not checked yet: a kernel that computes nothing is the fastest, and must not prune others."""
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=3, first_rung=True) for p in (0, 5, 6)
    )
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER)
    trials = job.run(paced)
    assert [t.status for t in trials] == [Status.OK] * 3


@pytest.mark.parametrize(("extra_bytes", "dropped"), [(0, True), (1, False)])
def test_a_librarys_time_defines_the_pace(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch, extra_bytes: int, dropped: bool
) -> None:
    """One launch of it prunes slower candidates, unless it uses additional memory."""
    prepared = ProblemSetup.prepared
    monkeypatch.setattr(ProblemSetup, "prepared", lambda *args: replace(prepared(*args), extra_bytes=extra_bytes))
    requests = tuple(TrialRequest(candidate=candidate("right", p), launches=3, first_rung=True) for p in (1, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER, library=frozenset({"faulty"}))
    _, slow = job.run(paced)
    assert slow.status is (Status.PRUNED if dropped else Status.OK)


def test_a_candidate_has_one_single_launch_per_worker(paced: WorkerContext, bench: WorkerBench) -> None:
    for launches, expected in ((3, 5), (12, 17)):
        screen("right", launches=launches).run(paced)
        assert list(bench.launch_counts.values()) == [expected]


def test_samples_are_limited_by_the_budget(paced: WorkerContext) -> None:
    request = TrialRequest(candidate=candidate("right", pace_ms=2), launches=40)
    for budget_ms, samples in ((200, 40), (13, 6), (0, 3)):
        paced.bench.single_launch_us.clear()
        job = ScreenJob(stage="screen", problem=PROBLEM, requests=(request,), timer=replace(TIMER, budget_ms=budget_ms))
        [trial] = job.run(paced)
        assert len(trial.samples_us) == samples
