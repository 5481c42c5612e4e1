"""Finals with a finalist that cannot be captured: the next one in time races instead."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from failing_jobs import PROBLEM, TIMER

from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import InFlight, WorkerContext
from gemmpipe.bench.timer import CpuClock, TimedCall, TimedReplay
from gemmpipe.core.data import Candidate, Status, Trial


class RefusingClock(CpuClock):
    """Has a fixed time for the launches of each finalist, by position, and fails to capture one of them."""

    overlaps = True

    def __init__(self, in_flight: InFlight, times_us: Sequence[float], refused: int | None) -> None:
        self._in_flight = in_flight
        self._times_us = times_us
        self._refused = refused
        self.lengths: dict[int, int] = {}

    def sequence(self, launches: Sequence[TimedCall], least_us: float = 0.0) -> list[float]:
        for launch in launches:
            launch()
        return [self._times_us[self._in_flight.position]] * len(launches)

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        if self._in_flight.position == self._refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        time_us = self._times_us[self._in_flight.position]
        self.lengths[self._in_flight.position] = len(launches)
        return TimedReplay(lambda: time_us)


def _finalists(number: int) -> tuple[Candidate, ...]:
    return tuple(Candidate.of("faulty", {"KIND": "right", "PACE_MS": 0.0, "NAME": str(i)}) for i in range(number))


def _race(
    context: WorkerContext,
    times_us: Sequence[float],
    refused: int | None = None,
    library: tuple[int, ...] = (),
    unchecked: tuple[int, ...] = (),
) -> tuple[list[Trial], dict[int, int]]:
    """The trials of finalists in this order, and the launches per sample of the captured ones."""
    finalists = _finalists(len(times_us))
    unchecked_ids = frozenset(finalists[i].id for i in unchecked)
    job = FinalsJob(
        stage="bench",
        problem=PROBLEM,
        finalists=finalists,
        library=frozenset(finalists[i].id for i in library),
        always_timed=unchecked_ids,
        unchecked=unchecked_ids,
        timer=TIMER,
        err_ratio=0.05,
    )
    clock = RefusingClock(context.in_flight, times_us, refused)
    trials = job.run(replace(context, clock=clock))
    raced = [trial.candidate for trial in trials if trial.samples_us]
    assert raced == [finalist for finalist in finalists if finalist in raced], "in the given order"
    found = {trial.candidate: trial for trial in trials}
    return [found[finalist] for finalist in finalists], clock.lengths


def test_a_finalist_that_cannot_be_captured_puts_none_far_behind(context: WorkerContext) -> None:
    (lost, next_best, far), _ = _race(context, (5.0, 20.0, 60.0), refused=0)
    assert lost.status is Status.LAUNCH_ERROR
    assert (next_best.status, len(next_best.samples_us)) == (Status.OK, 5)
    assert (far.status, len(far.samples_us)) == (Status.PRUNED, 1)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_baseline_that_cannot_be_captured_is_replaced(context: WorkerContext, order: tuple[int, int]) -> None:
    times_us = [5.0, 0.0, 0.0]
    times_us[order[0]], times_us[order[1]] = 20.0, 60.0
    trials, _ = _race(context, times_us, refused=order[0], library=order)
    assert trials[order[0]].status is Status.LAUNCH_ERROR
    assert (trials[order[1]].status, len(trials[order[1]].samples_us)) == (Status.OK, 5)


def test_an_unchecked_candidate_sets_no_pace(context: WorkerContext) -> None:
    """`compare` times an empty kernel with the others, which still have samples of equal length."""
    trials, lengths = _race(context, (2.0, 20.0, 26.0), unchecked=(0,))
    assert {trial.status for trial in trials} <= {Status.OK, Status.PRUNED}
    assert lengths[1] == lengths[2] < lengths[0]
