"""Simulates searches on recorded spaces: results and their cost in seconds come from the record, not from a GPU.

`score` is Kernel Tuner's score of a search: 0 for random search, 1 for the optimum at once (Willemsen et al., FGCS
2024). `ReplaySearch` is the option search=replay.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gemmpipe.core.data import SCREENING, Candidate, Problem, Status, Trial, median
from gemmpipe.core.errors import UserError, check_at_least
from gemmpipe.core.files import named_files
from gemmpipe.family import GemmSpec
from gemmpipe.search import Search, SearchProblem, SearchSession, TrialRequest
from gemmpipe.search.features import Array
from gemmpipe.search.history import History
from gemmpipe.search.recorded import Outcome, RecordedSpace, read

SCREEN_LAUNCHES = 2  # the screen timer's `iters`: launches of a search that times all candidates alike
_CUTOFF = 0.95  # of the way from the median to the optimum: the score ends when random search is expected there
_POINTS = 50
NEAR_BEST = 1.01
"""A choice within this ratio of the fastest recorded candidate is near it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePoint:
    """State after a result: its time, the number of timed candidates, and the fastest candidate so far."""

    at_s: float
    evaluations: int
    best: Candidate | None


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedRun:
    """A complete simulated search on one problem."""

    problem: Problem
    trace: Sequence[TracePoint]
    chosen: Candidate | None
    """The winner of the finals among the best candidates of the search."""
    evaluations: int
    """Candidates timed, failures included."""
    finals_us: Mapping[Candidate, tuple[float, ...]] = field(default_factory=dict)
    """Samples of the finals, one per round."""


class SimulatedBench:
    """A machine simulated from one problem's record: compile slots, and a device that times one candidate at a time."""

    def __init__(self, recording: RecordedSpace, problem: Problem, slots: int, rng: random.Random) -> None:
        self._recording = recording
        self._outcomes = recording.problems[problem]
        self._problem = problem
        self._slots = slots
        self._rng = rng
        self._seen: set[Candidate] = set()
        self._built: set[str] = set()
        self.at_s = 0.0
        self.observe: Callable[[Trial], None] | None = None

    @property
    def evaluations(self) -> int:
        return len(self._seen)

    def evaluate(self, request: TrialRequest) -> Trial:
        """Compile missing builds and run; the clock advances by the recorded times."""
        builds = set(self._outcomes[request.candidate].builds) - self._built
        self._built |= builds
        # The slots are shared with other problems' builds: a build costs its share of them.
        self.at_s += sum(self._recording.facts[b].compile_s for b in builds) / self._slots
        trial = self._run(request)
        if self.observe is not None:
            self.observe(trial)
        return trial

    def _run(self, request: TrialRequest) -> Trial:
        outcome = self._outcomes[request.candidate]
        if request.candidate not in self._seen:
            self._seen.add(request.candidate)
            self.at_s += self._recording.first_launch_s
        samples = tuple(self._rng.choices(outcome.samples_us, k=request.launches)) if outcome.samples_us else ()
        self.at_s += sum(samples) / 1e6
        return Trial(
            stage=SCREENING,
            problem=self._problem.id,
            candidate=request.candidate,
            status=outcome.status if samples or outcome.status is not Status.OK else Status.DIED,
            launches=len(samples),
            samples_us=samples,
        )


