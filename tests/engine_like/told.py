"""executor=told: real workers with a clock that tells of each launch the time that it is said to take (`time_us`)."""

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace

from gemmpipe.executors.local import Local
from gemmpipe.jobs import Tools
from gemmpipe.timer import Call, CpuClock, Replay
from gemmpipe.worker import Equip, Post, ready_tools


@dataclass(frozen=True, kw_only=True, slots=True)
class Told(Local):
    """No machine is too busy for its times."""

    @property
    def equip(self) -> Equip:
        return _tools


def _tools(post: Post, cells: MutableSequence[float]) -> Tools:
    return replace(ready_tools(post, cells), clock=_Clock())


class _Clock(CpuClock):
    overlaps = True

    def blocks(self, blocks: Sequence[Sequence[Call]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[Call]) -> Replay:
        def once() -> float:
            for launch in launches:
                launch()
            return sum(getattr(launch, "time_us", 1.0) for launch in launches) / len(launches)

        return once

    def launches_per_sample(self, time_us: float, sets: int) -> int:
        return 1
