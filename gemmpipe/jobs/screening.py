"""Few launches of many candidates."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.family import Launch
from gemmpipe.jobs import LONG_US, SETTING_UP, TOGETHER, Job, Tools, count, launch_once, rounded
from gemmpipe.search import Request
from gemmpipe.timer import Timer
from gemmpipe.workbench import Setup

_HOPELESS = 2.0  # times the fastest of the job: its exact time is nobody's business


@dataclass(frozen=True, kw_only=True)
class ScreenJob(Job):
    """Few launches of many candidates, interleaved. Nothing is checked: bench does that to those who stay."""

    stage: str
    problem: Problem
    requests: tuple[Request, ...]
    timer: Timer

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(r.candidate for r in self.requests)

    def without(self, done: Collection[Candidate]) -> "ScreenJob":
        return replace(self, requests=tuple(r for r in self.requests if r.candidate not in done))

    def run(self, tools: Tools) -> list[Trial]:
        trials: list[Trial] = []
        with tools.spending("operands"):
            tools.flight.begin(SETTING_UP)
            setup = tools.bench.set_up(self.problem)
            for index in range(min(setup.sets, len(self.requests) + max(r.launches for r in self.requests))):
                setup.inputs(index), setup.weights(index), setup.out(index)
            tools.clock.synchronize()
        with tools.spending("first_launch"):
            ready = self._first_launches(tools, setup, trials)
        with tools.spending("screening"):
            tools.flight.begin(TOGETHER if len(self.requests) > 1 else 0)
            trials += self._time(tools, setup, ready)
        return trials

    def _first_launches(self, tools: Tools, setup: Setup, trials: list[Trial]) -> "list[_Ready]":
        attempts = (
            self.attempt(tools, trials, position, partial(self._first_launch, tools, setup, position))
            for position in range(len(self.requests))
        )
        return [ready for ready in attempts if ready is not None]

    def _first_launch(self, tools: Tools, setup: Setup, position: int, candidate: Candidate) -> "_Ready":
        request = self.requests[position]
        launch, first_us = launch_once(tools, setup, position, candidate)
        bound = [setup.bind(candidate, position + i) for i in range(1, min(request.launches, setup.sets))]
        extra = setup.prepared(candidate, position % setup.sets).extra_bytes
        return _Ready(
            request=request, position=position, launches=[launch, *bound], first_us=first_us, extra_bytes=extra
        )

    def _time(self, tools: Tools, setup: Setup, ready: "list[_Ready]") -> list[Trial]:
        samples: dict[int, list[float]] = {i: [] for i in range(len(ready))}
        self._warm_up(tools, setup, ready)
        self._put_together(tools, setup, ready)
        order: list[tuple[int, list[Launch]]] = []
        for turn in range(max((item.samples for item in ready), default=0)):
            for i, item in enumerate(ready):
                if item.first_us > LONG_US and tools.bench.device.kind == "cpu":
                    samples[i] = [item.first_us]
                elif turn < item.samples:
                    order.append((i, item.block(turn)))
        for (i, _), time_us in zip(order, tools.clock.blocks([block for _, block in order]), strict=True):
            samples[i].append(time_us)
        for i, item in enumerate(ready):
            count(tools, setup, item.request.candidate, len(samples[i]) * item.together)
        return [self._trial(item, samples[i]) for i, item in enumerate(ready)]

    def _put_together(self, tools: Tools, setup: Setup, ready: "list[_Ready]") -> None:
        """Give the short ones blocks of launches for samples: alone, a launch is timed with its start and its end.

        Finals replay launches back to back, where a kernel can hide both behind its neighbours. Alone, all kernels of
        5 us take 9 (8192x1024, M <= 64, on an H200, 2026-11-21: what won the finals was ranked 1st to 24th by single
        launches, 1st to 9th by blocks). All blocks are of one length, whose share of start and end is the same.
        """
        short = [item for item in ready if item.first_us <= LONG_US]
        if not self.timer.block_us or not short or not tools.clock.overlaps:
            return
        times = tools.clock.sequence([item.launches[0] for item in short])
        together = self.timer.together(min(times))
        for item, time_us in zip(short, times, strict=True):
            count(tools, setup, item.request.candidate, 1)
            if together > 1 and time_us <= _HOPELESS * min(times):
                item.together = together
                # Far apart, so that a block finds nothing in the cache that the one before it left there.
                step = max(1, setup.sets // item.together)
                places = (item.position + step * i for i in range(1, min(item.together, setup.sets)))
                with tools.spending("load"):
                    item.launches[1:] = [setup.bind(item.request.candidate, place) for place in places]

    def _warm_up(self, tools: Tools, setup: Setup, ready: "list[_Ready]") -> None:
        """Launches that do not count, for those whose request is more than a glance."""
        for item in ready:
            had = tools.bench.launched.get((setup.problem.id, item.request.candidate.id), 0)
            if not item.request.glance and item.request.launches >= self.timer.iters and item.first_us <= LONG_US:
                for turn in range(max(0, self.timer.warmup - had)):
                    item.launches[turn % len(item.launches)]()
                    count(tools, setup, item.request.candidate, 1)

    def _trial(self, item: "_Ready", samples: list[float]) -> Trial:
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=item.request.candidate,
            status=Status.OK,
            launches=max(item.request.launches, len(samples) * item.together),
            samples_us=rounded(samples),
            extra_weight_bytes=item.extra_bytes,
        )


@dataclass
class _Ready:
    request: Request
    position: int
    launches: list[Launch]
    """Each on an operand set of its own, the first on set `position`."""
    first_us: float
    extra_bytes: int
    together: int = 1
    """How many launches one sample takes."""

    @property
    def samples(self) -> int:
        """No fewer launches than asked for, and two samples where there is more than one."""
        return min(self.request.launches, max(2, -(-self.request.launches // self.together)))

    def block(self, turn: int) -> list[Launch]:
        """The launches of one sample."""
        first = turn * self.together
        return [self.launches[i % len(self.launches)] for i in range(first, first + self.together)]
