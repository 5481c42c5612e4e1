"""Every candidate of a problem, what it must have compiled, and what was left out for which reason."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from gemmpipe.asking import Raised
from gemmpipe.data import Build, Candidate, Device, Knobs, Problem, Status, Trial, canonical
from gemmpipe.family import Family, GemmSpec, Implementation, load_family
from gemmpipe.space import Space
from gemmpipe.stages import Context
from gemmpipe.stages.verdict import Judge, Offer, Verdict

PASSED_OVER = ("candidate", "libtype", "config", "status", "error")
"""What is told of a candidate that is not tried, as columns of the trials table."""


@dataclass(kw_only=True)
class SpaceReport:
    """How many points the spaces held, what took how many away, and which backends had none to offer."""

    points: int = 0
    normalised: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    absent: dict[str, str] = field(default_factory=dict)
    """Label -> why it is not available; of backends that only know their candidates where they are."""
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Problems by (label, what it raised instead of naming its candidates)."""
    raised: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Candidates by (label, file and line at which its own code raised instead of judging them)."""
    examples: dict[str, str] = field(default_factory=dict)
    """By file and line, what was raised there first."""

    def add(self, other: "SpaceReport") -> None:
        """Take in another problem's."""
        self.points += other.points
        self.normalised += other.normalised
        self.rules.update(other.rules)
        self.absent |= other.absent
        self.left_out.update(other.left_out)
        self.raised.update(other.raised)
        self.examples = other.examples | self.examples

    def pass_over(self, label: str, verdict: Verdict) -> None:
        """Count a candidate that is not tried."""
        self.rules[f"{label}: {verdict.rule}"] += 1
        if verdict.status is Status.LAUNCH_ERROR:
            self.raised[label, verdict.place] += 1
            self.examples.setdefault(verdict.place, verdict.reason)

    def warnings(self) -> list[str]:
        """What the implementations' own code did not mean to do."""
        left_out = [f"{label}: left out of {_many(n, 'problem')}: {text}" for (label, text), n in self.left_out.items()]
        raised = [
            f"{label}: {_many(n, 'candidate')} failed: {self.examples[place]}"
            for (label, place), n in self.raised.items()
        ]
        return left_out + raised

    def lines(self) -> list[str]:
        """The count before and after each rule."""
        left = self.points
        lines = [f"space: {left:,} points over all problems"]
        if self.normalised != left:
            lines.append(f"  {left:,} -> {self.normalised:,}  the same once normalised")
            left = self.normalised
        for rule, count in self.rules.most_common():
            lines.append(f"  {left:,} -> {left - count:,}  {rule}")
            left -= count
        return [*lines, *(f"  nothing of {label}: {reason}" for label, reason in self.absent.items())]


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a listing where candidates are made known only as they are asked for."""

    problem: Problem
    spec: GemmSpec
    ids: frozenset[str]
    """Of all candidates that fit."""
    given: tuple[Candidate, ...]
    passed_over: Mapping[str, Sequence[str]]
    """Those that do not fit, or cannot win: the columns `PASSED_OVER`."""
    report: SpaceReport


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The candidates of one problem that fit, with their builds, and a trial for each that does not or cannot win."""

    problem: Problem
    spec: GemmSpec
    candidates: tuple[Candidate, ...]
    builds: dict[str, tuple[Build, ...]]
    """By candidate id, what screening needs."""
    passed_over: tuple[Trial, ...]
    kernel_names: dict[str, str]
    """By candidate id."""
    given: tuple[Candidate, ...] = ()
    """Candidates that every search looks at: the libraries', and the incumbents."""
    report: SpaceReport = field(default_factory=SpaceReport)

    def outline(self) -> Outline:
        """Small enough to be sent from a process to another."""
        rows = [
            (t.candidate.id, t.candidate.backend, canonical(t.candidate.knobs), str(t.status), t.error)
            for t in self.passed_over
        ]
        return Outline(
            problem=self.problem,
            spec=self.spec,
            ids=frozenset(c.id for c in self.candidates),
            given=self.given,
            passed_over={name: [row[i] for row in rows] for i, name in enumerate(PASSED_OVER)},
            report=self.report,
        )


def listing_task(problem: Problem, context: Context, incumbents: Sequence[Candidate]) -> Callable[[], Listing]:
    """Listing a problem, as something that can be pickled."""
    words = (context.implementations, context.device, context.space, incumbents)
    return partial(list_by_family_name, problem, context.family.module, *words)


def list_by_family_name(
    problem: Problem,
    family: str,
    implementations: Sequence[Implementation],
    device: Device,
    space: Space,
    incumbents: Sequence[Candidate],
) -> Listing:
    """The same, as a task for another process: a family cannot be pickled, its name can."""
    return list_candidates(problem, load_family(family), implementations, device, space, incumbents)


def list_candidates(
    problem: Problem,
    family: Family,
    implementations: Sequence[Implementation],
    device: Device,
    space: Space,
    incumbents: Sequence[Candidate],
) -> Listing:
    """All candidates of a problem: the space's, the libraries' and the incumbents, each once and normalised.

    Whose own code raises is passed over: a candidate where it was judged, an implementation where it named them.
    """
    spec = family.spec(problem)
    report = SpaceReport()
    fit: dict[Candidate, Verdict] = {}
    passed_over: list[Trial] = []
    for implementation in implementations:
        judge = Judge(implementation=implementation, spec=spec, device=device)
        known = [c.knobs for c in incumbents if c.backend == implementation.label]
        for candidate, verdict in _verdicts(judge, space, known, report):
            if verdict.status is None:
                fit[candidate] = verdict
            else:
                passed_over.append(_untried(problem, candidate, verdict))
    own = {i.label for i in family.implementations}
    return Listing(
        problem=problem,
        spec=spec,
        candidates=tuple(fit),
        builds={c.id: verdict.builds for c, verdict in fit.items()},
        passed_over=tuple(passed_over),
        kernel_names={c.id: verdict.kernel_name for c, verdict in fit.items()},
        report=report,
        given=tuple(c for c in fit if c.backend not in own or c in incumbents),
    )


def _verdicts(
    judge: Judge, space: Space, known: Sequence[Knobs], report: SpaceReport
) -> Iterator[tuple[Candidate, Verdict]]:
    """On each candidate of an implementation once, and on the implementation where it could not name them."""
    label, offer = judge.implementation.label, Offer()
    try:
        offer = judge.offer(space)
    except Raised as raised:
        report.left_out[label, str(raised)] += 1
        yield Candidate.of(label, {}), Verdict.failed(raised)
    points = (*offer.points, *known)
    if offer.missing and not points:
        report.absent[label] = offer.missing
    kept = {judge.candidate(knobs)[0] for knobs in known}
    seen: set[Candidate] = set()
    for point in points:
        candidate, failure = judge.candidate(point)
        if candidate not in seen:
            seen.add(candidate)
            verdict = failure or judge.verdict(candidate, offer.missing, spared=candidate in kept)
            if verdict.status is not None:
                report.pass_over(label, verdict)
            yield candidate, verdict
    report.points += len(points)
    report.normalised += len(seen)


def _untried(problem: Problem, candidate: Candidate, verdict: Verdict) -> Trial:
    status = verdict.status or Status.UNFIT
    return Trial(stage="screen", problem=problem.id, candidate=candidate, status=status, error=verdict.reason)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
