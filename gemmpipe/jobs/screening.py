"""Few launches of many candidates."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.family import Launch
from gemmpipe.jobs import LONG_US, SETTING_UP, TOGETHER, Bind, Job, Tools, count, launch_once, rounded
from gemmpipe.search import Request
from gemmpipe.timer import Timer
from gemmpipe.workbench import Setup

_HOPELESS = 2.0  # times the fastest of the problem: its exact time is nobody's business
_BEHIND = 1.5  # times the pace after one launch: a glance at it is over (H200, 2026-11: of 800 winners none was 1.3)
_PACE = 4  # th fastest: nothing is checked yet, and a kernel that computes nothing is the fastest; or a library's
_APART = 1.5  # times one another: samples that something came in between (H200: one of 2 ms cost a problem its choice)
_TOO_FAR = 4.0  # times the pace: few are that slow, so that another launch says whether this one was disturbed
_ALONE = 0.5  # of the time of a launch alone may be its start and its end, which others hide back to back


@dataclass(frozen=True, kw_only=True)
class ScreenJob(Job):
    """Few launches of many candidates, interleaved. Nothing is checked: bench does that to those who stay.

    `library` are the labels of library paths, whose times are believed as they are.
    """

    stage: str
    problem: Problem
    requests: tuple[Request, ...]
    timer: Timer
    library: frozenset[str] = frozenset()

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
        known_us = self._seen(tools).get(candidate.id)
        if known_us is None:
            bind, launch, first_us = launch_once(tools, setup, position, candidate)
        else:  # it ran in this worker before
            with tools.spending("load"):
                bind = setup.binder(candidate)
                launch, first_us = bind(position), known_us
        return _Ready(
            request=self.requests[position],
            position=position,
            bind=bind,
            launches=[launch],
            first_us=first_us,
            extra_bytes=setup.prepared(candidate, position % setup.sets).extra_bytes,
        )

    def _seen(self, tools: Tools) -> dict[str, float]:
        """By candidate id, what a launch alone took in this worker."""
        return tools.bench.once_us.setdefault(self.problem.id, {})

    def _time(self, tools: Tools, setup: Setup, ready: "list[_Ready]") -> list[Trial]:
        self._look_once(tools, setup, ready)
        staying = [item for item in ready if not item.samples_us]
        self._bind(tools, setup, staying)
        self._warm_up(tools, setup, staying)
        order: list[tuple[_Ready, list[Launch]]] = []
        for turn in range(max((item.samples for item in staying), default=0)):
            for item in staying:
                if item.first_us > LONG_US and tools.bench.device.kind == "cpu":
                    item.samples_us = [item.first_us]
                elif turn < item.samples:
                    order.append((item, item.block(turn)))
        self._sample(tools, order)
        apart = [item for item in staying if item.samples > 1 and max(item.samples_us) > _APART * min(item.samples_us)]
        self._sample(tools, [(item, item.block(item.samples)) for item in apart])
        for item in staying:
            count(tools, setup, item.request.candidate, len(item.samples_us) * item.together)
        return [self._trial(item) for item in ready]

    def _sample(self, tools: Tools, order: "list[tuple[_Ready, list[Launch]]]") -> None:
        """A sample of each block for its item."""
        least_us = _ALONE * min(self._seen(tools).values(), default=0.0)
        for (item, _), time_us in zip(order, tools.clock.blocks([b for _, b in order], least_us), strict=True):
            item.samples_us.append(time_us)

    def _look_once(self, tools: Tools, setup: Setup, ready: "list[_Ready]") -> None:
        """Launch each once that was not seen before; with who is far behind that was all."""
        seen = self._seen(tools)
        short = [item for item in ready if item.first_us <= LONG_US]
        if not tools.clock.overlaps or not short:
            return
        new = [item for item in short if item.request.candidate.id not in seen]
        self._launch_once_each(tools, new)
        for item in short:
            item.once_us = seen[item.request.candidate.id]
        far_us = _TOO_FAR * self._pace_us(tools, short)
        self._launch_once_each(tools, [item for item in new if seen[item.request.candidate.id] > far_us])
        pace_us = self._pace_us(tools, short)
        for item in new:
            count(tools, setup, item.request.candidate, 1)
            if item.request.glance and seen[item.request.candidate.id] > _BEHIND * pace_us:
                item.samples_us, item.behind = [seen[item.request.candidate.id]], True

    def _launch_once_each(self, tools: Tools, items: "list[_Ready]") -> None:
        """Note what a launch of each takes, the least of those seen."""
        seen = self._seen(tools)
        times = tools.clock.sequence([i.launches[0] for i in items], _ALONE * min(seen.values(), default=0.0))
        for item, time_us in zip(items, times, strict=True):
            item.once_us = min(time_us, seen.get(item.request.candidate.id, math.inf))
            seen[item.request.candidate.id] = item.once_us

    def _pace_us(self, tools: Tools, new: "list[_Ready]") -> float:
        """What can be reached, going by all that was seen so far: the fourth fastest, or a library without a copy."""
        seen, paces = sorted(self._seen(tools).values()), tools.bench.library_us
        believed = [i for i in new if i.request.candidate.backend in self.library and not i.extra_bytes]
        times = [item.once_us for item in believed if item.once_us is not None]
        paces[self.problem.id] = min([paces.get(self.problem.id, math.inf), *times])
        return min(paces[self.problem.id], seen[_PACE - 1] if len(seen) >= _PACE else math.inf)

    def _bind(self, tools: Tools, setup: Setup, staying: "list[_Ready]") -> None:
        """Decide how often each is launched, and make the launches; the short ones in blocks.

        Finals replay launches back to back, where a kernel can hide its start and its end behind its neighbours.
        Alone, all kernels of 5 us take 9 (8192x1024, M <= 64, on an H200, 2026-11-21: what won the finals was ranked
        1st to 24th by single launches, 1st to 9th by blocks). All blocks of a problem are of one length, whose share
        of start and end is the same.
        """
        fastest_us = min(self._seen(tools).values(), default=0.0)
        for item in staying:
            if item.once_us is not None:
                if item.once_us <= _HOPELESS * fastest_us:
                    item.together = self.timer.together(fastest_us)
                item.most = max(3, int(self.timer.budget_ms * 1000 / (item.once_us * item.together)))
            # Far apart, so that a block finds nothing in the cache that the one before it left there.
            step = max(1, setup.sets // item.together) if item.together > 1 else 1
            number = min(item.together if item.together > 1 else item.samples, setup.sets)
            places = (item.position + step * i for i in range(1, number))
            with tools.spending("load"):
                item.launches[1:] = map(item.bind, places)

    def _warm_up(self, tools: Tools, setup: Setup, ready: "list[_Ready]") -> None:
        """Launches that do not count, for those whose request is more than a glance."""
        for item in ready:
            had = tools.bench.launched.get((setup.problem.id, item.request.candidate.id), 0)
            if not item.request.glance and item.request.launches >= self.timer.iters and item.first_us <= LONG_US:
                for turn in range(max(0, self.timer.warmup - had)):
                    item.launches[turn % len(item.launches)]()
                    count(tools, setup, item.request.candidate, 1)

    def _trial(self, item: "_Ready") -> Trial:
        return Trial(
            stage=self.stage,
            problem=self.problem.id,
            candidate=item.request.candidate,
            status=Status.DROPPED if item.behind else Status.OK,
            launches=len(item.samples_us) * item.together,
            asked=item.request.launches,
            samples_us=rounded(item.samples_us),
            extra_weight_bytes=item.extra_bytes,
        )


@dataclass
class _Ready:
    request: Request
    position: int
    bind: Bind
    launches: list[Launch]
    """Each on an operand set of its own, the first on set `position`."""
    first_us: float
    extra_bytes: int
    once_us: float | None = None
    """What a launch alone took by the device's clock, where that was asked."""
    together: int = 1
    """How many launches one sample takes."""
    most: int | None = None
    """Samples that the timer affords."""
    behind: bool = False
    samples_us: list[float] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """For as many launches as asked for, but two samples where there is more than one; no more than affordable."""
        wanted = min(self.request.launches, max(2, -(-self.request.launches // self.together)))
        return wanted if self.most is None else min(wanted, self.most)

    def block(self, turn: int) -> list[Launch]:
        """The launches of one sample."""
        first = turn * self.together
        return [self.launches[i % len(self.launches)] for i in range(first, first + self.together)]
