"""Jobs with candidates that fail on purpose, clocks with given times, and helpers for their tests."""

from collections.abc import Sequence

import torch

from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.timer import CpuClock, TimedCall, TimedReplay, Timer
from gemmpipe.core.data import Candidate, Problem, Trial
from gemmpipe.family import Launch
from gemmpipe.search import TrialRequest

TIMER = Timer(warmup=1, iters=2, rounds=5, budget_ms=200)
PROBLEM = Problem(family="faulty", key=(("M", 8), ("N", 16), ("K", 32)))


class Cells(list[float]):
    """Shared memory of InFlight that records every position."""

    def __init__(self) -> None:
        super().__init__([0.0, 0.0])
        self.positions: list[float] = []

    def __setitem__(self, index: object, value: object) -> None:
        super().__setitem__(index, value)  # type: ignore[index, assignment]
        if index == 0:
            self.positions.append(value)  # type: ignore[arg-type]


class OverlappingClock(CpuClock):
    """A clock on which consecutive launches overlap."""

    overlaps = True


class Paced:
    """A launch with a fixed time for PacedClock."""

    def __init__(self, launch: Launch, time_us: float) -> None:
        self._launch, self.time_us = launch, time_us

    def __call__(self) -> torch.Tensor:
        return self._launch()


class PacedClock(CpuClock):
    """Returns the given time of each launch, independent of the load of the machine."""

    overlaps = True

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        def once() -> float:
            for launch in launches:
                launch()
            return sum(getattr(launch, "time_us", 1.0) for launch in launches) / len(launches)

        return TimedReplay(once)


def candidate(kind: str, pace_ms: float = 0) -> Candidate:
    return Candidate.of("faulty", {"KIND": kind, "PACE_MS": pace_ms})


def screen(*kinds: str, launches: int = 2, timer: Timer = TIMER) -> ScreenJob:
    requests = tuple(TrialRequest(candidate=candidate(kind), launches=launches) for kind in kinds)
    return ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=timer)


def finals(
    *finalists: Candidate, library: frozenset[str] = frozenset(), always_timed: frozenset[str] = frozenset()
) -> FinalsJob:
    return FinalsJob(
        stage="bench",
        problem=PROBLEM,
        finalists=finalists,
        library=library,
        always_timed=always_timed,
        timer=TIMER,
        err_ratio=0.05,
    )


def by_kind(trials: list[Trial]) -> dict[str, Trial]:
    assert len({t.candidate for t in trials}) == len(trials)
    return {str(t.candidate.knobs["KIND"]): t for t in trials}
