"""The candidates of a problem, their builds, and the configurations that are excluded, each with a reason.

An implementation classifies a candidate before it is tried: it fits, it is unsupported or dominated, or the
implementation's own code raised.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

from gemmpipe.backends import missing_reason
from gemmpipe.core.data import Build, Candidate, Device, Knobs, Problem, Status, canonical_json
from gemmpipe.core.events import counted
from gemmpipe.family import Family, GemmSpec, Implementation, load_family
from gemmpipe.family.guard import PluginError, call_plugin
from gemmpipe.family.space import Space
from gemmpipe.stages import Context
from gemmpipe.stages.needed_builds import screening_builds

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FilterResult:
    """A candidate that is tried, with its builds; with a status, one that is excluded."""

    status: Status | None = None
    reason: str = ""
    builds: tuple[Build, ...] = ()
    """The builds that screening needs."""
    kernel_name: str = ""
    location: str = ""
    """`file:line` where the implementation's own code raised, if it did."""

    @classmethod
    def from_error(cls, raised: PluginError) -> "FilterResult":
        """Nothing was launched, but as with a launch the implementation's own code failed."""
        return cls(status=Status.LAUNCH_ERROR, reason=str(raised), location=raised.place)

    @property
    def reason_kind(self) -> str:
        """The part of the reason that it shares with others, for counts."""
        return "its own code raised" if self.status is Status.LAUNCH_ERROR else self.reason.split(":")[0]


@dataclass(frozen=True, kw_only=True)
class EnumeratedConfigs:
    """The configurations of an implementation for one product on one device."""

    missing: str | None = None
    """The reason why nothing of it runs here."""
    configs: tuple[Knobs, ...] = ()
    """As the implementation lists them, before normalisation."""


@dataclass(frozen=True, kw_only=True)
class CandidateFilter:
    """The constraints of an implementation for one product on one device."""

    implementation: Implementation
    spec: GemmSpec
    device: Device

    def list_configs(self, space: Space) -> EnumeratedConfigs:
        """Raises PluginError where the implementation's own code does."""
        own, spec, device = self.implementation, self.spec, self.device
        return call_plugin(
            own,
            lambda: EnumeratedConfigs(
                missing=missing_reason(own, spec, device), configs=tuple(own.configs(spec, device, space))
            ),
        )

    def candidate(self, config: Knobs) -> tuple[Candidate, FilterResult | None]:
        """The candidate of a raw configuration; where that cannot be normalised, the raw values and the failure."""
        own, spec, device = self.implementation, self.spec, self.device
        try:
            return call_plugin(own, lambda: _checked_candidate(own.label, own.normalise(spec, config, device))), None
        except PluginError as raised:
            return _raw_candidate(own.label, config), FilterResult.from_error(raised)

    def check(self, candidate: Candidate, missing: str | None = None, *, keep_dominated: bool = False) -> FilterResult:
        """`missing`: the reason why nothing runs here; `keep_dominated`: also tries a candidate that cannot win."""
        try:
            return call_plugin(self.implementation, lambda: self._check(candidate, missing, keep_dominated))
        except PluginError as raised:
            return FilterResult.from_error(raised)

    def valid_candidates(self, listed: EnumeratedConfigs) -> Iterator[Candidate]:
        """Each of the listed candidates that can run, once, also those that cannot win."""
        seen: set[Candidate] = set()
        for candidate, failure in map(self.candidate, listed.configs):
            if candidate not in seen:
                seen.add(candidate)
                if failure is None and self.check(candidate, listed.missing, keep_dominated=True).status is None:
                    yield candidate

    def _check(self, candidate: Candidate, missing: str | None, keep_dominated: bool) -> FilterResult:
        own, knobs, arguments = self.implementation, candidate.knobs, (self.spec, candidate.knobs, self.device)
        reason, status = missing or own.unsupported_reason(*arguments), Status.UNSUPPORTED
        if reason is None and not keep_dominated:
            reason, status = own.dominated_reason(*arguments), Status.PRUNED
        if reason is None:
            builds = tuple(interned(b) for b in screening_builds(own, *arguments))
            return FilterResult(builds=builds, kernel_name=own.kernel_name(knobs))
        if not isinstance(reason, str):
            raise TypeError(f"{type(reason).__name__} as the reason against a candidate, expected str or None")
        return FilterResult(status=status, reason=reason)


