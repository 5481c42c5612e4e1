"""The expected seconds of finals from the times of their finalists, for the estimate of a run's end."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from gemmpipe.bench.finals import FULL_CLOCK_ROUNDS, NEAR_LOADS, OTHER_LOADS, PAUSE_RATIO, SUSTAINED_ROUNDS
from gemmpipe.bench.jobs import LONG_LAUNCH_US
from gemmpipe.bench.setup import routing_draws
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Device, Problem, median
from gemmpipe.family import Family, GemmSpec

if TYPE_CHECKING:
    import pandas as pd

# Fitted to 850 finals of 18 runs (H100, 2026-11-25): of the measured time they give 0.8 to 1.25 where it is more than
# 5 s, and up to 1.6 below. A comparison whose libraries compile in its finals takes three times as long.
_CHECK_S, _CHECK_EXPERTS_S = 0.0023, 0.012
"""Seconds of a finalist's check and the capture of its graph, for each memory order."""
_ENTRY_S = 0.01
"""Seconds of the first launch of an entry of a comparison, for each memory order, beyond that of a finalist that was
screened: 0.006 and 0.013 in two comparisons of 56 and 112 products (H100 and H200, 2026-11)."""
_SETUP_S, _FLOPS_PER_S, _FLOPS_PER_S_EXPERTS = 0.03, 1.4e12, 5e12
"""Operands and the fp32 reference of a problem: seconds, and its operations over those that they take."""
_SHARE_OF_ROUNDS, _SHARE_OF_ALL_ROUNDS = 0.82, 0.7
"""Rounds of the finalists over those of the fastest, as others are eliminated: of races that end when they are decided,
and of those with all rounds."""
_DECIDED_ROUNDS = 11  # of a race that ends so
_SLOWEST = 1.3  # a present configuration of an engine over the fastest
_SPACER_US = 3.2  # a small kernel before each launch
_SAMPLE_US, _MOST_LAUNCHES = 500.0, 64
_CACHE_MULTIPLE, _MOST_SETS = 3, 32
_CALL_S, _SHARE_OF_CALLS, _SET_BYTES_PER_S = 0.043, 0.88, 3.4e11
"""Of a row that verify times through the runtime's function: seconds of its check and graphs for each memory order, the
time of its rounds over that of all launches, and the bytes of a set of operands over the seconds that it takes. Fitted
to 599 rows of six runs (H100 and H200, 2026-11-25 and 26): of each run's time they give 0.84 to 1.02 with the constants
of the others."""
_FIRST_US, _BYTES_PER_S, _OPS_PER_S = 5.0, 2e12, 4e14
"""The time of a launch of which nothing is known but its product, as a usual path of a library takes it."""

_MIN_SAMPLE_US, _USUAL_ROUNDS, _CALL_LAUNCHES = 500.0, 8, 5
"""On a CPU: the shortest sample, the usual number of rounds, and the launches of a call that is checked and prepared.
"""
_CPU_FINALIST_S, _CPU_CHECK_LAUNCHES, _CPU_LAUNCH = 0.01, 7, 0.9
"""On a CPU: the seconds of a finalist without its launches, those before its rounds, and the factor on the time that
screening found. A candidate of 20 ms and more (`LONG_LAUNCH_US`) is launched once before them: its first round."""
_CPU_SETUP_S, _CPU_WEIGHTS_PER_S, _CPU_WEIGHTS_PER_S_EXPERTS, _CPU_REFERENCE_PER_S = 0.03, 1.37e8, 6e8, 8e10
_CPU_PER_S = 1e10
"""On a CPU: the seconds of a problem's reference, and in a second the elements of a weight that it converts, those of
experts, of which it converts some, its multiplications, and those of a usual candidate. Operands are there from the
screening. Fitted to the finals of 60 problems in nine runs (2 cores of a server CPU, another process on one of them at
times, 2026-11-26): eight of ten problems take 0.55 to 1.8 of the sum, all of a run 0.6 to 1.6."""
_CPU_WEIGHT_ROWS = 32  # rows of a product that take as long as reading its weight


def cpu_setup_s(family: Family, spec: GemmSpec) -> float:
    """The seconds of a problem's operands and reference on a CPU."""
    per_s = _CPU_WEIGHTS_PER_S if spec.experts is None else _CPU_WEIGHTS_PER_S_EXPERTS
    return _CPU_SETUP_S + spec.weight_elements / per_s + family.flops(spec) / 2 / _CPU_REFERENCE_PER_S


