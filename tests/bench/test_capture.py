"""Finals of which somebody's launches cannot be captured: who stood far behind races instead."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from failing_jobs import PROBLEM, TIMER

from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import InFlight, WorkerContext
from gemmpipe.bench.timer import CpuClock, TimedCall, TimedReplay
from gemmpipe.core.data import Candidate, Status, Trial


class RefusingClock(CpuClock):
    """Knows what a launch of each finalist takes, by its position, and refuses to capture some of them."""

    overlaps = True

    def __init__(self, flight: InFlight, times_us: Sequence[float], refused: int | None) -> None:
        self._flight = flight
        self._times_us = times_us
        self._refused = refused
        self.lengths: dict[int, int] = {}

    def sequence(self, launches: Sequence[TimedCall], least_us: float = 0.0) -> list[float]:
        for launch in launches:
            launch()
        return [self._times_us[self._flight.position]] * len(launches)

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        if self._flight.position == self._refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        time_us = self._times_us[self._flight.position]
        self.lengths[self._flight.position] = len(launches)
        return lambda: time_us


def _finalists(number: int) -> tuple[Candidate, ...]:
    return tuple(Candidate.of("faulty", {"KIND": "right", "PACE_MS": 0.0, "NAME": str(i)}) for i in range(number))


def _race(
    tools: WorkerContext,
    times_us: Sequence[float],
    refused: int | None = None,
    library: tuple[int, ...] = (),
    unchecked: tuple[int, ...] = (),
) -> tuple[list[Trial], dict[int, int]]:
    """Trials of finalists in this order, and the launches a sample of those that were captured."""
    finalists = _finalists(len(times_us))
    free = frozenset(finalists[i].id for i in unchecked)
    job = FinalsJob(
        stage="bench",
        problem=PROBLEM,
        finalists=finalists,
        library=frozenset(finalists[i].id for i in library),
        always_timed=free,
        unchecked=free,
        timer=TIMER,
        err_ratio=0.05,
    )
    clock = RefusingClock(tools.in_flight, times_us, refused)
    trials = job.run(replace(tools, clock=clock))
    raced = [trial.candidate for trial in trials if trial.samples_us]
    assert raced == [finalist for finalist in finalists if finalist in raced], "in the order they were given"
    found = {trial.candidate: trial for trial in trials}
    return [found[finalist] for finalist in finalists], clock.lengths


def test_nobody_is_far_behind_one_that_cannot_be_captured(tools: WorkerContext) -> None:
    (lost, next_best, far), _ = _race(tools, (5.0, 20.0, 60.0), refused=0)
    assert lost.status is Status.LAUNCH_ERROR
    assert (next_best.status, len(next_best.samples_us)) == (Status.OK, 5)
    assert (far.status, len(far.samples_us)) == (Status.PRUNED, 1)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_baseline_that_cannot_be_captured_has_a_successor(tools: WorkerContext, order: tuple[int, int]) -> None:
    times_us = [5.0, 0.0, 0.0]
    times_us[order[0]], times_us[order[1]] = 20.0, 60.0
    trials, _ = _race(tools, times_us, refused=order[0], library=order)
    assert trials[order[0]].status is Status.LAUNCH_ERROR
    assert (trials[order[1]].status, len(trials[order[1]].samples_us)) == (Status.OK, 5)


def test_who_computes_nothing_sets_no_pace(tools: WorkerContext) -> None:
    """An empty kernel is timed beside others in `compare`: those have samples of one length all the same."""
    trials, lengths = _race(tools, (2.0, 20.0, 26.0), unchecked=(0,))
    assert {trial.status for trial in trials} <= {Status.OK, Status.PRUNED}
    assert lengths[1] == lengths[2] < lengths[0]
