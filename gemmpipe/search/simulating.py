"""A search against a recorded space: it is answered from the record, and charged what that cost."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmpipe.data import Candidate, Problem, Status, Trial, median
from gemmpipe.family import GemmSpec
from gemmpipe.search import Hunt, Request, Search, Subject
from gemmpipe.search.lore import Lore
from gemmpipe.search.recording import Outcome, Recording

_STAGE = "screen"
_GLANCE = 2  # the screen timer's `iters`: what a search asks for that wants every candidate timed alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """After one answer: when it came, how many candidates were timed by then, and who seemed the fastest."""

    at_s: float
    evaluations: int
    best: Candidate | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """One search on one problem, from begin to end."""

    problem: Problem
    moments: Sequence[Moment]
    chosen: Candidate | None
    """The winner of finals among those that the search left on top."""
    evaluations: int
    """Candidates timed, failures included."""


class Bench:
    """The record of one problem as a machine: compile slots beside a device that times one candidate at a time."""

    def __init__(self, recording: Recording, problem: Problem, slots: int, dice: random.Random) -> None:
        self._recording = recording
        self._outcomes = recording.problems[problem]
        self._problem = problem
        self._slots = slots
        self._dice = dice
        self._seen: set[Candidate] = set()
        self._built: set[str] = set()
        self.at_s = 0.0

    @property
    def evaluations(self) -> int:
        return len(self._seen)

    def answer(self, request: Request) -> Trial:
        """Compile what is not built yet, and run; the clock goes on by what that took."""
        builds = set(self._outcomes[request.candidate].builds) - self._built
        self._built |= builds
        # The slots are busy with other problems' builds as well: a build costs its share of them.
        self.at_s += sum(self._recording.facts[b].compile_s for b in builds) / self._slots
        return self._run(request)

    def _run(self, request: Request) -> Trial:
        outcome = self._outcomes[request.candidate]
        if request.candidate not in self._seen:
            self._seen.add(request.candidate)
            self.at_s += self._recording.first_launch_s
        samples = tuple(self._dice.choices(outcome.samples_us, k=request.launches)) if outcome.samples_us else ()
        self.at_s += sum(samples) / 1e6
        return Trial(
            stage=_STAGE,
            problem=self._problem.id,
            candidate=request.candidate,
            status=outcome.status if samples or outcome.status is not Status.OK else Status.DIED,
            launches=len(samples),
            samples_us=samples,
        )


class _Player:
    """One problem's search at its bench."""

    def __init__(self, bench: Bench, hunt: Hunt, subject: Subject, budget_trials: int | None) -> None:
        self.bench, self.hunt, self.subject = bench, hunt, subject
        self._budget_trials = budget_trials
        self._latest: dict[Candidate, Trial] = {}
        self._moments: list[Moment] = []
        self._leader: Candidate | None = None

    def step(self, *, in_time: bool) -> None:
        """Answer what the search asks for, one after the other; it is told when all are done.

        What the budget leaves out is dropped, and the search ends with what it knows, as in a run.
        """
        if not in_time:
            self.hunt.end(0)
        trials, dropped = [], 0
        for request in self.hunt.ask():
            if self.bench.evaluations == self._budget_trials and request.candidate not in self._latest:
                dropped += 1
                continue
            trial = self.bench.answer(request)
            trials.append(trial)
            self._latest[trial.candidate] = trial
            self.subject.lore.learn(trial)
            self._leader = self._ahead(trial)
            self._moments.append(Moment(at_s=self.bench.at_s, evaluations=self.bench.evaluations, best=self._leader))
        if trials:
            self.hunt.tell(trials)
        if dropped:
            self.hunt.end(dropped)

    def _ahead(self, trial: Trial) -> Candidate | None:
        """Who seems the fastest now; a longer look at the leader, or at another, counts more than a glance."""
        leader = self._latest.get(self._leader) if self._leader is not None else None
        if trial.candidate == self._leader or leader is None:
            ranked = self._ranked()
            return ranked[0] if ranked else None
        return min(leader, trial, key=_merit).candidate

    def _ranked(self) -> list[Candidate]:
        """Those that were looked at longest first, then by time: a glance is not compared with a long look."""
        timed = [t for t in self._latest.values() if t.time_us is not None]
        return [t.candidate for t in sorted(timed, key=_merit)]

    def result(self, outcomes: Mapping[Candidate, Outcome], rounds: int, dice: random.Random) -> Replayed:
        """The finals: a sample a round averages over many launches, so each is a bootstrap of the whole record."""
        finalists = self._ranked()[: self.subject.keep]
        times = {}
        for candidate in finalists:
            samples = outcomes[candidate].samples_us
            medians = [median(dice.choices(samples, k=len(samples))) for _ in range(rounds)]
            times[candidate] = sum(medians) / rounds
        return Replayed(
            problem=self.subject.problem,
            moments=self._moments,
            chosen=min(times, key=lambda c: (times[c], c.id)) if times else None,
            evaluations=self.bench.evaluations,
        )


def _merit(trial: Trial) -> tuple[bool, int, float, str]:
    return trial.time_us is None, -trial.launches, trial.time_us or 0.0, trial.candidate.id


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a search is replayed."""

    keep: int
    rounds: int
    """Of the finals."""
    slots: int
    """Compile processes."""


def replay(
    recording: Recording,
    problems: Sequence[tuple[Problem, GemmSpec]],
    search: Search,
    lore: Lore,
    terms: Terms,
    seed: int,
) -> list[Replayed]:
    """The search on these problems side by side, as in a run: builds are shared, and what `lore` learns of each."""
    dice = random.Random(seed)
    lore.facts |= recording.facts if not lore.facts else {}
    players = []
    for problem, spec in problems:
        outcomes = recording.problems[problem]
        builds = {c.id: o.builds for c, o in outcomes.items()}
        lore.hear(problem, spec, builds)
        subject = Subject(
            problem=problem,
            spec=spec,
            device=recording.device,
            candidates=tuple(outcomes),
            builds=builds,
            launches=_GLANCE,
            keep=terms.keep,
            lore=lore,
        )
        bench = Bench(recording, problem, terms.slots, random.Random(dice.random()))
        players.append(_Player(bench, search.start(subject), subject, search.budget_trials))
    while not all(p.hunt.over for p in players):
        for player in players:
            spent_s = sum(p.bench.at_s for p in players)  # one device times them all
            player.step(in_time=search.budget_s is None or spent_s < search.budget_s)
    return [p.result(recording.problems[p.subject.problem], terms.rounds, dice) for p in players]