class _Simulation:
    """One problem's search session and its bench."""

    def __init__(
        self, bench: SimulatedBench, session: SearchSession, search_problem: SearchProblem, budget_trials: int | None
    ) -> None:
        self.bench, self.session, self.search_problem = bench, session, search_problem
        self._budget_trials = budget_trials
        self._latest: dict[Candidate, Trial] = {}
        self._trace: list[TracePoint] = []
        self._leader: Candidate | None = None

    def step(self, *, in_time: bool) -> None:
        """Evaluate the requests of the search one after another, then tell it all results.

        Requests beyond the budget are dropped, and the search ends with its results so far, as in a run.
        """
        if not in_time:
            self.session.end(0)
        trials, dropped = [], 0
        for request in self.session.ask():
            if self.bench.evaluations == self._budget_trials and request.candidate not in self._latest:
                dropped += 1
                continue
            trial = self.bench.evaluate(request)
            trials.append(trial)
            self._latest[trial.candidate] = trial
            self.search_problem.history.learn(trial)
            self._leader = self._leader_after(trial)
            self._trace.append(TracePoint(at_s=self.bench.at_s, evaluations=self.bench.evaluations, best=self._leader))
        if trials:
            self.session.tell(trials)
        if dropped:
            self.session.end(dropped)

    def _leader_after(self, trial: Trial) -> Candidate | None:
        """The fastest candidate so far; times of more launches take precedence."""
        leader = self._latest.get(self._leader) if self._leader is not None else None
        if trial.candidate == self._leader or leader is None:
            ranked = self._ranked()
            return ranked[0] if ranked else None
        return min(leader, trial, key=_rank_key).candidate

    def _ranked(self) -> list[Candidate]:
        """Timed candidates, most launches first, then by time: times of different launches are not compared."""
        timed = [t for t in self._latest.values() if t.time_us is not None]
        return [t.candidate for t in sorted(timed, key=_rank_key)]

    def result(self, outcomes: Mapping[Candidate, Outcome], rounds: int, rng: random.Random) -> SimulatedRun:
        """Simulate the finals: a sample averages many launches, so it is the median of a bootstrap of the record."""
        finalists = self._ranked()[: self.search_problem.keep]
        times, finals = {}, {}
        for candidate in finalists:
            samples = outcomes[candidate].samples_us
            medians = [median(rng.choices(samples, k=len(samples))) for _ in range(rounds)]
            times[candidate] = sum(medians) / rounds
            finals[candidate] = tuple(medians)
        return SimulatedRun(
            problem=self.search_problem.problem,
            trace=self._trace,
            chosen=min(times, key=lambda c: (times[c], c.id)) if times else None,
            evaluations=self.bench.evaluations,
            finals_us=finals,
        )


