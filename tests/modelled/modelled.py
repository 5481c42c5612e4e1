"""executor=modelled: the local executor on GPUs that are not there. Workers and compilers are processes that sleep.

What a candidate takes is the search's own analytic model times a factor drawn by its name; the rest is what an H200's
manifest says of 72 problems (2026-11-21). The driver, its supervisors, pipes and journal are the real ones.
"""

import random
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import Any

from gemmpipe.bench.jobs import InFlight, WorkerContext
from gemmpipe.bench.timer import Clock, TimedCall, TimedReplay
from gemmpipe.bench.worker import WorkerConfig, WorkerContextFactory
from gemmpipe.core.data import Build, BuildFacts, Candidate, Device, Problem
from gemmpipe.core.device import DeviceChoice, arch_device
from gemmpipe.core.errors import one_line
from gemmpipe.core.nvml import ForeignProcesses
from gemmpipe.executors.compile_pool import CompileFn
from gemmpipe.executors.local import Local
from gemmpipe.family import Family, load_family
from gemmpipe.search.features import FeatureCache, FeatureEncoder

LOAD_US = 280.0  # of a candidate's binary, once a worker
FIRST_US = 430.0  # of a candidate's first launch on a problem
LAUNCH_US = 40.0  # beside the kernel's own time, in a series of timed launches
OPERANDS_US = 12_000.0  # of a problem
CHECK_US = 2_000.0  # compare with the reference, capture a graph
NOISE = 0.006
SPREAD = 0.3  # of log time around the analytic model


@dataclass(frozen=True, kw_only=True, slots=True)
class Modelled(Local):
    """Runs on `workers` devices that sleep."""

    slow: float
    compile_ms: float
    fails: str | None
    """A constant of kernels: builds in which it is true do not compile."""

    def find(self, choice: DeviceChoice) -> tuple[Device, ...]:
        device = arch_device("sm_90")
        return tuple(replace(device, index=i, uuid=f"modelled-{i}") for i in range(self.workers or 1))

    @property
    def make_context(self) -> WorkerContextFactory:
        return partial(_tools, self.slow)

    @property
    def compiler(self) -> CompileFn:
        return _Compile(self.slow * self.compile_ms / 1e3, self.fails)


@dataclass(frozen=True)
class _Compile:
    seconds: float
    fails: str | None

    def __call__(self, build: Build, device: Device) -> BuildFacts:
        time.sleep(self.seconds)
        known = dict(build.constants)
        if known.get(self.fails or ""):
            raise RuntimeError(f"{self.fails} does not compile")
        m, n, k = (int(known.get(f"BLOCK_SIZE_{axis}") or known.get(f"BLOCK_{axis}") or 64) for axis in "MNK")
        warps = int(dict(build.options).get("num_warps") or 4)
        registers = min(255, 24 + int(1.6 * m * n / (32 * warps)))
        shared = (m + n) * k * int(dict(build.options).get("num_stages") or 3)
        return BuildFacts(
            compile_s=self.seconds, shared_bytes=shared, registers=registers, spills=0 if registers < 255 else 8
        )


def _tools(slow: float, post: WorkerConfig, cells: MutableSequence[float]) -> WorkerContext:
    clock = _Clock(slow)
    bench: Any = _Bench(load_family(post.family), post.device, clock)
    return WorkerContext(
        bench=bench, clock=clock, in_flight=InFlight(cells), foreign_processes=ForeignProcesses(post.device)
    )