def cpu_finalist_s(time_us: float, timer: Timer, orders: int, *, all_rounds: bool = False) -> float:
    """The seconds of a finalist on a CPU: its check, and the rounds in each memory order."""
    sample_us = max(time_us, _MIN_SAMPLE_US)
    rounds = timer.rounds_for(orders * sample_us, 1)
    rounds = rounds if all_rounds else min(rounds, _USUAL_ROUNDS)
    before = 1 if time_us >= LONG_LAUNCH_US else _CPU_CHECK_LAUNCHES
    rounds -= before == 1
    return _CPU_FINALIST_S + orders * _CPU_LAUNCH * (before * time_us + _SHARE_OF_ROUNDS * rounds * sample_us) / 1e6


@dataclass(frozen=True, kw_only=True)
class FinalsCost:
    """The expected time of the finals of one problem."""

    family: Family
    spec: GemmSpec
    timer: Timer
    device: Device
    all_rounds: bool = False
    """True if some finalists run all rounds: an engine's present configuration, the entries of a comparison."""

    @cached_property
    def _on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @cached_property
    def _sustained_ms(self) -> float:
        return 0.0 if self._on_cpu else self.timer.sustained_ms_of(self.family, self.spec)

    @property
    def _loads(self) -> float:
        """Untimed replays after each timed one at sustained clocks: about half the entries of a comparison are slow."""
        return (NEAR_LOADS + OTHER_LOADS) / 2 if self.all_rounds else NEAR_LOADS

    @cached_property
    def typical_us(self) -> float:
        """The time of a launch of a usual candidate, from the product alone."""
        if self._on_cpu:
            return 1e6 * (self.spec.m + _CPU_WEIGHT_ROWS) * self.spec.weight_elements / _CPU_PER_S
        memory_s = self.family.bytes_moved(self.spec) / _BYTES_PER_S
        return _FIRST_US + 1e6 * max(memory_s, self.family.flops(self.spec) / _OPS_PER_S)

    @cached_property
    def setup_s(self) -> float:
        """The seconds of the operands and the reference, and of the launches before the rounds."""
        if self._on_cpu:
            return cpu_setup_s(self.family, self.spec)
        rate = _FLOPS_PER_S if self.spec.experts is None else _FLOPS_PER_S_EXPERTS
        return _SETUP_S + self.family.flops(self.spec) / rate + (1 + NEAR_LOADS) * self._sustained_ms / 1e3

    @cached_property
    def _sets(self) -> int:
        """Sets of operands, as the finals make them."""
        cached = _CACHE_MULTIPLE * self.device.cache_bytes / max(1.0, self.family.bytes_moved(self.spec))
        least = 2 if self.spec.experts is None else routing_draws(self.family, self.spec)
        return max(least, min(_MOST_SETS, math.ceil(cached)))

    def _launches_per_sample(self, us: float) -> int:
        """Whole turns through the sets of operands."""
        wanted = min(_MOST_LAUNCHES, max(self._sets, int(_SAMPLE_US / max(us, 1.0)) + 1))
        return -(-wanted // self._sets) * self._sets

    def finalist_s(self, time_us: float | None) -> float:
        """The seconds of a finalist whose launch takes so long; None: as long as usual for the product."""
        us = self.typical_us if time_us is None else time_us
        if self._on_cpu:
            return cpu_finalist_s(us, self.timer, len(self.spec.x_scale_orders), all_rounds=self.all_rounds)
        per_sample = self._launches_per_sample(us)
        # All that race to the end have as many rounds as the slowest of them affords.
        rounds = self.timer.rounds_for(us * (_SLOWEST if self.all_rounds else 1.0), per_sample)
        before = min(FULL_CLOCK_ROUNDS, rounds) * (1 + PAUSE_RATIO) if self._sustained_ms else 0.0
        if not self.all_rounds:
            rounds = min(rounds, _DECIDED_ROUNDS)
        if self._sustained_ms:
            rounds = math.ceil(min(rounds, SUSTAINED_ROUNDS) * (1 + self._loads))
        check_s = _CHECK_S if self.spec.experts is None else _CHECK_EXPERTS_S
        share = _SHARE_OF_ALL_ROUNDS if self.all_rounds else _SHARE_OF_ROUNDS
        timed_s = (rounds + before) * per_sample * (share * us + _SPACER_US) / 1e6
        return len(self.spec.x_scale_orders) * (check_s + timed_s)

    def entry_s(self, time_us: float | None) -> float:
        """The seconds of an entry of a comparison, which no screening has loaded."""
        first_s = 0.0 if self._on_cpu else len(self.spec.x_scale_orders) * _ENTRY_S
        return first_s + self.finalist_s(time_us)

    def call_s(self, time_us: float | None) -> float:
        """The seconds of a row that verify times: its launch and calls of the runtime's function, in turns."""
        us = self.typical_us if time_us is None else time_us
        if self._on_cpu:
            sample_us = max(us, _MIN_SAMPLE_US)
            launches = 2 * self.timer.rounds_for(sample_us, 1) + _CALL_LAUNCHES
            return self.setup_s + len(self.spec.x_scale_orders) * launches * sample_us / 1e6
        per_sample = self._launches_per_sample(us)
        timed_s = 2 * self.timer.rounds_for(us, per_sample) * per_sample * us / 1e6
        sets_s = self._sets * self.family.bytes_moved(self.spec) / _SET_BYTES_PER_S
        return sets_s + len(self.spec.x_scale_orders) * (_CALL_S + _SHARE_OF_CALLS * timed_s)


@dataclass(frozen=True, kw_only=True)
class ExpectedFinal:
    """A problem of finals that follow a screening."""

    screened: str
    """The id of the screened problem with the nearest time."""
    finalists: int
    cost: FinalsCost


def expected_s(finals: Iterable[ExpectedFinal], fastest_us: Mapping[str, float], usual_s: float) -> float:
    """The seconds of these finals; `fastest_us`: by screened problem, the time of its fastest candidate so far.

    Finals of problems without a time take as long as the others; where none has one, `usual_s` each. An infinite time
    is that of a problem without a candidate.
    """
    known: list[float] = []
    unknown = 0
    for final in finals:
        us = fastest_us.get(final.screened)
        if us is None:
            unknown += 1
        elif us < math.inf:
            known.append(final.cost.setup_s + final.finalists * final.cost.finalist_s(us))
    mean_s = sum(known) / len(known) if known else usual_s
    return sum(known) + unknown * mean_s


def expected_times_us(tables: "Mapping[str, pd.DataFrame]", problems: Sequence[Problem]) -> dict[str, float]:
    """By problem id, the expected time of finalists that screening has not timed.

    That of the tuned table's row which is verified (the longest of several), or between the fastest candidates of
    screening at the next smaller and larger M of the same product.
    """
    return {**_neighbours_us(tables, problems), **_recorded_us(tables)}


def _recorded_us(tables: "Mapping[str, pd.DataFrame]") -> dict[str, float]:
    found: dict[str, float] = {}
    if "selections" in tables and "us" in tables["selections"]:
        for problem, us in zip(tables["selections"]["problem"], tables["selections"]["us"], strict=True):
            if isinstance(us, int | float) and us == us:
                found[str(problem)] = max(float(us), found.get(str(problem), 0.0))
    return found


def _neighbours_us(tables: "Mapping[str, pd.DataFrame]", problems: Sequence[Problem]) -> dict[str, float]:
    if "trials" not in tables:
        return {}
    timed = tables["trials"][tables["trials"]["us"].notna()]
    fastest = {str(name): float(us) for name, us in timed.groupby("problem")["us"].min().items()}
    by_product: dict[object, list[tuple[int, float]]] = {}
    for problem in problems:
        if problem.id in fastest:
            by_product.setdefault(problem.shape_group, []).append((problem.rows, fastest[problem.id]))
    return {p.id: between_us(by_product[p.shape_group], p.rows) for p in problems if p.shape_group in by_product}


def between_us(known: Sequence[tuple[int, float]], m: int) -> float:
    """The time at M = `m` from (M, time) of others: between the two nearest in log M, outside of them the nearest."""
    below = max((each for each in known if each[0] <= m), default=None)
    above = min((each for each in known if each[0] >= m), default=None)
    if below is None or above is None or below[0] == above[0]:
        return (below or above or (m, median([us for _, us in known])))[1]
    part = math.log(m / below[0]) / math.log(above[0] / below[0])
    return below[1] * math.exp(part * math.log(above[1] / below[1]))
