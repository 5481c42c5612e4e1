"""The work of screening, for the display of progress: trials done and expected, and the share of the time spent.

Searches decide while they run, so the number of trials is an estimate, corrected by finished problems. Trials of large
products take longer, so the share of the trials is not that of the time. With an empty compile cache the builds
determine the time of screening, and later trials use builds of earlier ones: then the share of the builds is close to
that of the time, and the share of the trials is far below it.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from gemmpipe.core.data import Candidate, Device, Problem, median
from gemmpipe.family import Family, GemmSpec
from gemmpipe.search import Search
from gemmpipe.stages.finals_cost import cpu_setup_s
from gemmpipe.stages.finals_work import unsure_factor, usual_finals_s
from gemmpipe.stages.screen.state import ProblemState

_GPU_OPS = 4e10
_CPU_OPS = 2e6
"""Multiplications of a product, M * N * K, that take as long as the first launch of a trial: an H200 (2026-11: 0.3 ms
and 4e13/s, two launches), and a core of a server CPU (seven launches at 5e10/s)."""
_GPU_OVERHEAD_US, _CPU_OVERHEAD_US = 800.0, 20000.0
"""The overhead of a trial: loading, first launch, messages (H200, 2026-11). On a CPU, where trials run one by one, it
is measured as soon as possible (20 to 200 ms depending on load, 2 cores of a server CPU, 2026-11)."""
_CPU_START_S = 3.5
"""Seconds until a worker on a CPU is ready and has loaded the first library."""
_CPU_TRIALS, _CPU_TRIAL_S, _CPU_LAUNCH_OPS_PER_S, _CPU_WEIGHTS_PER_S = 4, 0.15, 2.5e10, 5e7
"""On a CPU, before any result: the trials of a problem, the seconds of one without its launches, and in a second the
multiplications of its launches, which count once, and the elements of a weight that is made and prepared (2 cores of a
server CPU, 2026-11)."""
_CPU_WEIGHT_ROWS = 32
"""Rows of a product on a CPU that take as long as reading or converting its weight."""
_BUILDS_PER_SQRT = 5.0
"""Builds of a run over the square root of its trials, before it is measured: problems share builds (4.5 to 8.9 at the
end of 11 runs, H100 and H200, 2026-11-25 and 26; 5 gives the best time left, as the first builds take longest)."""
_TRIALS_WEIGHT, _LAST_S = 0.6, 2.5
"""The time of the trials that are left, at their pace so far, counts by this beside that of the builds, as later trials
use builds of earlier ones; and the seconds of the searches' last steps, which wait for few builds each. Fitted with
`_BUILDS_PER_SQRT` to 38 runs (H100 and H200, 2026-11-25 and 26), of which 9 and 11 were not known to earlier fits."""
_SLOW_FIRST_S, _MIN_SLOW, _LEAST_OTHER = 0.5, 3, 0.2
"""Seconds of the first launches of a job from which on a library has compiled in one of them (they take milliseconds;
FlashInfer's 2.3 s for each product, H200, 2026-11-26), the number of such problems from which on they count, and
the least share of the time that is left for all else, as builds go on meanwhile."""
_UNSURE = 4.5
"""On a GPU the true time that is left is within a factor of 1 + this / sqrt(problems) at 9 of 10 moments of 48 runs
(H100 and H200, 2026-11-25 and 26): searches end when they find no better candidate, and few of them average less. No
function of the state of the searches that was tried predicts runs on which it was not fitted much better (a forest of
200 trees over 15 features, one run left out at a time: 86 % of the moments within 30 %, as against 81 %)."""
_LEAST_LEFT = 0.3  # of the expected time, that is left after the first result
_MEASURE_S = 0.2
_MIN_TIMED = 3  # results of a problem before their mean counts
_MIN_MEASURED = 3  # finished problems before their trials correct the expected number of the others


def relative_work(spec: GemmSpec, device: Device | None = None) -> float:
    """Relative time of one trial: a first launch and the others; without a device on a GPU."""
    if device is not None and device.kind == "cpu":
        return 1.0 + (spec.m + _CPU_WEIGHT_ROWS) * spec.weight_elements / _CPU_OPS
    return 1.0 + spec.m * spec.weight_elements / _GPU_OPS


@dataclass(frozen=True, kw_only=True, slots=True)
class ScreenWork:
    """The progress of screening at one moment."""

    done: int
    """Trials with a result."""
    expected: int
    """Trials in all, as estimated now."""
    share: float
    """The share of the work that is done, by time."""
    left_s: float | None = None
    """The seconds of the work that are left; None: as the share lets expect."""
    left_factor: float = 1.0
    """The factor by which they may be shorter or longer."""


class WorkEstimate:
    """Estimates the work of a batch's searches from what they have done so far."""

    def __init__(
        self,
        problems: Iterable[Problem],
        family: Family,
        search: Search,
        device: Device,
        keep: int,
        workers: int = 1,
        finalists: Callable[[ProblemState], Iterable[Candidate]] = lambda state: state.results,
    ) -> None:
        """`keep`: the number of finalists; `finalists`: those of a problem as it is now, on a CPU."""
        self._finalists = finalists
        self._search, self._keep = search, keep
        self._family, self._specs = family, [(p, family.spec(p)) for p in problems]
        specs = {p.id: spec for p, spec in self._specs}
        self._relative = {name: relative_work(spec, device) for name, spec in specs.items()}
        """By problem id, the time of one trial before any is timed."""
        self._finals = {name: (cpu_setup_s(family, spec), len(spec.x_scale_orders)) for name, spec in specs.items()}
        """By problem id, of its finals on a CPU: the seconds before they are timed, and in how many memory orders."""
        self._is_cpu = device.kind == "cpu"
        self._overhead_us = _CPU_OVERHEAD_US if self._is_cpu else _GPU_OVERHEAD_US
        self._began = time.monotonic()
        """The last moment without a build, or without a result where nothing is built: processes start before it."""
        self._measured_from = math.inf
        """The first moment."""
        self._first: tuple[float, int, float] | None = None
        """(time, results, microseconds of launches) from which the overhead of a trial counts, on a CPU."""
        self._begun = self._results = 0
        self._slow_first_s: dict[str, float] = {}
        """By problem id, the seconds of its jobs with slow first launches."""
        self._workers = workers
        self._due_at = 0.0

    def is_due(self) -> bool:
        """True if the last measurement is old enough: each one reads the state of every problem."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + _MEASURE_S
        return True

    def take_first_launches(self, problem: str, seconds: float) -> None:
        """Take the time of the first launches of a job."""
        if seconds > _SLOW_FIRST_S:
            self._slow_first_s[problem] = self._slow_first_s.get(problem, 0.0) + seconds

    def measure(
        self,
        states: Collection[ProblemState],
        *,
        searching: bool,
        built: int = 0,
        requested: int = 0,
        now: float | None = None,
    ) -> ScreenWork:
        """The work now; problems without a state are not listed yet. `searching` is False after the searches.

        `built` of the `requested` builds are done; on a CPU there is none. `now`: on the monotonic clock.
        """
        now = time.monotonic() if now is None else now
        self._measured_from = min(self._measured_from, now)
        if not built if requested else not any(state.result_count for state in states):
            self._began = now
        if self._is_cpu:
            self._measure_overhead(states, now)
        planned = {state.problem.id: self._planned(state) for state in states}
        finished = [state for state in states if state.finished]
        factor = self._correction(finished, planned)
        typical = median(planned.values()) * factor if planned else 1.0
        done = remaining = 0.0
        trials = expected = 0
        weights = self._weights(states)
        for state in states:
            weight, results = weights[state.problem.id], state.result_count
            left = float(state.pending)
            if searching and not state.finished:
                left = max(left, planned[state.problem.id] * factor - results)
            done += weight * results
            remaining += weight * left
            trials += results
            expected += results + round(left)
        known = {state.problem.id for state in states}
        unlisted = [weight for name, weight in weights.items() if name not in known]
        remaining += typical * sum(unlisted)
        expected += round(typical * len(unlisted))
        share = done / (done + remaining) if done + remaining else 0.0
        left_s, factor = self._left_on_cpu(states, remaining / 1e6, share, now) if self._is_cpu else (None, 1.0)
        if searching and requested:
            asked = sum(state.result_count + state.pending for state in states)
            builds = min(1.0, built / _expected_builds(requested, asked, expected))
            left_s = self._left_s(share, builds, sum(state.result_count > 0 for state in states), now)
            share = 0.0 if left_s is None else (now - self._began) / (now - self._began + left_s)
            factor = 1 + _UNSURE / math.sqrt(len(self._relative))
        return ScreenWork(done=trials, expected=expected, share=share, left_s=left_s, left_factor=factor)

    def trials_left(self, state: ProblemState) -> int:
        """Trials that a search still requests if it does not end early."""
        return max(state.pending, 0 if state.finished else self._planned(state) - state.result_count)

    def least_trial_s(self, problem: Problem, pace_s: float) -> float:
        """Seconds of a launch of a problem at the best pace of others (`pace_s`)."""
        return pace_s * self._relative[problem.id]

    def pace_s(self, states: Collection[ProblemState]) -> float:
        """The best pace so far: seconds of the fastest launch of a problem over its relative work; infinite before any.

        The best, since small products take the time of overhead, and slow candidates do not predict others.
        """
        return min((s.least_us / 1e6 / self._relative[s.problem.id] for s in states), default=math.inf)

    def finals_s(self, states: Collection[ProblemState]) -> float:
        """The expected seconds of the problems' finals on a CPU; problems without a time count at the best pace.

        Before any time, as their products let expect.
        """
        times_us, names = {s.problem.id: self._finalists_us(s) for s in states if s.times_us}, self._finals
        pace_us = 1e6 * self.pace_s(states)
        if math.isinf(pace_us):
            per_us = 1e6 / _CPU_LAUNCH_OPS_PER_S
            others = {p.id: [per_us * self._family.flops(spec) / 2] * 2 for p, spec in self._specs}
        else:
            others = {name: [pace_us * work] * 2 for name, work in self._relative.items()}
        known = {name: times_us.get(name, others.get(name, ())) for name in self._finals}
        return sum(usual_finals_s(known[name], *names[name]) for name in names)

    def screened_finals_s(self, states: Collection[ProblemState]) -> float:
        """The expected seconds of the finals on a CPU of the problems with a time."""
        return sum(usual_finals_s(self._finalists_us(s), *self._finals[s.problem.id]) for s in states if s.times_us)

    def _finalists_us(self, state: ProblemState) -> list[float]:
        times_us = (state.results[c].time_us for c in self._finalists(state))
        return [us for us in times_us if us is not None]

    @property
    def expected_s(self) -> float:
        """The expected seconds of screening on a CPU before any result, from the products alone; 0 on a GPU."""
        if not self._is_cpu:
            return 0.0
        weights = {problem.shape_group: spec.weight_elements for problem, spec in self._specs}
        launches_s = sum(self._family.flops(spec) / 2 for _, spec in self._specs) / _CPU_LAUNCH_OPS_PER_S
        trials_s = _CPU_TRIALS * (len(self._specs) * _CPU_TRIAL_S + launches_s)
        return _CPU_START_S + sum(weights.values()) / _CPU_WEIGHTS_PER_S + trials_s

    def _left_s(self, share: float, builds: float, begun: int, now: float) -> float | None:
        """The seconds that are left, from the share of the trials' work and that of the builds; None before any build.

        `begun`: problems with a result. Slow first launches are no pace of other work: they are expected for the
        problems without a result as often as for the others, but for the slowest, in which libraries start.
        """
        spent_s = now - self._began
        if spent_s <= 0 or not builds:
            return None
        if share >= 1:
            return 0.0
        slow_s = sum(self._slow_first_s.values()) / self._workers
        again_s = slow_s - max(self._slow_first_s.values(), default=0.0) / self._workers
        if len(self._slow_first_s) < _MIN_SLOW:
            slow_s = again_s = 0.0
        pace_s = max(_LEAST_OTHER * spent_s, spent_s - slow_s)
        left_s = pace_s * ((1 - builds) / builds + _TRIALS_WEIGHT * (1 - share)) + _LAST_S
        return left_s + again_s / max(1, begun - 1) * (len(self._relative) - begun)

    def _left_on_cpu(
        self, states: Collection[ProblemState], measured_s: float, share: float, now: float
    ) -> tuple[float | None, float]:
        """The seconds that are left, and the factor by which they may be shorter or longer.

        Before a problem has times, what the products let expect: the first result comes after much of it.
        """
        if any(state.timed_count >= _MIN_TIMED for state in states):
            return measured_s, unsure_factor(len(self._specs))
        left_s = max(self.expected_s - (now - self._measured_from), _LEAST_LEFT * self.expected_s)
        return left_s if share else None, unsure_factor(1)

    def _measure_overhead(self, states: Collection[ProblemState], now: float) -> None:
        """Update the overhead per trial with new results: the time without launches, as one trial runs at a time.

        It counts from the first results of the second problem on, as the worker loads each library with the first one;
        until then from the first results, beside a usual overhead.
        """
        results, launches_us = sum(s.result_count for s in states), sum(s.timed_us for s in states)
        if results == self._results:
            return
        self._results = results
        begun = min(2, sum(s.result_count > 0 for s in states))
        if begun > self._begun:
            self._begun, self._first = begun, (now, results, launches_us)
        assert self._first is not None
        first, results_before, us_before = self._first
        if results - results_before >= _MIN_TIMED:
            spent_us = 1e6 * (now - first) - (launches_us - us_before)
            overhead_us = max(1.0, spent_us) / (results - results_before)
            # The first problem's trials wait for libraries that load, more or less than a usual overhead.
            self._overhead_us = overhead_us if begun > 1 else math.sqrt(1e6 * _CPU_TRIAL_S * overhead_us)

    def _weights(self, states: Collection[ProblemState]) -> dict[str, float]:
        """By problem id, the mean time of its trials; where none is timed yet, in proportion to the others."""
        measured = {
            state.problem.id: self._overhead_us + state.timed_us / state.timed_count
            for state in states
            if state.timed_count >= _MIN_TIMED
        }
        relative = sum(self._relative[name] for name in measured)
        if self._is_cpu and measured:  # there the overhead is the larger part of a small product's trials
            launches = sum(measured.values()) - len(measured) * self._overhead_us
            scale = launches / (relative - len(measured))
            return {n: measured.get(n, self._overhead_us + scale * (w - 1)) for n, w in self._relative.items()}
        scale = sum(measured.values()) / relative if relative else 1.0
        return {name: measured.get(name, scale * weight) for name, weight in self._relative.items()}

    def _planned(self, state: ProblemState) -> int:
        """Trials of a problem if its search does not end early; results of earlier runs take no time."""
        planned = self._search.expected_trials(len(state.summary.ids), self._keep)
        budget = self._search.budget_trials
        return planned if budget is None else min(planned, budget)

    def _correction(self, finished: Collection[ProblemState], planned: dict[str, int]) -> float:
        """Actual over planned trials of unfinished problems: of finished ones, for all that are not as planned.

        Those that finish first have the fewest trials.
        """
        total = sum(planned[state.problem.id] for state in finished)
        if len(finished) < _MIN_MEASURED or not total:
            return 1.0
        part = len(finished) / len(self._relative)
        return part * sum(state.result_count for state in finished) / total + 1 - part


def _expected_builds(requested: int, asked: int, trials: int) -> float:
    """The builds of all expected trials, from those that `asked` trials have requested.

    The more trials, the more of them share builds: builds grow with the root of the trials.
    """
    usual = _BUILDS_PER_SQRT * math.sqrt(trials)
    own = requested * math.sqrt(trials / asked) if asked else usual
    known = min(1.0, asked / trials) if trials else 1.0
    return max(1.0, requested, min(trials, known * own + (1 - known) * usual))
