"""Compiles the kernels of a comparison in parallel before its finals, which would compile them one after the other.

The kernels of builds (own ones, DeepGEMM's tiles), and the Triton functions of inference engines, which compile when
they are called: an engine's file has another configuration for almost every M.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gemmpipe.backends.engine_compile import CompileCalls, CompilesWhenCalled
from gemmpipe.core.data import Build, Candidate, Knobs, Problem
from gemmpipe.core.errors import one_line
from gemmpipe.executors import BuildResult, drain_on_interrupt
from gemmpipe.family import GemmSpec
from gemmpipe.stages import POLL_S, Context
from gemmpipe.stages.engine.expected import compile_processes, compile_seconds, compiled_share

_LEAST_S = 0.05
"""The seconds of a build that was compiled before, as a share of the work: it is looked up."""
_MOST_S = 300.0
"""Seconds after which engines' processes are not waited for: an engine may hang as it is imported."""


class BuildsWork:
    """The share of builds that is done, by time: each kernel's builds take as long as those of it that are finished.

    nvcc takes ten seconds and more for a kernel of DeepGEMM, Triton one or two.
    """

    def __init__(self, builds: Iterable[Build]) -> None:
        self._left: dict[str, int] = {}
        """By kernel, the unfinished builds."""
        for build in builds:
            self._left[build.kernel] = self._left.get(build.kernel, 0) + 1
        self._spent_s: dict[str, list[float]] = {}
        """By kernel, the seconds of each finished build."""

    @property
    def left(self) -> int:
        """The unfinished builds."""
        return sum(self._left.values())

    def receive(self, message: BuildResult) -> None:
        """Take a result; those of other stages' builds are ignored."""
        kernel = message.build.kernel
        if self._left.get(kernel, 0):
            self._left[kernel] -= 1
            self._spent_s.setdefault(kernel, []).append(max(_LEAST_S, message.facts.compile_s))

    @property
    def share(self) -> float:
        """The share that is done; a kernel without a finished build takes as long as the slowest one known."""
        means_s = {kernel: sum(each) / len(each) for kernel, each in self._spent_s.items()}
        slowest_s = max(means_s.values(), default=1.0)
        done_s = sum(map(sum, self._spent_s.values()))
        left_s = sum(count * means_s.get(kernel, slowest_s) for kernel, count in self._left.items())
        return done_s / (done_s + left_s) if left_s else 1.0


@dataclass(frozen=True, kw_only=True)
class _EngineTask:
    """Calls of one engine's function for a process."""

    implementation: CompilesWhenCalled
    calls: list[tuple[GemmSpec, Knobs]]


def engine_tasks(entries: Mapping[Problem, Collection[Candidate]], context: Context) -> list[_EngineTask]:
    """The calls that compile in their first launch, of `entries` by problem; those of one (N, K) are in one process.

    None without a GPU, where no engine's function runs.
    """
    by_product: dict[tuple[str, object], _EngineTask] = {}
    for problem, candidates in entries.items() if context.device.kind == "cuda" else ():
        spec = context.family.spec(problem)
        for candidate in candidates:
            found: object = context.implementation(candidate.backend)
            if isinstance(found, CompilesWhenCalled) and found.compiles_when_called(spec, candidate.knobs):
                new = _EngineTask(implementation=found, calls=[])
                task = by_product.setdefault((candidate.backend, problem.shape_group), new)
                task.calls.append((spec, candidate.knobs))
    shared: dict[tuple[str, int], _EngineTask] = {}
    processes = compile_processes(context)
    for place, ((label, _), task) in enumerate(by_product.items()):
        same = shared.setdefault((label, place % processes), _EngineTask(implementation=task.implementation, calls=[]))
        same.calls.extend(task.calls)
    return list(shared.values())


def compile_entries(
    builds: Sequence[Build], entries: Mapping[Problem, Collection[Candidate]], rest_s: float, context: Context
) -> None:
    """Compile into the caches. What fails, or takes too long, fails again or compiles when it is launched.

    `rest_s`: how much longer the finals take than the step has said.
    """
    tasks = engine_tasks(entries, context)
    submitted = [context.pool.submit_task(_calls(task, context)) for task in tasks]
    futures: set[Future[int]] = {future for future in submitted if future is not None}
    for build in builds:
        context.pool.compile(build)
    work, processes = BuildsWork(builds), len(futures)
    began, expected_s = time.monotonic(), compile_seconds(max((len(task.calls) for task in tasks), default=0))
    total = len(builds) + processes
    context.events.emit("stage", "lineup", total=total, unit="compilations", rest_s=rest_s)
    with drain_on_interrupt(context.pool, lambda message: None):
        while work.left or (futures and time.monotonic() - began < _MOST_S):
            context.check()
            for message in context.pool.poll(POLL_S):
                if isinstance(message, BuildResult):
                    work.receive(message)
            futures -= _ended(futures, context)
            calls = compiled_share(time.monotonic() - began, expected_s, len(futures) / processes) if processes else 1.0
            done, share = total - work.left - len(futures), min(work.share, calls)
            context.events.emit("progress", done=done, total=total, share=share)


def _calls(task: _EngineTask, context: Context) -> CompileCalls:
    return CompileCalls(implementation=task.implementation, device=context.device, calls=task.calls)


def _ended(futures: Collection[Future[int]], context: Context) -> set[Future[int]]:
    """Those that have ended; a process that failed is a detail, as its calls compile in the finals."""
    ended = {future for future in futures if future.done()}
    for future in ended:
        if (error := future.exception()) is not None:
            context.events.emit("detail", f"lineup: an engine's kernels: {one_line(error)}")
    return ended
