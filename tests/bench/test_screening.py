"""Screening: how often who is launched, and with whom it ends after one launch."""

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


def test_screening_gives_the_launches_asked_for(tools: WorkerContext, cells: Cells) -> None:
    found = by_kind(screen("right", "raise_bind", "raise_launch", "untouched").run(tools))
    assert {kind: t.status for kind, t in found.items()} == {
        "right": Status.OK,
        "untouched": Status.OK,  # bench checks, screen does not
        "raise_bind": Status.LAUNCH_ERROR,
        "raise_launch": Status.LAUNCH_ERROR,
    }
    assert re.fullmatch(r"\S+/faulty\.py:\d+: RuntimeError: this kernel cannot", found["raise_launch"].error)
    assert found["raise_launch"].time_us is None
    assert found["untouched"].launches in (2, 3)  # three where something came in between
    assert cells.positions == [SETTING_UP, 0, 1, 2, 3, RUNNING_SEVERAL]


def test_one_alone_is_in_the_air_all_the_time(tools: WorkerContext, cells: Cells) -> None:
    screen("right").run(tools)
    assert cells.positions == [SETTING_UP, 0, 0]


def test_short_launches_are_screened_in_blocks(tools: WorkerContext, bench: WorkerBench) -> None:
    timer = replace(TIMER, block_us=1e6)
    for clock, launches, samples in ((CpuClock(), 3, 3), (OverlappingClock(), 16, 2)):
        bench.launch_counts.clear()
        bench.single_launch_us.clear()
        [trial] = screen("right", launches=3, timer=timer).run(replace(tools, clock=clock))
        block = launches // samples
        # One more where something came in between.
        assert (trial.launches, len(trial.samples_us)) in [(launches + i * block, samples + i) for i in (0, 1)]
        [launched] = bench.launch_counts.values()
        assert launched >= launches, "what ran is counted"
    [trial] = screen("right", launches=40, timer=timer).run(replace(tools, clock=OverlappingClock()))
    assert (trial.launches, len(trial.samples_us)) in [(40, 5), (48, 6)], "as many launches as were asked for"


def test_who_is_far_behind_has_no_blocks(paced: WorkerContext) -> None:
    requests = tuple(TrialRequest(candidate=candidate("right", pace_ms=pace), launches=3) for pace in (0, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=replace(TIMER, block_us=1e6))
    quick, slow = job.run(paced)
    assert (quick.launches, slow.launches) == (16, 3)


@pytest.mark.parametrize("glance", [True, False])
def test_a_glance_at_who_is_far_behind_is_one_launch(paced: WorkerContext, bench: WorkerBench, glance: bool) -> None:
    paces = (3.0, 3.01, 3.02, 3.03, 3.04, 9.0)
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=3, first_rung=glance) for p in paces
    )
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER)
    *near, far = job.run(paced)
    assert {t.status for t in near} == {Status.OK}
    assert {len(t.samples_us) for t in near} == {3}
    assert (far.status, far.launches) == ((Status.PRUNED, 1) if glance else (Status.OK, 3))
    assert far.effective_launches == 3, "what was asked for is answered, also for a run that is resumed"
    assert far.time_us == 9_000
    # First launches, one of each alone, and the samples.
    assert bench.launch_counts[PROBLEM.id, far.candidate.id] == (2 if glance else 5)


class DisturbedClock(PacedClock):
    """Something comes in between for 2 ms, in the blocks of these numbers."""

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
def test_a_disturbed_sample_costs_nobody_the_choice(
    paced: WorkerContext, disturbed: tuple[int, ...], samples: list[int]
) -> None:
    """Blocks 0 and 1 are a launch of each alone, 2 to 5 the samples of both in turn."""
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=2, first_rung=True) for p in (0.011, 0.01)
    )
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER, library=frozenset({"faulty"}))
    trials = job.run(replace(paced, clock=DisturbedClock(*disturbed)))
    assert [t.status for t in trials] == [Status.OK] * 2
    assert [t.time_us for t in trials] == pytest.approx([11, 10])
    assert [len(t.samples_us) for t in trials] == samples


def test_too_few_tell_who_is_far_behind(paced: WorkerContext) -> None:
    """Nothing is checked yet: a kernel that computes nothing is the fastest, and puts nobody out."""
    requests = tuple(
        TrialRequest(candidate=candidate("right", pace_ms=p), launches=3, first_rung=True) for p in (0, 5, 6)
    )
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER)
    trials = job.run(paced)
    assert [t.status for t in trials] == [Status.OK] * 3


@pytest.mark.parametrize(("extra_bytes", "dropped"), [(0, True), (1, False)])
def test_a_librarys_time_is_believed(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch, extra_bytes: int, dropped: bool
) -> None:
    """One launch of it tells who is behind, unless it bought its speed with memory."""
    prepared = ProblemSetup.prepared
    monkeypatch.setattr(ProblemSetup, "prepared", lambda *words: replace(prepared(*words), extra_bytes=extra_bytes))
    requests = tuple(TrialRequest(candidate=candidate("right", p), launches=3, first_rung=True) for p in (1, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER, library=frozenset({"faulty"}))
    _, slow = job.run(paced)
    assert slow.status is (Status.PRUNED if dropped else Status.OK)


def test_who_was_launched_before_is_not_launched_alone_again(paced: WorkerContext, bench: WorkerBench) -> None:
    for launches, expected in ((3, 5), (12, 17)):
        screen("right", launches=launches).run(paced)
        assert list(bench.launch_counts.values()) == [expected]


def test_a_long_look_takes_no_more_than_is_affordable(paced: WorkerContext) -> None:
    request = TrialRequest(candidate=candidate("right", pace_ms=2), launches=40)
    for budget_ms, samples in ((200, 40), (13, 6), (0, 3)):
        paced.bench.single_launch_us.clear()
        job = ScreenJob(stage="screen", problem=PROBLEM, requests=(request,), timer=replace(TIMER, budget_ms=budget_ms))
        [trial] = job.run(paced)
        assert len(trial.samples_us) == samples