def _checked_candidate(label: str, knobs: Knobs) -> Candidate:
    """Raises TypeError for knobs that JSON cannot hold."""
    candidate: Candidate = interned(Candidate.of(label, knobs))
    assert candidate.id
    return candidate


def _raw_candidate(label: str, config: Knobs) -> Candidate:
    try:
        return _checked_candidate(label, config)
    except (AttributeError, TypeError, ValueError):
        return Candidate.of(label, {"point": repr(config)[:300]})


@lru_cache(maxsize=1 << 15)
def interned(value: T) -> T:
    """One object for equal values, also of other problems: its id is computed once, and it is pickled once."""
    return value


EXCLUDED_COLUMNS = ("candidate", "libtype", "config", "status", "error")
"""The columns of the trials table that an excluded candidate has."""


@dataclass(kw_only=True)
class SpaceReport:
    """Counts of configurations: listed, excluded by each rule, and the backends without any."""

    configs: int = 0
    normalised: int = 0
    excluded_by: Counter[str] = field(default_factory=Counter)
    fitting: set[str] = field(default_factory=set)
    """Labels with a candidate that fits a problem."""
    missing: dict[str, str] = field(default_factory=dict)
    """Label -> reason why nothing of it can run."""
    unavailable: dict[str, str] = field(default_factory=dict)
    """Label -> reason why it is not available; for backends that list candidates only where they are available."""
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of problems by (label, the error that it raised instead of listing configurations)."""
    raised: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of candidates by (label, `file:line` where its constraints raised)."""
    examples: dict[str, str] = field(default_factory=dict)
    """By `file:line`, the first error raised there."""

    def add(self, other: "SpaceReport") -> None:
        """Adds another problem's counts."""
        self.configs += other.configs
        self.normalised += other.normalised
        self.excluded_by.update(other.excluded_by)
        self.fitting |= other.fitting
        self.missing |= other.missing
        self.unavailable |= other.unavailable
        self.left_out.update(other.left_out)
        self.raised.update(other.raised)
        self.examples = other.examples | self.examples

    def count_excluded(self, label: str, result: FilterResult) -> None:
        """Counts an excluded candidate."""
        self.excluded_by[f"{label}: {result.reason_kind}"] += 1
        if result.status is Status.LAUNCH_ERROR:
            self.raised[label, result.location] += 1
            self.examples.setdefault(result.location, result.reason)

    def warnings(self) -> list[str]:
        """Warnings about errors in the implementations' own code."""
        left_out = [
            f"{label}: left out of {counted(n, 'problem')}: {text}" for (label, text), n in self.left_out.items()
        ]
        raised = [
            f"{label}: {counted(n, 'candidate')} failed: {self.examples[place]}"
            for (label, place), n in self.raised.items()
        ]
        return left_out + raised

    def lines(self) -> list[str]:
        """Lines with the count before and after each rule."""
        left = self.configs
        lines = [f"space: {left:,} configurations over all problems"]
        if self.normalised != left:
            lines.append(f"  {left:,} -> {self.normalised:,}  duplicates after normalisation")
            left = self.normalised
        for rule, count in self.excluded_by.most_common():
            lines.append(f"  {left:,} -> {left - count:,}  {rule}")
            left -= count
        return [*lines, *(f"  none of {label}: {reason}" for label, reason in self.unavailable.items())]


@dataclass(frozen=True, kw_only=True)
class CandidateSummary:
    """A problem's candidates without their builds: small enough to be sent from one process to another."""

    problem: Problem
    spec: GemmSpec
    ids: frozenset[str]
    """The ids of all candidates that fit."""
    required: tuple[Candidate, ...]
    """Candidates that every search times: the libraries', the incumbents, and the default."""
    excluded: Mapping[str, Sequence[str]]
    """Candidates that do not fit or cannot win: cells by column of `EXCLUDED_COLUMNS`."""
    report: SpaceReport
    default: Candidate | None = None
    """The candidate that the run time calls without a row, if it is an own kernel of the space: it reaches the finals,
    so that no row is slower than none."""


@dataclass(frozen=True, kw_only=True)
class CandidateList:
    """The candidates of one problem that fit, with their builds."""

    summary: CandidateSummary
    candidates: tuple[Candidate, ...]
    builds: dict[str, tuple[Build, ...]]
    """By candidate id, the builds that screening needs."""
    kernel_names: dict[str, str]
    """By candidate id."""

    @property
    def problem(self) -> Problem:
        return self.summary.problem

    @property
    def spec(self) -> GemmSpec:
        return self.summary.spec


