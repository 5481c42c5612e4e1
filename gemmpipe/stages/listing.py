"""Every candidate of a problem, what it must have compiled, and what was left out for which reason."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

from gemmpipe.data import Build, Candidate, Device, Problem, Status, Trial, canonical
from gemmpipe.family import Family, GemmSpec, Implementation, load_family
from gemmpipe.space import Space
from gemmpipe.stages import Context

T = TypeVar("T")

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

    def add(self, other: "SpaceReport") -> None:
        """Take in another problem's."""
        self.points += other.points
        self.normalised += other.normalised
        self.rules.update(other.rules)
        self.absent |= other.absent

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
    """By candidate id."""
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
    """All candidates of a problem: the space's, the libraries' and the incumbents, each once and normalised."""
    spec = family.spec(problem)
    report = SpaceReport()
    fit: dict[Candidate, Implementation] = {}
    passed_over: list[Trial] = []
    seen: set[Candidate] = set()
    own = {i.label for i in family.implementations}
    for implementation in implementations:
        known = [c.knobs for c in incumbents if c.backend == implementation.label]
        kept = {Candidate.of(implementation.label, implementation.normalise(spec, knobs, device)) for knobs in known}
        missing = implementation.unavailable(device)
        points = (*implementation.points(spec, device, space), *known)
        if missing and not points:
            report.absent[implementation.label] = missing
        for point in points:
            report.points += 1
            candidate = _same(Candidate.of(implementation.label, implementation.normalise(spec, point, device)))
            if candidate in seen:
                continue
            seen.add(candidate)
            reason, status = missing or implementation.misfit(spec, candidate.knobs, device), Status.UNFIT
            if reason is None and candidate not in kept:
                reason, status = implementation.wasteful(spec, candidate.knobs, device), Status.DROPPED
            if reason is None:
                fit[candidate] = implementation
            else:
                report.rules[f"{implementation.label}: {reason.split(':')[0]}"] += 1
                passed_over.append(
                    Trial(stage="screen", problem=problem.id, candidate=candidate, status=status, error=reason)
                )
    report.normalised += len(seen)
    return Listing(
        problem=problem,
        spec=spec,
        candidates=tuple(fit),
        builds={c.id: tuple(_same(b) for b in i.builds(spec, c.knobs, device)) for c, i in fit.items()},
        passed_over=tuple(passed_over),
        kernel_names={c.id: i.kernel_name(c.knobs) for c, i in fit.items()},
        report=report,
        given=tuple(c for c in fit if c.backend not in own or c in incumbents),
    )


@lru_cache(maxsize=1 << 15)
def _same(value: T) -> T:
    """One object for equal ones, also of other problems: its id is computed once, and it is pickled once."""
    return value
