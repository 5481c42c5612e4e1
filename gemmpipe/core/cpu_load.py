"""Detection of other processes that use this machine's cores while candidates are timed on them.

By the kernel's counters of processor time for the cores that this process may use (/proc/stat), minus the time of the
run's own processes. The load average is no measure: it counts the threads of the whole host, the run's own too, also in
a container with few of its cores, and lags by a minute. The time that own threads wait for a core
(/proc/self/schedstat) misses a process on the sibling of a core: torch runs one thread per physical core, which that
process slows without making it wait.
"""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.device import usable_cores

_LEAST_WINDOW_S = 0.5  # counters are multiples of 10 ms
_IDLE_COLUMNS = (3, 4)  # idle, iowait
_COUNTED_COLUMNS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorTime:
    """Counters at one moment, in seconds."""

    at: float
    """On the monotonic clock."""
    busy_s: float
    """Seconds of all usable cores together, for any process; time that a hypervisor takes counts as busy."""
    own_s: float
    """Seconds of this process and its driver."""


class ForeignProcessorTime:
    """The share of the usable cores that processes outside the run use."""

    def __init__(self, read: Callable[[], ProcessorTime | None] | None = None, cores: int | None = None) -> None:
        """`read` returns the counters now; by default those of Linux, None elsewhere: nothing is detected then."""
        self._read = read or read_processor_time
        self._cores = cores or usable_cores()
        self._known: deque[ProcessorTime] = deque()
        self._begin()

    def _begin(self) -> None:
        now = self._read()
        if now is not None:
            self._known.append(now)

    def used_pct(self) -> float:
        """Percent of the cores' time that others used since the last call, or in the last 0.5 s; 0 if unknown."""
        now = self._read()
        if now is None or not self._known:
            return 0.0
        while len(self._known) > 1 and now.at - self._known[1].at >= _LEAST_WINDOW_S:
            self._known.popleft()
        before = self._known[0]
        self._known.append(now)
        wall_s = now.at - before.at
        foreign_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        return max(0.0, 100 * foreign_s / (wall_s * self._cores)) if wall_s > 0 else 0.0


def read_processor_time() -> ProcessorTime | None:
    """The counters now; None where the system has none."""
    with suppress(OSError, ValueError, IndexError):
        ticks_s = os.sysconf("SC_CLK_TCK")
        busy_s = _busy_ticks(Path("/proc/stat").read_text(), os.sched_getaffinity(0)) / ticks_s
        own_s = time.process_time()
        driver = multiprocessing.parent_process()
        if driver is not None and driver.pid is not None:
            own_s += _process_ticks(Path(f"/proc/{driver.pid}/stat").read_text()) / ticks_s
        return ProcessorTime(at=time.monotonic(), busy_s=busy_s, own_s=own_s)
    return None


def _busy_ticks(stat: str, cores: Collection[int]) -> int:
    """The ticks of /proc/stat in which these cores were not idle; of all cores if it numbers others (a container)."""
    lines = {name: cells for name, *cells in (line.split() for line in stat.splitlines()) if name.startswith("cpu")}
    wanted = [f"cpu{core}" for core in cores]
    chosen = wanted if all(name in lines for name in wanted) else ["cpu"]
    return sum(_busy([int(cell) for cell in lines[name][:_COUNTED_COLUMNS]]) for name in chosen)


def _busy(ticks: list[int]) -> int:
    return sum(ticks) - sum(ticks[column] for column in _IDLE_COLUMNS)


def _process_ticks(stat: str) -> int:
    """User and system ticks of /proc/PID/stat; the name of the program, in brackets, may have blanks."""
    cells = stat.rpartition(")")[2].split()
    return int(cells[11]) + int(cells[12])