def _rank_key(trial: Trial) -> tuple[bool, int, float, str]:
    return trial.time_us is None, -trial.launches, trial.time_us or 0.0, trial.candidate.id


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Settings of a replay."""

    keep: int
    """Number of finalists."""
    rounds: int
    """Rounds of the finals."""
    compile_slots: int
    """Number of compile processes."""


def simulate(
    recording: RecordedSpace,
    problems: Sequence[tuple[Problem, GemmSpec]],
    search: Search,
    history: History,
    config: ReplayConfig,
    seed: int,
    observe: Callable[[Trial, float], None] | None = None,
) -> list[SimulatedRun]:
    """Run the search on these problems interleaved, as in a run: they share builds and `history`.

    `observe` is called with every trial and the simulated seconds of all problems at its end.
    """
    rng = random.Random(seed)
    history.facts |= recording.facts if not history.facts else {}
    simulations = []
    for problem, spec in problems:
        outcomes = recording.problems[problem]
        builds = {c.id: o.builds for c, o in outcomes.items()}
        history.add_problem(problem, spec, builds)
        search_problem = SearchProblem(
            problem=problem,
            spec=spec,
            device=recording.device,
            candidates=tuple(outcomes),
            builds=builds,
            launches=SCREEN_LAUNCHES,
            keep=config.keep,
            history=history,
        )
        bench = SimulatedBench(recording, problem, config.compile_slots, random.Random(rng.random()))
        simulations.append(_Simulation(bench, search.start(search_problem), search_problem, search.budget_trials))
        if observe is not None:
            bench.observe = _total_observer(observe, simulations)
    while not all(p.session.finished for p in simulations):
        for simulation in simulations:
            spent_s = sum(p.bench.at_s for p in simulations)  # one device times all problems
            simulation.step(in_time=search.budget_s is None or spent_s < search.budget_s)
    return [p.result(recording.problems[p.search_problem.problem], config.rounds, rng) for p in simulations]


def _total_observer(
    observe: Callable[[Trial, float], None], simulations: Sequence[_Simulation]
) -> Callable[[Trial], None]:
    """An observer of one bench that adds the seconds of all: one device times all problems."""
    return lambda trial: observe(trial, sum(simulation.bench.at_s for simulation in simulations))


def random_best(times: Sequence[float]) -> Array:
    """Expected minimum of n candidates drawn without replacement, for n = 1 ... len(times)."""
    ordered = np.sort(np.asarray(times, dtype=np.float64))
    count = len(ordered)
    steps = np.diff(ordered)
    slower = np.arange(count - 1, 0, -1, dtype=np.float64)  # candidates slower than each but the last
    chance = np.ones(count - 1)  # that all drawn are slower than it
    expected = np.empty(count)
    for drawn in range(count):
        chance = chance * np.maximum(slower - drawn, 0) / (count - drawn)
        expected[drawn] = ordered[0] + float(chance @ steps)
    return expected


def score(
    times: Sequence[float], seconds_each: float, curves: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> float:
    """The mean over time of (random's best - found) / (random's best - optimum); can be below 0.

    `times`: of all valid candidates; `seconds_each`: cost of a random candidate; `curves`: (moments in seconds, time of
    the best candidate then) per seed. The mean ends where random search is at 95 % of the way from median to optimum.
    """
    expected = random_best(times)
    optimum, middle = min(times), float(np.median(times))
    enough = np.flatnonzero(expected <= middle - _CUTOFF * (middle - optimum))
    end_s = (int(enough[0]) + 1 if len(enough) else len(expected)) * seconds_each
    total = 0.0
    for moment in np.linspace(end_s / _POINTS, end_s, _POINTS):
        drawn = min(len(expected), max(1, int(moment / seconds_each)))
        found = float(np.mean([_at(curve, moment, middle) for curve in curves]))
        gap = float(expected[drawn - 1]) - optimum
        total += (float(expected[drawn - 1]) - found) / gap if gap > 0 else float(found <= optimum)
    return total / _POINTS


def _at(curve: tuple[Sequence[float], Sequence[float]], moment: float, before: float) -> float:
    """The best time at a moment; `before` until the first result."""
    known = int(np.searchsorted(curve[0], moment, side="right"))
    return curve[1][known - 1] if known else before


@dataclass(frozen=True, kw_only=True)
class ReplaySearch(Search):
    """Runs `algorithm` on each of the `recorded` spaces with `seeds` seeds, in the pipeline `gemmpipe replay`."""

    algorithm: Search
    recorded: tuple[str, ...]
    seeds: int
    compile_slots: int
    rounds: int
    transfer: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, seeds=self.seeds, compile_slots=self.compile_slots, rounds=self.rounds)
        if self.journals or self.algorithm.journals:
            raise ValueError(
                "journals given, expected none; search.transfer=true transfers from other recorded problems"
            )

    def start(self, search_problem: SearchProblem) -> SearchSession:
        raise UserError("search=replay: no search on a device; expected gemmpipe replay search.recorded=[...]")

    @property
    def limited(self) -> Search:
        """The evaluated search, with its own budget or else this one, in recorded seconds."""
        algorithm = self.algorithm
        return replace(
            algorithm,
            budget_s=self.budget_s if algorithm.budget_s is None else algorithm.budget_s,
            budget_trials=self.budget_trials if algorithm.budget_trials is None else algorithm.budget_trials,
        )

    def recordings(self, chosen: str = "") -> list[RecordedSpace]:
        """Read the recorded spaces, of shipped families or `chosen`. Raises UserError for none or an invalid one."""
        if not self.recorded:
            raise UserError("search.recorded: [] given, expected files such as tests/data/recorded/h200_a8w8.jsonl.xz")
        return [read(path, chosen) for path in named_files("search.recorded", self.recorded, "a recorded space")]

    def config_for(self, keep: int) -> ReplayConfig:
        """The settings of a replay with `keep` finalists."""
        return ReplayConfig(keep=keep, rounds=self.rounds, compile_slots=self.compile_slots)
