"""A search against a recorded space: it is answered from the record, and charged what that cost.

Kernel Tuner's score of a search: 0 is random search, 1 the optimum at once (Willemsen et al., FGCS 2024).

search=replay: another search, answered from recorded spaces instead of a GPU.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemmpipe.core.data import Candidate, Problem, Status, Trial, median
from gemmpipe.core.errors import UserError, check_at_least
from gemmpipe.core.files import named_files
from gemmpipe.family import GemmSpec
from gemmpipe.search import Search, SearchProblem, SearchSession, TrialRequest
from gemmpipe.search.features import Array
from gemmpipe.search.history import History
from gemmpipe.search.recorded import Outcome, RecordedSpace, read

_STAGE = "screen"
_SCREEN_LAUNCHES = 2  # the screen timer's `iters`: what a search asks for that wants every candidate timed alike


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePoint:
    """After one answer: when it came, how many candidates were timed by then, and who seemed the fastest."""

    at_s: float
    evaluations: int
    best: Candidate | None


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedRun:
    """One search on one problem, from begin to end."""

    problem: Problem
    trace: Sequence[TracePoint]
    chosen: Candidate | None
    """The winner of finals among those that the search left on top."""
    evaluations: int
    """Candidates timed, failures included."""


class SimulatedBench:
    """The record of one problem as a machine: compile slots beside a device that times one candidate at a time."""

    def __init__(self, recording: RecordedSpace, problem: Problem, slots: int, rng: random.Random) -> None:
        self._recording = recording
        self._outcomes = recording.problems[problem]
        self._problem = problem
        self._slots = slots
        self._rng = rng
        self._seen: set[Candidate] = set()
        self._built: set[str] = set()
        self.at_s = 0.0

    @property
    def evaluations(self) -> int:
        return len(self._seen)

    def evaluate(self, request: TrialRequest) -> Trial:
        """Compile what is not built yet, and run; the clock goes on by what that took."""
        builds = set(self._outcomes[request.candidate].builds) - self._built
        self._built |= builds
        # The slots are busy with other problems' builds as well: a build costs its share of them.
        self.at_s += sum(self._recording.facts[b].compile_s for b in builds) / self._slots
        return self._run(request)

    def _run(self, request: TrialRequest) -> Trial:
        outcome = self._outcomes[request.candidate]
        if request.candidate not in self._seen:
            self._seen.add(request.candidate)
            self.at_s += self._recording.first_launch_s
        samples = tuple(self._rng.choices(outcome.samples_us, k=request.launches)) if outcome.samples_us else ()
        self.at_s += sum(samples) / 1e6
        return Trial(
            stage=_STAGE,
            problem=self._problem.id,
            candidate=request.candidate,
            status=outcome.status if samples or outcome.status is not Status.OK else Status.DIED,
            launches=len(samples),
            samples_us=samples,
        )


class _Simulation:
    """One problem's search at its bench."""

    def __init__(
        self, bench: SimulatedBench, session: SearchSession, search_problem: SearchProblem, budget_trials: int | None
    ) -> None:
        self.bench, self.session, self.search_problem = bench, session, search_problem
        self._budget_trials = budget_trials
        self._latest: dict[Candidate, Trial] = {}
        self._trace: list[TracePoint] = []
        self._leader: Candidate | None = None

    def step(self, *, in_time: bool) -> None:
        """Answer what the search asks for, one after the other; it is told when all are done.

        What the budget leaves out is dropped, and the search ends with what it knows, as in a run.
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
        """Who seems the fastest now; a longer look at the leader, or at another, counts more than a glance."""
        leader = self._latest.get(self._leader) if self._leader is not None else None
        if trial.candidate == self._leader or leader is None:
            ranked = self._ranked()
            return ranked[0] if ranked else None
        return min(leader, trial, key=_rank_key).candidate

    def _ranked(self) -> list[Candidate]:
        """Those that were looked at longest first, then by time: a glance is not compared with a long look."""
        timed = [t for t in self._latest.values() if t.time_us is not None]
        return [t.candidate for t in sorted(timed, key=_rank_key)]

    def result(self, outcomes: Mapping[Candidate, Outcome], rounds: int, rng: random.Random) -> SimulatedRun:
        """The finals: a sample a round averages over many launches, so each is a bootstrap of the whole record."""
        finalists = self._ranked()[: self.search_problem.keep]
        times = {}
        for candidate in finalists:
            samples = outcomes[candidate].samples_us
            medians = [median(rng.choices(samples, k=len(samples))) for _ in range(rounds)]
            times[candidate] = sum(medians) / rounds
        return SimulatedRun(
            problem=self.search_problem.problem,
            trace=self._trace,
            chosen=min(times, key=lambda c: (times[c], c.id)) if times else None,
            evaluations=self.bench.evaluations,
        )


def _rank_key(trial: Trial) -> tuple[bool, int, float, str]:
    return trial.time_us is None, -trial.launches, trial.time_us or 0.0, trial.candidate.id


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How a search is replayed."""

    keep: int
    rounds: int
    """Of the finals."""
    compile_slots: int
    """Compile processes."""


