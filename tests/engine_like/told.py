"""executor=told: real workers with a clock that tells of each launch the time that it is said to take (`time_us`)."""

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace

from gemmpipe.bench.jobs import WorkerContext
from gemmpipe.bench.timer import CpuClock, TimedCall, TimedReplay
from gemmpipe.bench.worker import WorkerConfig, WorkerContextFactory, make_worker_context
from gemmpipe.executors.local import Local


@dataclass(frozen=True, kw_only=True, slots=True)
class Told(Local):
    """No machine is too busy for its times."""

    @property
    def make_context(self) -> WorkerContextFactory:
        return _tools


def _tools(post: WorkerConfig, cells: MutableSequence[float]) -> WorkerContext:
    return replace(make_worker_context(post, cells), clock=_Clock())


class _Clock(CpuClock):
    overlaps = True

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        def once() -> float:
            for launch in launches:
                launch()
            return sum(getattr(launch, "time_us", 1.0) for launch in launches) / len(launches)

        return TimedReplay(once)

    def launches_per_sample(self, time_us: float, sets: int) -> int:
        return 1