def listing_task(problem: Problem, context: Context, incumbents: Sequence[Candidate]) -> Callable[[], CandidateList]:
    """A picklable task that lists a problem's candidates."""
    arguments = (context.implementations, context.device, context.space, incumbents)
    return partial(list_by_family_name, problem, context.family.module, *arguments)


def list_by_family_name(
    problem: Problem,
    family: str,
    implementations: Sequence[Implementation],
    device: Device,
    space: Space,
    incumbents: Sequence[Candidate],
) -> CandidateList:
    """`list_candidates` as a task for another process: a family cannot be pickled, its name can."""
    return list_candidates(problem, load_family(family), implementations, device, space, incumbents)


def list_candidates(
    problem: Problem,
    family: Family,
    implementations: Sequence[Implementation],
    device: Device,
    space: Space,
    incumbents: Sequence[Candidate],
) -> CandidateList:
    """All candidates of a problem: of the space, of the libraries, and the incumbents, each once and normalised.

    Where an implementation's own code raises, the candidate that it checked is excluded, or the implementation if it
    listed configurations.
    """
    spec = family.spec(problem)
    report = SpaceReport()
    fit: dict[Candidate, FilterResult] = {}
    excluded: list[tuple[str, ...]] = []
    for implementation in implementations:
        candidate_filter = CandidateFilter(implementation=implementation, spec=spec, device=device)
        known = [c.knobs for c in incumbents if c.backend == implementation.label]
        for candidate, result in _filtered(candidate_filter, space, known, report):
            if result.status is None:
                fit[candidate] = result
                report.fitting.add(implementation.label)
            else:
                excluded.append(_excluded_row(candidate, result))
    own = {i.label for i in family.implementations}
    defaults = _default_candidates(spec, [i for i in implementations if i.label in own], device)
    default = next((candidate for candidate in defaults if candidate in fit), None)
    summary = CandidateSummary(
        problem=problem,
        spec=spec,
        ids=frozenset(c.id for c in fit),
        required=tuple(c for c in fit if c.backend not in own or c in incumbents or c == default),
        excluded={name: [row[i] for row in excluded] for i, name in enumerate(EXCLUDED_COLUMNS)},
        report=report,
        default=default,
    )
    return CandidateList(
        summary=summary,
        candidates=tuple(fit),
        builds={c.id: result.builds for c, result in fit.items()},
        kernel_names={c.id: result.kernel_name for c, result in fit.items()},
    )


def _default_candidates(spec: GemmSpec, own: Sequence[Implementation], device: Device) -> Iterator[Candidate]:
    """The default configurations of a family's own kernels for this size, in the order of runtime.select."""
    for implementation in own:
        with suppress(PluginError):
            knobs = call_plugin(implementation, partial(implementation.default_config, spec, device))
            if knobs is not None:
                yield Candidate.of(implementation.label, knobs)


def _filtered(
    candidate_filter: CandidateFilter, space: Space, known: Sequence[Knobs], report: SpaceReport
) -> Iterator[tuple[Candidate, FilterResult]]:
    """The result for each candidate of an implementation, once, and for the implementation where it lists none."""
    label, listed = candidate_filter.implementation.label, EnumeratedConfigs()
    try:
        listed = candidate_filter.list_configs(space)
    except PluginError as raised:
        report.left_out[label, str(raised)] += 1
        yield Candidate.of(label, {}), FilterResult.from_error(raised)
    configs = (*listed.configs, *known)
    if listed.missing:
        report.missing[label] = listed.missing
        if not configs:
            report.unavailable[label] = listed.missing
    kept = {candidate_filter.candidate(knobs)[0] for knobs in known}
    seen: set[Candidate] = set()
    for config in configs:
        candidate, failure = candidate_filter.candidate(config)
        if candidate not in seen:
            seen.add(candidate)
            result = failure or candidate_filter.check(candidate, listed.missing, keep_dominated=candidate in kept)
            if result.status is not None:
                report.count_excluded(label, result)
            yield candidate, result
    report.configs += len(configs)
    report.normalised += len(seen)


def _excluded_row(candidate: Candidate, result: FilterResult) -> tuple[str, ...]:
    """The cells of `EXCLUDED_COLUMNS`."""
    return candidate.id, candidate.backend, canonical_json(candidate.knobs), str(result.status), result.reason