def simulate(
    recording: RecordedSpace,
    problems: Sequence[tuple[Problem, GemmSpec]],
    search: Search,
    history: History,
    terms: ReplayConfig,
    seed: int,
) -> list[SimulatedRun]:
    """The search on these problems side by side, as in a run: builds are shared, and what `lore` learns of each."""
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
            launches=_SCREEN_LAUNCHES,
            keep=terms.keep,
            history=history,
        )
        bench = SimulatedBench(recording, problem, terms.compile_slots, random.Random(rng.random()))
        simulations.append(_Simulation(bench, search.start(search_problem), search_problem, search.budget_trials))
    while not all(p.session.finished for p in simulations):
        for simulation in simulations:
            spent_s = sum(p.bench.at_s for p in simulations)  # one device times them all
            simulation.step(in_time=search.budget_s is None or spent_s < search.budget_s)
    return [p.result(recording.problems[p.search_problem.problem], terms.rounds, rng) for p in simulations]


_CUTOFF = 0.95  # of the way from the median to the optimum: when random search is there, time is up
_POINTS = 50


def random_best(times: Sequence[float]) -> Array:
    """Expected least of n candidates drawn without replacement, for n = 1 ... all of them."""
    ordered = np.sort(np.asarray(times, dtype=np.float64))
    count = len(ordered)
    steps = np.diff(ordered)
    behind = np.arange(count - 1, 0, -1, dtype=np.float64)  # candidates slower than each but the last
    beyond = np.ones(count - 1)  # the chance that all drawn are slower than it
    expected = np.empty(count)
    for drawn in range(count):
        beyond = beyond * np.maximum(behind - drawn, 0) / (count - drawn)
        expected[drawn] = ordered[0] + float(beyond @ steps)
    return expected


def score(
    times: Sequence[float], seconds_each: float, curves: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> float:
    """The mean over time of (random's best - found) / (random's best - optimum); can be below 0.

    `times` of every valid candidate; a random candidate costs `seconds_each`; each curve is (moments in seconds, time
    of what seemed best then), one a seed. Time runs to where random search is at 95 % of its way.
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
    """What seemed best at a moment; before the first answer, a candidate like any other."""
    place = int(np.searchsorted(curve[0], moment, side="right"))
    return curve[1][place - 1] if place else before


@dataclass(frozen=True, kw_only=True)
class ReplaySearch(Search):
    """Runs the search `of` on each of the `recorded` spaces with `seeds` seeds; `gemmpipe replay` carries it out."""

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
            raise ValueError("journals given, expected none: search.transfer=true tells what earlier runs would have")

    def start(self, search_problem: SearchProblem) -> SearchSession:
        raise UserError("search=replay: answers from a record, without a device: gemmpipe replay search.recorded=[...]")

    @property
    def limited(self) -> Search:
        """The search that is tried, within its own budget or else this one; in recorded seconds."""
        algorithm = self.algorithm
        return replace(
            algorithm,
            budget_s=self.budget_s if algorithm.budget_s is None else algorithm.budget_s,
            budget_trials=self.budget_trials if algorithm.budget_trials is None else algorithm.budget_trials,
        )

    def recordings(self, chosen: str = "") -> list[RecordedSpace]:
        """The recorded spaces, of shipped families or of the `chosen` one. Raises UserError for what is none."""
        if not self.recorded:
            raise UserError("search.recorded: [] given, expected files such as tests/data/recorded/h200_a8w8.jsonl.xz")
        return [read(path, chosen) for path in named_files("search.recorded", self.recorded, "a recorded space")]

    def terms(self, keep: int) -> ReplayConfig:
        """How it is replayed, with so many finalists."""
        return ReplayConfig(keep=keep, rounds=self.rounds, compile_slots=self.compile_slots)