class _Clock(Clock):
    """Time that is owed is slept in whole milliseconds; what a sleep took too long is credited."""

    def __init__(self, slow: float) -> None:
        self._slow = slow
        self._owed_s = 0.0
        self.queued_us = 0.0
        """By launches since the last look."""
        self._rng = random.Random(0)

    def owe(self, time_us: float) -> None:
        self._owed_s += self._slow * time_us / 1e6
        if self._owed_s > 1e-3:
            begun = time.monotonic()
            time.sleep(self._owed_s)
            self._owed_s -= time.monotonic() - begun

    def synchronize(self) -> None:
        queued, self.queued_us = self.queued_us, 0.0
        self.owe(queued)

    def blocks(self, blocks: Sequence[Sequence[TimedCall]], least_us: float = 0.0) -> list[float]:
        return [self._block(block) for block in blocks]

    def _block(self, block: Sequence[TimedCall]) -> float:
        self.synchronize()
        for launch in block:
            launch()
        time_us = self.queued_us / len(block) * (1 + NOISE * self._rng.gauss(0, 1))
        self.owe(LAUNCH_US)
        self.synchronize()
        return time_us

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        for launch in launches:
            launch()
        each_us, self.queued_us = self.queued_us / len(launches), 0.0

        def once() -> float:
            self.owe(each_us * len(launches) + LAUNCH_US)
            return each_us * (1 + NOISE * self._rng.gauss(0, 1))

        return TimedReplay(once)


class _Bench:
    """Replaces the bench of a worker."""

    def __init__(self, family: Family, device: Device, clock: _Clock) -> None:
        self.family, self.device, self.clock = family, device, clock
        self.launch_counts: dict[tuple[str, str], int] = {}
        self.single_launch_us: dict[str, dict[str, float]] = {}
        self.library_us: dict[str, float] = {}
        self.loaded: set[str] = set()
        self._encoder = FeatureEncoder()
        self._times: dict[tuple[str, str], float] = {}
        self._ready: set[str] = set()

    def set_up(self, problem: Problem, *, finals: bool = False) -> "_Setup":
        if problem.id not in self._ready:
            self._ready.add(problem.id)
            self.clock.owe(OPERANDS_US)
        return _Setup(self, problem)

    def describe_error(self, candidate: Candidate, error: Exception) -> str:
        return one_line(error)

    def time_us(self, problem: Problem, candidate: Candidate) -> float:
        key = (problem.id, candidate.id)
        if key not in self._times:
            sight = FeatureCache(self._encoder, self.family.spec(problem), self.device, [candidate], {}).features({})
            luck = random.Random(f"{candidate.id} {problem.shape_group}").gauss(0, 1)
            model_us = 2.718 ** float(sight.estimate[0]) if "BLOCK_SIZE_M" in candidate.knobs else 20.0
            self._times[key] = model_us * 2.718 ** (SPREAD * luck)
        return self._times[key]


class _Setup:
    """Stands for a Setup: nothing is computed."""

    def __init__(self, bench: _Bench, problem: Problem) -> None:
        self._bench, self.problem = bench, problem
        self.spec = bench.family.spec(problem)
        once = bench.family.bytes_moved(self.spec)
        self.sets = max(2, min(32, ceil(3 * bench.device.cache_bytes / once)))

    def implementation(self, candidate: Candidate) -> None: ...
    def timed_scale_orders(self, candidate: Candidate) -> tuple[str, ...]:
        return self.spec.x_scale_orders

    def release(self) -> None: ...
    def inputs(self, index: int, order: str | None = None) -> None: ...
    def weights(self, index: int) -> None: ...
    def out(self, index: int) -> None: ...
    def reference(self) -> None: ...
    def fill_nan(self) -> None: ...

    def prepared(self, candidate: Candidate, index: int) -> SimpleNamespace:
        return SimpleNamespace(extra_bytes=0)

    def error_ratio(self, output: object) -> float:
        self._bench.clock.owe(CHECK_US)
        return 0.0

    def binder(self, candidate: Candidate, order: str | None = None) -> Callable[[int], TimedCall]:
        return lambda index: self.bind(candidate, index)

    def bind(self, candidate: Candidate, index: int) -> TimedCall:
        bench, clock = self._bench, self._bench.clock
        if candidate.id not in bench.loaded:
            bench.loaded.add(candidate.id)
            clock.owe(LOAD_US)
        time_us = bench.time_us(self.problem, candidate)
        first = (self.problem.id, candidate.id) not in bench.launch_counts

        def launch() -> None:
            clock.queued_us += time_us + (FIRST_US if first and not bench.launch_counts.get(key) else 0.0)

        key = (self.problem.id, candidate.id)
        return launch
